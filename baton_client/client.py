"""The client for ordinary programs. Threads may share one.

It connects at its first call. Each call has a deadline, for all its tries together; what is tried again,
and when, is `baton_client/retries.py`'s.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

import grpc

from baton_client import answers
from baton_client.addresses import OPTIONS, addresses
from baton_client.answers import Chunk, Completion, Model, Tokens
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

TIMEOUT_S = 600.0
"""A call's time unless told otherwise."""

T = TypeVar("T")


class Client:
    """``urls``: one router's gRPC URL, or several of one cluster's (the next one is tried when one cannot be
    reached). ``model``: for requests that name none; without it the only served one. ``timeout_s``: likewise.

    Raises ConfigError for a URL that is none.
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
        self._lock = threading.Lock()
        self._channels: dict[int, grpc.Channel] = {}
        self._closed = False

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer to a text, or to token ids."""
        timeout_s = patience_s(options, self._timeout_s)
        request = self._with_model(generate_request(prompt, options))
        return answers.completion(self._call("Generate", request, timeout_s))

    def chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Completion:
        """The whole answer to a conversation."""
        timeout_s = patience_s(options, self._timeout_s)
        request = self._with_model(chat_request(messages, options))
        return answers.completion(self._call("Generate", request, timeout_s))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """The answer as it is made: iterate over it, within ``with``."""
        return Stream(self, generate_request(prompt, options), patience_s(options, self._timeout_s))

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Stream:
        return Stream(self, chat_request(messages, options), patience_s(options, self._timeout_s))

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        add_special_tokens: bool | None = None,
        **template: Unpack[TemplateOptions],
    ) -> Tokens:
        """The ids of a text, or of a conversation as the model gets it."""
        request = tokenize_request(text, messages, add_special_tokens, template)
        return answers.tokens(self._call("Tokenize", request, self._timeout_s))

    def detokenize(self, tokens: Sequence[int]) -> str:
        return cast(str, self._call("Detokenize", detokenize_request(tokens), self._timeout_s).text)

    def models(self) -> list[Model]:
        return answers.models(self._call("ListModels", pb.ListModelsRequest(), self._timeout_s))

    def close(self) -> None:
        """Ends its connections, and the calls that are under way."""
        with self._lock:
            self._closed = True
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────

    def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        def once(stub: Any, left_s: float | None, address: str) -> Any:
            return getattr(stub, method)(request, timeout=left_s)

        return self._tried(once, timeout_s, time.sleep)

    def _tried(
        self, once: Callable[[Any, float | None, str], T], timeout_s: float, sleep: Callable[[float], object]
    ) -> T:
        """What ``once`` (of a stub, the seconds that are left, and the address) gives when a try succeeds."""
        deadline = time.monotonic() + timeout_s
        attempts = Attempts(self._retries, len(self._addresses), self._place, deadline, self._rng)
        while True:
            place = attempts.place
            address = self._addresses[place]
            try:
                result = once(self._stub(place), attempts.left_s(time.monotonic()), address)
            except grpc.RpcError as error:
                wait_s = attempts.after(failure(error, address), time.monotonic())
            else:
                self._place = place  # this one is there; the next call begins with it
                return result
            sleep(wait_s)

    def _stub(self, place: int) -> pb_grpc.GenerationStub:
        with self._lock:
            if self._closed:
                raise RequestCancelledError("the client is closed")
            if place not in self._channels:
                self._channels[place] = grpc.insecure_channel(self._addresses[place], options=list(OPTIONS))
            # The generated types know asyncio's channels only.
            return pb_grpc.GenerationStub(cast(Any, self._channels[place]))

    def _with_model(self, request: pb.GenerateRequest) -> pb.GenerateRequest:
        if not request.model:
            if self._model is None:
                self._model = answers.only_model(self.models())
            request.model = self._model
        return request


class Stream(Iterator[Chunk]):
    """Chunks as they arrive. The call is made by ``with``, or with the first chunk; leaving ``with``, or
    `close` (from any thread), ends it, and the server frees all that it held.
    """

    def __init__(self, client: Client, request: pb.GenerateRequest, timeout_s: float) -> None:
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
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def __next__(self) -> Chunk:
        if self._closed.is_set() or self._failed:
            raise StopIteration
        try:
            self._open()
            message, self._first = self._first, None
            return answers.chunk(message if message is not None else next(self._call))
        except RequestCancelledError:
            if self._closed.is_set():  # by another thread, before the first chunk
                raise StopIteration from None
            raise
        except grpc.RpcError as error:
            if self._closed.is_set():
                raise StopIteration from None
            raise failure(error, self._address, got_message=True).error from error

    def close(self) -> None:
        """Ends the call, if it has not ended."""
        self._closed.set()
        if self._call is not None:
            self._call.cancel()

    def _open(self) -> None:
        """Waits for the first chunk: what fails before it may be tried again."""
        if self._opened:
            return
        self._opened = True
        try:
            request = self._client._with_model(self._request)
            self._first = self._client._tried(lambda *where: self._begin(request, *where), self._timeout_s, self._sleep)
        except BaseException:
            self._failed = True
            if self._call is not None:
                self._call.cancel()
            raise
        self.request_id = self._first.request_id

    def _begin(self, request: pb.GenerateRequest, stub: Any, left_s: float | None, address: str) -> pb.GenerateChunk:
        self._address = address
        self._call = stub.GenerateStream(request, timeout=left_s)
        if self._closed.is_set():
            self._call.cancel()  # closed by another thread meanwhile
        for message in self._call:
            return cast(pb.GenerateChunk, message)
        raise BatonError(f"{address} ended the stream without a word")

    def _sleep(self, wait_s: float) -> None:
        if self._closed.wait(wait_s):
            raise RequestCancelledError("the stream was closed before it began")
