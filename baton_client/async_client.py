"""The client for asyncio programs: `baton_client/client.py` with ``await``. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

import grpc

from baton_client import answers
from baton_client.addresses import OPTIONS, addresses
from baton_client.answers import Chunk, Completion, Model, Tokens
from baton_client.client import TIMEOUT_S
from baton_client.failures import failure
from baton_client.options import (
    ChatOptions,
    Message,
    Options,
    Prompt,
    TemplateOptions,
    chat_request,
    detokenize_request,
    generate_request,
    patience_s,
    tokenize_request,
)
from baton_client.retries import Attempts, RetryPolicy
from common.errors import BatonError, RequestCancelledError
from rpc.v1 import generation_pb2 as pb
from rpc.v1 import generation_pb2_grpc as pb_grpc

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]

T = TypeVar("T")


class AsyncClient:
    """See `baton_client.client.Client`. Cancelling a task that waits for an answer cancels the call, and the
    server frees all that it held.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        model: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: RetryPolicy | None = None,
    ) -> None:
        self._addresses = addresses(urls)
        self._model = model
        self._timeout_s = timeout_s
        self._retries = retries or RetryPolicy()
        self._rng = random.Random()
        self._place = 0
        self._channels: dict[int, grpc.aio.Channel] = {}
        self._closed = False

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer to a text, or to token ids."""
        request = await self._with_model(generate_request(prompt, options))
        return answers.completion(await self._call("Generate", request, patience_s(options, self._timeout_s)))

    async def chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Completion:
        """The whole answer to a conversation."""
        request = await self._with_model(chat_request(messages, options))
        return answers.completion(await self._call("Generate", request, patience_s(options, self._timeout_s)))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """The answer as it is made: iterate over it, within ``async with``."""
        return AsyncStream(self, generate_request(prompt, options), patience_s(options, self._timeout_s))

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> AsyncStream:
        return AsyncStream(self, chat_request(messages, options), patience_s(options, self._timeout_s))

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        add_special_tokens: bool | None = None,
        **template: Unpack[TemplateOptions],
    ) -> Tokens:
        """The ids of a text, or of a conversation as the model gets it."""
        request = tokenize_request(text, messages, add_special_tokens, template)
        return answers.tokens(await self._call("Tokenize", request, self._timeout_s))

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return cast(str, (await self._call("Detokenize", detokenize_request(tokens), self._timeout_s)).text)

    async def models(self) -> list[Model]:
        return answers.models(await self._call("ListModels", pb.ListModelsRequest(), self._timeout_s))

    async def close(self) -> None:
        """Ends its connections, and the calls that are under way."""
        self._closed = True
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────

    async def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        async def once(stub: Any, left_s: float | None, address: str) -> Any:
            return await getattr(stub, method)(request, timeout=left_s)

        return await self._tried(once, timeout_s)

    async def _tried(self, once: Callable[[Any, float | None, str], Awaitable[T]], timeout_s: float) -> T:
        """What ``once`` (of a stub, the seconds that are left, and the address) gives when a try succeeds."""
        deadline = time.monotonic() + timeout_s
        attempts = Attempts(self._retries, len(self._addresses), self._place, deadline, self._rng)
        while True:
            place = attempts.place
            address = self._addresses[place]
            try:
                result = await once(self._stub(place), attempts.left_s(time.monotonic()), address)
            except grpc.RpcError as error:
                wait_s = attempts.after(failure(error, address), time.monotonic())
            else:
                self._place = place  # this one is there; the next call begins with it
                return result
            await asyncio.sleep(wait_s)

    def _stub(self, place: int) -> pb_grpc.GenerationStub:
        if self._closed:
            raise RequestCancelledError("the client is closed")
        if place not in self._channels:
            self._channels[place] = grpc.aio.insecure_channel(self._addresses[place], options=list(OPTIONS))
        return pb_grpc.GenerationStub(self._channels[place])

    async def _with_model(self, request: pb.GenerateRequest) -> pb.GenerateRequest:
        if not request.model:
            if self._model is None:
                self._model = answers.only_model(await self.models())
            request.model = self._model
        return request


class AsyncStream(AsyncIterator[Chunk]):
    """Chunks as they arrive. The call is made by ``async with``, or with the first chunk; leaving ``async
    with``, or `close`, ends it, and the server frees all that it held.
    """

    def __init__(self, client: AsyncClient, request: pb.GenerateRequest, timeout_s: float) -> None:
        self.request_id = ""
        """Known as soon as the first chunk is there."""
        self._client = client
        self._request = request
        self._timeout_s = timeout_s
        self._call: Any = None
        self._address = ""
        self._first: pb.GenerateChunk | None = None
        self._opened = False
        self._failed = False
        self._closed = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()

    async def __anext__(self) -> Chunk:
        if self._closed.is_set() or self._failed:
            raise StopAsyncIteration
        try:
            await self._open()
            message, self._first = self._first, None
            if message is None:
                message = await self._call.read()
        except RequestCancelledError:
            if self._closed.is_set():  # by another task, before the first chunk
                raise StopAsyncIteration from None
            raise
        except asyncio.CancelledError:
            # gRPC says the same when another task closed the stream; then nobody cancelled this one.
            task = asyncio.current_task()
            if self._closed.is_set() and task is not None and not task.cancelling():
                raise StopAsyncIteration from None
            self._abandon()
            raise
        except grpc.RpcError as error:
            if self._closed.is_set():
                raise StopAsyncIteration from None
            raise failure(error, self._address, got_message=True).error from error
        if message is EOF:
            self._closed.set()
            raise StopAsyncIteration
        return answers.chunk(cast(pb.GenerateChunk, message))

    async def close(self) -> None:
        """Ends the call, if it has not ended."""
        self._closed.set()
        if self._call is not None:
            self._call.cancel()

    def _abandon(self) -> None:
        """A task that is cancelled does not always take gRPC's call with it: there is a moment in which the
        call is being set up and nobody is told."""
        self._failed = True
        if self._call is not None:
            self._call.cancel()

    async def _open(self) -> None:
        """Waits for the first chunk: what fails before it may be tried again."""
        if self._opened:
            return
        self._opened = True
        try:
            request = await self._client._with_model(self._request)
            first = await self._client._tried(lambda *where: self._begin(request, *where), self._timeout_s)
        except BaseException:
            self._abandon()
            raise
        self._first, self.request_id = first, first.request_id

    async def _begin(
        self, request: pb.GenerateRequest, stub: Any, left_s: float | None, address: str
    ) -> pb.GenerateChunk:
        if self._closed.is_set():
            raise RequestCancelledError("the stream was closed before it began")
        self._address = address
        self._call = stub.GenerateStream(request, timeout=left_s)
        message = await self._call.read()
        if message is EOF:
            raise BatonError(f"{address} ended the stream without a word")
        return cast(pb.GenerateChunk, message)
