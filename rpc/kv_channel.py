"""A KV channel: messages of bytes, both ways, between two workers, over one bidirectional call.

    connect(address) ──▶ KVChannel ═══ Channel call ═══ KVChannel ──▶ KVService.serve

What the bytes are is unknown here, how they lie on the wire is `kv_frame.py`'s. A client that ends on purpose says
so with an empty message, because gRPC does not tell a server whether its client finished or died; a server ends
with the call's status. gRPC's flow control is the only buffer: `send` waits while the peer does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import grpc

from common.errors import BatonError, WorkerLostError
from rpc.connection import ACCEPTED, MAX_MESSAGE_BYTES, accepted, open_channel, secret_metadata
from rpc.freed_memory import keep_freed_memory
from rpc.kv_frame import pack_frames, unpack_frame
from rpc.status import from_rpc_error, made_by_grpc, reports_errors
from rpc.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

T = TypeVar("T")

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # what gRPC reads at the end of a stream

CLOSE_S = 2.0
"""How long an end that has closed waits for the other one."""

MAX_DATA_BYTES = MAX_MESSAGE_BYTES - 64
MAX_FRAMES = 64
"""Of one message."""

SERVICE = pb.DESCRIPTOR.services_by_name["KV"].full_name
METHOD = pb.DESCRIPTOR.services_by_name["KV"].methods[0].name


class KVChannel:
    """One end. One task receives at a time; cancelling it, or one that sends, leaves the channel whole.

    ``read`` gives the next frame, ``b""`` at a clean end; ``write`` sends one; ``end`` tells the peer
    that nothing more will come. All three raise BatonError.
    """

    def __init__(
        self,
        peer: str,
        read: Callable[[], Awaitable[bytes]],
        write: Callable[[bytes], Awaitable[None]],
        end: Callable[[], Awaitable[None]],
    ) -> None:
        keep_freed_memory()
        self.peer = peer
        self._read = read
        self._write = write
        self._end = end
        # gRPC cancels the whole call with the task that reads or writes, so each does it in a task of its own.
        self._reading: asyncio.Future[bytes] | None = None
        self._parts: list[memoryview] = []
        """Of the message that is being received."""
        self._writing: asyncio.Future[None] | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: BatonError | None = None

    async def send(self, data: bytes) -> None:
        """Returns when the message is on its way. Raises WorkerLostError when the peer is gone.

        ``data``: 1 to `MAX_DATA_BYTES` bytes.
        """
        await self.send_parts((data,))

    async def send_parts(self, parts: Sequence[bytes | memoryview]) -> None:
        """`send` of the message that ``parts`` (contiguous bytes) make; none is read any more once this waits."""
        num_bytes = sum(map(len, parts))
        if not 0 < num_bytes <= MAX_DATA_BYTES:
            raise BatonError(f"a message of a KV channel has 1 to {MAX_DATA_BYTES} bytes, this one {num_bytes}")
        frames = pack_frames(parts)
        while (earlier := self._writing) is not None:  # another task's, or one that was cancelled half-way
            await self._outcome(earlier)
            if self._writing is earlier:
                self._writing = None
        writing = self._writing = self._start(lambda: self._write_all(frames))
        await self._outcome(writing)
        if self._writing is writing:
            self._writing = None

    async def receive(self) -> bytes:
        """The next message, ``b""`` once either side has closed. Raises WorkerLostError when the peer is
        gone, or what the serving side raised.
        """
        return b"".join(await self.receive_parts())

    async def receive_parts(self) -> list[memoryview]:
        """The next message in the parts in which it came, none at the end; raises as `receive`."""
        more = True
        while more:
            try:
                if self._reading is None:
                    self._reading = self._start(self._read)
                frame = await self._outcome(self._reading)
            except _ClosedHereError:
                return []
            if not frame:
                return []
            self._reading = None
            data, more = unpack_frame(frame)
            self._parts.append(data)
            num_bytes = sum(map(len, self._parts))
            if num_bytes > MAX_DATA_BYTES:
                raise BatonError(f"a message of a KV channel has 1 to {MAX_DATA_BYTES} bytes, this one {num_bytes}")
            if len(self._parts) > MAX_FRAMES:  # empty ones would never add up to too many bytes
                raise BatonError(f"a message of a KV channel comes in at most {MAX_FRAMES} frames")
        parts, self._parts = self._parts, []
        return parts

    async def close(self) -> None:
        """Ends the channel; the peer's `receive` gives ``b""``. Harmless when it has ended already."""
        if not self._over.done():
            self._over.set_result(None)
            if self._writing is not None:
                await asyncio.wait({self._writing}, timeout=CLOSE_S)
            draining = asyncio.ensure_future(self._drain())
            await self._end()
            draining.cancel()
            self._drop()

    def lose(self, error: BatonError) -> None:
        """The peer is gone: whoever waits in `send` or `receive`, or will, hears ``error``."""
        if not self._over.done():
            self._error = error
            self._over.set_result(None)
            self._drop()

    async def wait_over(self) -> None:
        """Until this end is closed or the peer is lost."""
        await asyncio.wait({self._over})

    def _start(self, operation: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
        if self._over.done():
            raise self._reason()
        future = asyncio.ensure_future(operation())
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    async def _outcome(self, operation: asyncio.Future[T]) -> T:
        if not self._over.done():
            waited: set[asyncio.Future[Any]] = {operation, self._over}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if operation.done() and not operation.cancelled():
            return operation.result()
        raise self._reason()

    def _reason(self) -> BatonError:
        return self._error or _ClosedHereError(f"the KV channel with {self.peer} is closed")

    async def _write_all(self, frames: list[bytes]) -> None:
        for frame in frames:
            await self._write(frame)

    async def _drain(self) -> None:
        """gRPC tells a client that its call has ended only when it has read all that came before."""
        with contextlib.suppress(BatonError):
            if self._reading is not None:
                await asyncio.wait({self._reading})
            while await self._read():
                pass

    def _drop(self) -> None:
        for operation in (self._reading, self._writing):
            if operation is not None:
                operation.cancel()


class _ClosedHereError(WorkerLostError):
    """`close` was called on this side."""


async def connect(address: str, *, secret: str | None = None, timeout_s: float = 5.0) -> KVChannel:
    """Opens a KV channel to the worker at ``address`` (host:port).

    Raises WorkerLostError when nobody answers there within ``timeout_s``, AuthenticationError, or
    ConfigError when that worker serves no KV.
    """
    connection = open_channel(address)
    stub: Any = connection  # its types ask for serializers, of which frames need none
    call: Any = stub.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=secret_metadata(secret))

    async def read() -> bytes:
        try:
            frame: Any = await call.read()
        except grpc.aio.AioRpcError as error:
            raise _explain(error, address) from error
        return b"" if frame is EOF else cast(bytes, frame)

    async def write(frame: bytes) -> None:
        try:
            await call.write(frame)
        except grpc.aio.AioRpcError as error:
            raise _explain(error, address) from error
        except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise WorkerLostError(f"the KV channel with {address} was cut ({error})") from error

    async def end() -> None:
        with contextlib.suppress(TimeoutError, BatonError):
            async with asyncio.timeout(CLOSE_S):
                await write(b"")
                await call.done_writing()
                await call.code()
        call.cancel()
        await connection.close(None)

    try:
        async with asyncio.timeout(timeout_s):
            if not await accepted(call):
                await read()
                raise WorkerLostError(f"{address} ended the KV channel before it was open")
    except TimeoutError as error:
        await connection.close(None)
        raise WorkerLostError(f"{address} did not open a KV channel within {timeout_s} s") from error
    except BaseException:
        await connection.close(None)
        raise
    return KVChannel(address, read, write, end)


