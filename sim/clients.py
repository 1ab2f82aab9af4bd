"""Workers as a router, or another worker, sees them, without a network: calls take a latency, and end when
the worker dies.

The same workers, the same messages as over gRPC; see `router.clients` for what each call promises. As on
a network, what was sent arrives although its sender has given up waiting, calls may overtake each other
(``jitter_s``), streams keep their order, and of a broken stream the worker may learn later than the router.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TypeVar

from common.errors import WorkerLostError
from common.handoff import PrefixReply, PrefixRequest, Ticket
from common.messages import GenerationRequest, PrefillEvent, TokenBatch
from common.workers import WorkerEvent, WorkerInfo, WorkerLedger
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker

T = TypeVar("T")

KEEPALIVE_S = 5.0
"""A worker that cannot be reached notices after this time that the reader of a stream has gone."""


class Host:
    """Where a worker runs: alive or not. `kill` breaks every call that is under way, `break_streams` the
    streams alone; between `cut` and `heal` nothing comes through, and nobody is told.

    ``jitter_s``: a call or an item takes up to this much longer than ``latency_s``.
    """

    def __init__(self, address: str, latency_s: float, jitter_s: float = 0.0, rng: random.Random | None = None) -> None:
        self.address = address
        self.latency_s = latency_s
        self.jitter_s = jitter_s
        self.alive = True
        self._reachable = asyncio.Event()
        self._reachable.set()
        self._rng = rng or random.Random(address)
        self._streams: dict[int, Callable[[float], None]] = {}
        self._next_stream = 0

    def lost(self) -> WorkerLostError:
        return WorkerLostError(f"{self.address} is gone")

    def kill(self) -> None:
        self.alive = False
        self.break_streams()

    def cut(self) -> None:
        self._reachable.clear()

    def heal(self) -> None:
        """What was sent meanwhile arrives now, unless its receiver has given up."""
        self._reachable.set()

    def break_streams(self, noticed_after_s: float = 0.0) -> None:
        """Every open stream ends for its reader; the worker notices ``noticed_after_s`` later."""
        for break_stream in list(self._streams.values()):
            break_stream(noticed_after_s)

    async def call(self, method: Callable[[], Awaitable[T]]) -> T:
        served = asyncio.get_running_loop().create_task(self._serve(method), name=f"call of {self.address}")
        served.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(served)

    async def stream(self, source: Callable[[], AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
        """``source``'s items, each ``latency_s`` later and in order; WorkerLostError when the host dies."""
        await self._travel()
        items: asyncio.Queue[tuple[T | None, BaseException | None]] = asyncio.Queue()
        on_the_way: deque[tuple[T | None, BaseException | None]] = deque()
        loop = asyncio.get_running_loop()
        stream_id = self._next_stream
        self._next_stream += 1
        arrives_at = 0.0
        closing_s = self.latency_s

        def send(item: T | None, error: BaseException | None = None) -> None:
            # Timers of the same instant fire in any order; the queue keeps the items in theirs.
            nonlocal arrives_at
            on_the_way.append((item, error))
            arrives_at = max(arrives_at, loop.time() + self._delay_s())
            loop.call_at(arrives_at, lambda: items.put_nowait(on_the_way.popleft()))

        def break_stream(noticed_after_s: float) -> None:
            nonlocal closing_s
            closing_s = noticed_after_s
            send(None, self.lost())

        async def pump() -> None:
            generator = source()
            end: BaseException | None = None
            try:
                async for item in generator:
                    send(item)
            except Exception as error:
                end = error
            finally:
                await generator.aclose()
                send(None, end)

        self._streams[stream_id] = break_stream
        task = loop.create_task(pump(), name=f"stream {stream_id} of {self.address}")
        try:
            while True:
                item, error = await items.get()
                await self._reachable.wait()
                if error is not None:
                    raise error
                if item is None:
                    return
                yield item
        finally:
            self._streams.pop(stream_id, None)
            loop.call_later(closing_s if self._reachable.is_set() else KEEPALIVE_S, task.cancel)

    async def _serve(self, method: Callable[[], Awaitable[T]]) -> T:
        await self._travel()
        try:
            return await method()
        finally:
            await self._travel()

    async def _travel(self) -> None:
        await asyncio.sleep(self._delay_s())
        await self._reachable.wait()
        if not self.alive:
            raise self.lost()

    def _delay_s(self) -> float:
        return self.latency_s + (self._rng.random() * self.jitter_s if self.jitter_s else 0.0)


class _SimWorkerClient:
    def __init__(self, host: Host, worker: PrefillWorker | DecodeWorker) -> None:
        self.address = host.address
        self._host = host
        self._any = worker

    async def describe(self) -> WorkerInfo:
        return await self._host.call(self._any.describe)

    def watch(self) -> AsyncGenerator[WorkerEvent, None]:
        return self._host.stream(self._any.watch)

    async def ledger(self) -> WorkerLedger:
        return await self._host.call(self._any.ledger)

    async def drain(self) -> None:
        await self._host.call(self._any.drain)

    async def close(self) -> None:
        return None


class SimPeers:
    """`engine.ports.Peers`. ``hosts`` by address, ``find`` gives the worker at one; both come and go."""

    def __init__(self, hosts: Mapping[str, Host], find: Callable[[str], PrefillWorker | DecodeWorker]) -> None:
        self._hosts = hosts
        self._find = find

    async def send_prefix(self, address: str, request: PrefixRequest) -> PrefixReply:
        worker = self._find(address)
        return await self._hosts[address].call(lambda: worker.send_prefix(request))

    async def close(self) -> None:
        return None


class SimPrefillClient(_SimWorkerClient):
    """A `router.clients.PrefillClient`."""

    def __init__(self, host: Host, worker: PrefillWorker) -> None:
        super().__init__(host, worker)
        self._worker = worker

    def prefill(self, request: GenerationRequest, ticket: Ticket) -> AsyncGenerator[PrefillEvent, None]:
        return self._host.stream(lambda: self._worker.prefill(request, ticket))


class SimDecodeClient(_SimWorkerClient):
    """A `router.clients.DecodeClient`."""

    def __init__(self, host: Host, worker: DecodeWorker) -> None:
        super().__init__(host, worker)
        self._worker = worker

    def tokens(self, router_id: str) -> AsyncGenerator[TokenBatch, None]:
        return self._host.stream(lambda: self._worker.tokens(router_id))

    async def reserve(self, router_id: str, request: GenerationRequest) -> Ticket:
        return await self._host.call(lambda: self._worker.reserve(router_id, request))

    async def submit(self, router_id: str, request: GenerationRequest) -> None:
        await self._host.call(lambda: self._worker.submit(router_id, request))

    async def cancel(self, request_id: str, attempt: int) -> None:
        await self._host.call(lambda: self._worker.cancel(request_id, attempt))
