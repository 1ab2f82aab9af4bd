"""A bare stream of bytes over gRPC, with the options of all connections here and nothing on top: the measure
for `kv_channel.py`.
"""

from __future__ import annotations

from typing import Any

import grpc

from common.errors import WorkerLostError
from rpc.connection import SERVER_OPTIONS, open_channel
from rpc.freed_memory import keep_freed_memory

MESSAGE_BYTES = 1 << 20
_SERVICE, _METHOD = "baton.bench.Raw", "Stream"
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class RawStreamServer:
    """Writes what comes into ``target`` (writable, contiguous), from its beginning, and answers when it is full."""

    def __init__(self) -> None:
        keep_freed_memory()
        self.target = memoryview(bytearray())
        self._server = grpc.aio.server(options=list(SERVER_OPTIONS))
        handler = grpc.stream_stream_rpc_method_handler(self._take)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))

    async def start(self, host: str) -> str:
        """Returns host:port."""
        port = self._server.add_insecure_port(f"{host}:0")
        await self._server.start()
        return f"{host}:{port}"

    async def stop(self) -> None:
        await self._server.stop(0)

    async def _take(self, _requests: Any, context: Any) -> None:
        got = 0
        while (message := await context.read()) is not EOF:
            self.target[got : got + len(message)] = message
            got += len(message)
            if got == len(self.target):
                got = 0
                await context.write(b"!")


class RawStream:
    """The sending end of one stream."""

    def __init__(self, address: str) -> None:
        keep_freed_memory()
        self._channel = open_channel(address)
        channel: Any = self._channel  # its stubs ask for serializers, of which bytes need none
        self._call: Any = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")()

    async def send(self, source: memoryview) -> None:
        """Returns when all of ``source`` is in the other end's target."""
        for start in range(0, len(source), MESSAGE_BYTES):
            await self._call.write(bytes(source[start : start + MESSAGE_BYTES]))
        if await self._call.read() != b"!":
            raise WorkerLostError("the raw stream ended")

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close(None)