def _explain(error: grpc.aio.AioRpcError, address: str) -> BatonError:
    if made_by_grpc(error) and error.code() is grpc.StatusCode.INTERNAL:
        # A write that the end of the call overtook; the peer's own status is lost by it.
        return WorkerLostError(f"the KV channel with {address} was cut ({error.details()})")
    return from_rpc_error(error, address)


class KVService(Protocol):
    """The receiving side of a worker."""

    async def serve(self, channel: KVChannel) -> None:
        """One peer's channel, until ``receive`` gives ``b""`` or raises. The call ends with it: what it
        raises reaches the peer, as WorkerLostError when it comes in the middle of a send.
        """
        ...


class KVServicer:
    """The service of worker.proto, for frames as they lie on the wire."""

    def __init__(self, service: KVService) -> None:
        self._service = service

    def add_to(self, server: grpc.aio.Server) -> None:
        """Before the server starts."""
        handlers = {METHOD: grpc.stream_stream_rpc_method_handler(self.Channel)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    @reports_errors
    async def Channel(self, _requests: Any, context: Any) -> None:
        peer = context.peer()

        async def read() -> bytes:
            frame: Any = await context.read()
            if frame is EOF:
                raise WorkerLostError(f"the KV channel with {peer} was cut")
            return cast(bytes, frame)

        async def write(frame: bytes) -> None:
            try:
                await context.write(frame)
            except grpc.aio.BaseError as error:
                raise WorkerLostError(f"the KV channel with {peer} was cut ({error})") from error

        async def end() -> None:
            """The call ends, and so says it, as soon as this channel is over."""

        await context.send_initial_metadata(ACCEPTED)
        channel = KVChannel(peer, read, write, end)
        serving = asyncio.ensure_future(self._service.serve(channel))
        over = asyncio.ensure_future(channel.wait_over())
        try:
            await asyncio.wait({serving, over}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            channel.lose(WorkerLostError(f"the KV channel with {peer} was cut"))
            serving.add_done_callback(_log_failure)
            raise
        finally:
            over.cancel()
            await asyncio.wait({serving}, timeout=CLOSE_S)
            if not serving.done():
                serving.cancel()
                await asyncio.wait({serving}, timeout=CLOSE_S)
            await channel.close()
        with contextlib.suppress(_ClosedHereError):  # the service closed, and then tried to send
            if serving.done() and not serving.cancelled():
                serving.result()


def _log_failure(serving: asyncio.Future[None]) -> None:
    """No peer is left to hear how serving it ended."""
    error = None if serving.cancelled() else serving.exception()
    if error is not None and not isinstance(error, BatonError):
        log.error("serving a KV channel failed", exc_info=error)
