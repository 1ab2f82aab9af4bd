"""Workers as a router, or another worker, reaches them over gRPC; satisfies the Protocols of `router/clients.py`.

Each client has its own connection. Every call ends: one that asks and gets an answer has a deadline,
a stream has one for being opened, and keepalive notices a peer that is gone. It knows nothing of
placement or retries: one call is one try.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from common.errors import ConfigError, DeadlineError, WorkerLostError
from common.handoff import PrefixReply, PrefixRequest, Ticket
from common.messages import GenerationRequest, PrefillEvent, TokenBatch
from common.workers import PROTOCOL_VERSION, WorkerEvent, WorkerInfo, WorkerLedger
from rpc import conversion
from rpc.connection import accepted, open_channel, secret_metadata
from rpc.status import from_rpc_error, made_by_grpc
from rpc.v1 import worker_pb2 as pb
from rpc.v1 import worker_pb2_grpc as pb_grpc

Q = TypeVar("Q")
A = TypeVar("A")
T = TypeVar("T")

TIMEOUT_S = 5.0
"""Patience for an answer and for the opening of a stream."""

LONGEST_PUSH_S = 86_400.0
"""A push of a prefix is under way for as long as it makes progress."""


class GrpcWorkerClient:
    """What workers of every role answer. Needs a running loop; connects at its first call.

    ``timeout_s``: a worker that does not answer within it counts as lost. ``secret``: the cluster's.
    """

    def __init__(self, address: str, *, secret: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._metadata = secret_metadata(secret)
        self._channel = open_channel(address)
        self._worker = pb_grpc.WorkerStub(self._channel)
        self._closed = False

    async def describe(self) -> WorkerInfo:
        """The worker's side of the handshake. Raises ConfigError when it speaks another protocol version."""
        answer = await self._ask(self._worker.Describe, pb.DescribeRequest(protocol_version=PROTOCOL_VERSION))
        if answer.protocol_version != PROTOCOL_VERSION:
            raise ConfigError(
                f"worker {answer.worker_id} at {self.address} speaks protocol version {answer.protocol_version}, "
                f"this router {PROTOCOL_VERSION}"
            )
        return conversion.WORKER_INFO.decode(answer)

    def watch(self) -> AsyncGenerator[WorkerEvent, None]:
        """The worker's events, a snapshot first. Ends with WorkerLostError, when closed, or when this side
        has lagged too far behind: then it is to be watched anew.
        """
        return self._stream(self._worker.Watch, pb.WatchRequest(), conversion.WORKER_EVENT.decode)

    async def ledger(self) -> WorkerLedger:
        return conversion.WORKER_LEDGER.decode(await self._ask(self._worker.Ledger, pb.LedgerRequest()))

    async def drain(self) -> None:
        await self._ask(self._worker.Drain, pb.DrainRequest())

    async def send_prefix(self, request: PrefixRequest) -> PrefixReply:
        """Asks for a push, and waits until it is over: how long that takes without progress being made is seen
        where the blocks are. ``request.timeout_s``, or a day, bounds it here."""
        timeout_s = LONGEST_PUSH_S if request.timeout_s is None else request.timeout_s
        answer = await self._ask(
            self._worker.SendPrefix, conversion.PREFIX_REQUEST.encode(request), timeout_s, patience_s=LONGEST_PUSH_S
        )
        return conversion.PREFIX_REPLY.decode(answer)

    async def close(self) -> None:
        """Cancels what is under way: it ends with WorkerLostError."""
        self._closed = True
        await self._channel.close(None)

    async def _ask(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Q, A],
        request: Q,
        limit_s: float | None = None,
        *,
        patience_s: float | None = None,
    ) -> A:
        """One answer. ``limit_s``: what is left of the time of the request that the question is about;
        ``patience_s`` with a worker that takes longer to answer than others."""
        self._require_open()
        patience_s = self._timeout_s if patience_s is None else patience_s
        timeout_s = patience_s if limit_s is None else min(limit_s, patience_s)
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raised = from_rpc_error(error, self.address)
            if isinstance(raised, DeadlineError) and made_by_grpc(error) and timeout_s == patience_s:
                # The request has time left; it is this worker that does not answer.
                raised = self._silent(request, timeout_s)
            raise raised from error
        except asyncio.CancelledError:
            self._explain_cancellation()
            raise

    async def _stream(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[Q, A],
        request: Q,
        decode: Callable[[A], T],
        *,
        limit_s: float | None = None,
        endless: bool = False,
        opened: Callable[[], None] | None = None,
    ) -> AsyncGenerator[T, None]:
        """A stream of answers; closing it cancels the call.

        ``opened`` is called when the worker has accepted the call. An ``endless`` stream that ends is a
        worker that is lost.
        """
        self._require_open()
        call = method(request, timeout=limit_s, metadata=self._metadata)
        try:
            if await self._accepted(call, request) and opened is not None:
                opened()
            async for answer in call:
                yield decode(answer)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self.address) from error
        except asyncio.CancelledError:
            self._explain_cancellation()
            raise
        finally:
            call.cancel()
        if endless:
            raise WorkerLostError(f"{self.address} ended the stream of a {_name(request)}")

    async def _accepted(self, call: Any, request: Any) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await accepted(call)
        except TimeoutError as error:
            raise self._silent(request, self._timeout_s) from error

    def _silent(self, request: Any, timeout_s: float) -> WorkerLostError:
        return WorkerLostError(f"{self.address} did not answer a {_name(request)} within {timeout_s:g} s")

    def _require_open(self) -> None:
        if self._closed:
            raise WorkerLostError(f"the client of {self.address} is closed")

    def _explain_cancellation(self) -> None:
        """`close` makes gRPC cancel what is under way, which must not look as if the waiting task was."""
        task = asyncio.current_task()
        if self._closed and (task is None or not task.cancelling()):
            raise WorkerLostError(f"the client of {self.address} was closed") from None


