"""Where tokens wait for their router: one multiplexed stream per router.

What several steps produce while a router is slow to read is joined into one batch, so a slow reader
costs memory for its tokens only, and nobody else waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from common.errors import RequestCancelledError, UnavailableError
from common.messages import TokenBatch, TokenDelta


class RouterStream:
    def __init__(self) -> None:
        self._pending: list[TokenDelta] = []
        self._ready = asyncio.Event()
        self._closed = False

    def put(self, delta: TokenDelta) -> None:
        self._pending.append(delta)
        self._ready.set()

    def close(self) -> None:
        """Ends the stream after what is pending."""
        self._closed = True
        self._ready.set()

    async def batches(self) -> AsyncGenerator[TokenBatch, None]:
        while True:
            await self._ready.wait()
            self._ready.clear()
            if self._pending:
                deltas, self._pending = self._pending, []
                yield TokenBatch(tuple(deltas))
            elif self._closed:
                return


class RouterStreams:
    """The open streams, by router. A router that opens a second one replaces its first."""

    def __init__(self) -> None:
        self._streams: dict[str, RouterStream] = {}

    def open(self, router_id: str) -> RouterStream:
        replaced = self._streams.get(router_id)
        if replaced is not None:
            replaced.close()
        stream = RouterStream()
        self._streams[router_id] = stream
        return stream

    def close(self, router_id: str, stream: RouterStream) -> bool:
        """True when ``stream`` was the router's present one, so that the router is gone."""
        if self._streams.get(router_id) is not stream:
            return False
        del self._streams[router_id]
        return True

    def close_all(self) -> None:
        for stream in self._streams.values():
            stream.close()

    def of(self, router_id: str) -> RouterStream:
        """The router's stream. Raises when it has none: its tokens would go nowhere."""
        stream = self._streams.get(router_id)
        if stream is None:
            raise UnavailableError(f"router {router_id} has no open token stream on this worker")
        return stream

    def put(self, router_id: str, delta: TokenDelta) -> None:
        stream = self._streams.get(router_id)
        if stream is not None:
            stream.put(delta)


def gone(router_id: str) -> RequestCancelledError:
    return RequestCancelledError(f"router {router_id} closed its token stream")
