"""Where tokens wait for their router: one multiplexed stream per router.

What several steps produce while a router is slow to read is joined, so a slow reader costs memory for
its tokens only, and nobody else waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from common.errors import RequestCancelledError, UnavailableError
from common.messages import Finish, GenerationRequest, Logprobs, TokenBatch, TokenDelta


@dataclass(slots=True)
class _Pending:
    """What one attempt has to tell, joined to one delta."""

    first_index: int
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: tuple[Logprobs, ...] = ()


class RouterStream:
    """One opening of a router's stream."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self._pending: dict[tuple[str, int], _Pending] = {}
        self._ready = asyncio.Event()
        self._closed = False

    def put(
        self,
        request: GenerationRequest,
        index: int,
        tokens: Sequence[int] = (),
        finish: Finish | None = None,
        logprobs: Logprobs | None = None,
        prompt_logprobs: Sequence[Logprobs] = (),
    ) -> None:
        """The next tokens of an attempt (the first of them has ``index``), its end, or both; ``logprobs`` are
        those of a single token, ``prompt_logprobs`` come with the first."""
        if self._closed:
            return
        key = (request.request_id, request.attempt)
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = _Pending(index)
        pending.tokens.extend(tokens)
        pending.finish = finish
        if logprobs is not None:
            pending.logprobs.append(logprobs)
        if prompt_logprobs:
            pending.prompt_logprobs = tuple(prompt_logprobs)
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
                pending, self._pending = self._pending, {}
                yield TokenBatch(
                    tuple(
                        TokenDelta(*key, p.first_index, tuple(p.tokens), p.finish, tuple(p.logprobs), p.prompt_logprobs)
                        for key, p in pending.items()
                    )
                )
            if self._closed and not self._pending:
                return


class RouterStreams:
    """The open streams, by router. A router that opens a second one replaces its first."""

    def __init__(self) -> None:
        self._streams: dict[str, RouterStream] = {}

    def open(self, router_id: str) -> tuple[RouterStream, RouterStream | None]:
        """A new stream, and the one that it replaces."""
        replaced = self._streams.get(router_id)
        if replaced is not None:
            replaced.close()
        stream = self._streams[router_id] = RouterStream(router_id)
        return stream, replaced

    def close(self, stream: RouterStream) -> None:
        stream.close()
        if self._streams.get(stream.router_id) is stream:
            del self._streams[stream.router_id]

    def close_all(self) -> None:
        for stream in self._streams.values():
            stream.close()

    def of(self, router_id: str) -> RouterStream:
        """The router's stream. Raises when it has none: its tokens would go nowhere."""
        stream = self._streams.get(router_id)
        if stream is None:
            raise UnavailableError(f"router {router_id} has no open token stream on this worker")
        return stream


def gone(router_id: str) -> RequestCancelledError:
    return RequestCancelledError(f"router {router_id} closed its token stream")