def _name(request: Any) -> str:
    return type(request).__name__


class GrpcPrefillClient(GrpcWorkerClient):
    def __init__(self, address: str, *, secret: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(address, secret=secret, timeout_s=timeout_s)
        self._prefill = pb_grpc.PrefillStub(self._channel)

    def prefill(self, request: GenerationRequest, ticket: Ticket) -> AsyncGenerator[PrefillEvent, None]:
        """One FirstToken, one HandoffDone. Closing the generator cancels the work.

        The worker keeps the request's deadline; gRPC's, a little later, is for a worker that hangs.
        """
        message = pb.PrefillRequest(request=conversion.encode_request(request), ticket=conversion.TICKET.encode(ticket))
        limit_s = None if request.timeout_s is None else request.timeout_s + self._timeout_s
        return self._stream(self._prefill.Prefill, message, conversion.decode_prefill_event, limit_s=limit_s)


class GrpcDecodeClient(GrpcWorkerClient):
    def __init__(self, address: str, *, secret: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(address, secret=secret, timeout_s=timeout_s)
        self._decode = pb_grpc.DecodeStub(self._channel)
        self._gates: dict[str, _Gate] = {}

    async def tokens(self, router_id: str) -> AsyncGenerator[TokenBatch, None]:
        """The one stream of all tokens for this router. Ends with WorkerLostError, or when closed."""
        gate = self._gate(router_id)
        gate.close()
        batches = self._stream(
            self._decode.Tokens,
            pb.TokensRequest(router_id=router_id),
            conversion.TOKEN_BATCH.decode,
            endless=True,
            opened=gate.open,
        )
        try:
            async with aclosing(batches):
                async for batch in batches:
                    yield batch
        finally:
            gate.fail(WorkerLostError(f"the token stream from {self.address} to {router_id} has ended"))

    async def reserve(self, router_id: str, request: GenerationRequest) -> Ticket:
        """Blocks for the request's context, or NoCapacityError. Waits for the token stream to be open."""
        message = pb.ReserveRequest(router_id=router_id, request=conversion.encode_request(request))
        await self._gate(router_id).wait(self._timeout_s)
        return conversion.TICKET.decode(await self._ask(self._decode.Reserve, message, request.timeout_s))

    async def submit(self, router_id: str, request: GenerationRequest) -> None:
        """Asks the worker to compute the context itself, or NoCapacityError. Waits as `reserve` does."""
        message = pb.SubmitRequest(router_id=router_id, request=conversion.encode_request(request))
        await self._gate(router_id).wait(self._timeout_s)
        await self._ask(self._decode.Submit, message, request.timeout_s)

    async def cancel(self, request_id: str, attempt: int) -> None:
        await self._ask(self._decode.Cancel, pb.CancelRequest(request_id=request_id, attempt=attempt))

    def _gate(self, router_id: str) -> _Gate:
        return self._gates.setdefault(router_id, _Gate(router_id, self.address))


class _Gate:
    """Holds questions back until the token stream that carries their answers is open.

    Two calls on one connection may be served in either order: only the worker's word says that the
    first one has been.
    """

    def __init__(self, router_id: str, address: str) -> None:
        self._name = f"token stream from {address} to {router_id}"
        self._decided = asyncio.Event()
        self._error: WorkerLostError | None = None

    def open(self) -> None:
        self._decided.set()

    def fail(self, error: WorkerLostError) -> None:
        self._error = error
        self._decided.set()

    def close(self) -> None:
        self._error = None
        self._decided.clear()

    async def wait(self, timeout_s: float) -> None:
        """Raises WorkerLostError when the stream has ended, or is not open within ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._decided.wait()
        except TimeoutError as error:
            raise WorkerLostError(f"the {self._name} was not open within {timeout_s:g} s") from error
        if self._error is not None:
            raise self._error
