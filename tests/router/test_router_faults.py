"""Faults of the router that take a moment to set up: one test for each kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from common.errors import DeadlineError
from common.hashing import prefix_hashes, root_hash
from common.messages import FinishReason, FirstToken
from common.metrics import RouterMetrics
from common.workers import Role, WorkerEvent, WorkerState
from router.fakes import FakeFleet, FakeWorker, fake_answer
from router.live_request import LiveRequest, Pulse
from router.registry import Registry
from sim.loop import run
from tests.router.fleet import a_request, collect, serving, until


async def test_a_role_that_was_missing_long_ago_is_not_missing_since_then() -> None:
    """Patience begins anew with each loss, whether or not anybody asked in between."""
    fleet = FakeFleet()
    prefill, decode = fleet.add(FakeWorker("p0", Role.PREFILL)), fleet.add(FakeWorker("d0", Role.DECODE))
    registry = Registry(fleet, router_id="r", mode="split", suspect_after_s=5.0, on_news=lambda: None)
    loop = asyncio.get_running_loop()
    try:
        assert registry.missing(loop.time()) is not None  # nobody there: missing since now
        registry.set_members(["p0"], ["d0"])
        await until(lambda: all(worker.state is WorkerState.READY for worker in registry.workers))
        for worker in (prefill, decode):
            await asyncio.sleep(0.2)
            lost_at = loop.time()
            worker.kill()
            await until(lambda w=worker: registry.worker(w.info.worker_id).state is WorkerState.DEAD)
            missing = registry.missing(loop.time())
            assert missing is not None
            assert missing[0] is worker.role
            assert missing[1] <= loop.time() - lost_at
            worker.restart()
            await until(lambda: all(w.state is WorkerState.READY for w in registry.workers))
    finally:
        await registry.close()


async def test_nonsense_from_a_worker_does_not_end_its_link_for_good() -> None:
    """An error that nobody expected costs the connection, and the next one is tried."""
    async with serving() as (service, fleet):
        worker, watch = fleet.workers["d0"], fleet.workers["d0"].watch
        nonsense = [True]

        async def broken() -> AsyncGenerator[WorkerEvent, None]:
            async for event in watch():
                if nonsense:
                    nonsense.clear()
                    raise ValueError("not an event")
                yield event

        worker.watch = broken  # type: ignore[method-assign]
        worker.report(skip=3)  # makes the router watch anew
        await until(lambda: not nonsense)
        await until(lambda: service.registry.worker("d0").state is WorkerState.READY)
        assert (await collect(service, a_request()))[0] == fake_answer(a_request().prompt, 6)


def test_the_last_token_in_the_moment_of_the_deadline_counts() -> None:
    """The deadline fires and the first token, which is the last, comes before the request's task has run."""

    async def main() -> None:
        request = a_request(max_tokens=1)
        live = LiveRequest(request, [], 1, 1.0, RouterMetrics(), Pulse())
        token = FirstToken("r", 0, 0, 7, context=live.record.prefill_context, finish=FinishReason.LENGTH)
        asyncio.get_running_loop().call_at(1.0, lambda: asyncio.get_running_loop().call_soon(live.first_token, token))
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
        with pytest.raises(TimeoutError):
            async with live.timeout:
                await asyncio.Event().wait()
        live.close(DeadlineError("too late"))
        assert errors == []
        assert [event async for event in live.answer.events()][-1].reason is FinishReason.LENGTH  # type: ignore[union-attr]

    run(main())


async def test_a_member_that_leaves_and_comes_back_keeps_its_prefixes() -> None:
    """The end of the old connection takes its time; it is not to end what the new one has learned."""
    fleet = FakeFleet()
    worker = fleet.add(FakeWorker("p0", Role.PREFILL))
    hashes = prefix_hashes(range(64), root_hash("fake-weights", ""))
    worker.cached.update(hashes)
    registry = Registry(fleet, router_id="r", mode="split", suspect_after_s=5.0, on_news=lambda: None)
    closed: list[object] = []
    try:
        registry.set_members(["p0"], [])
        await until(lambda: registry.index.hits(hashes) == {"p0": 64})

        async def close_slowly() -> None:
            await asyncio.sleep(0.05)
            closed.append(True)

        registry.worker("p0").prefill_client.close = close_slowly  # type: ignore[method-assign]
        registry.set_members([], [])
        assert registry.index.hits(hashes) == {}
        registry.set_members(["p0"], [])
        await until(lambda: closed)
        await until(lambda: registry.worker("p0").state is WorkerState.READY)
        assert registry.index.hits(hashes) == {"p0": 64}
    finally:
        await registry.close()
