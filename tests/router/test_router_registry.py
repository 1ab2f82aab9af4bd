"""Membership: workers that come, go, restart, fall silent, miss events, or do not fit."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from common.errors import UnavailableError, WorkerLostError
from common.hashing import prefix_hashes, root_hash
from common.workers import Role, WorkerEvent, WorkerState
from router.fakes import FakeFleet, FakeWorker, fake_answer
from router.registry import Registry
from tests.router.fleet import a_request, collect, serving, until


def a_registry(fleet: FakeFleet, **options: float) -> Registry:
    return Registry(
        fleet,
        router_id="r",
        mode="split",
        suspect_after_s=options.get("suspect_after_s", 5.0),
        on_news=lambda: None,
    )


async def test_prefixes_come_from_events_and_go_with_the_worker() -> None:
    async with serving(prefill=2) as (service, fleet):
        hashes = prefix_hashes(range(64), root_hash("fake-weights", ""))
        worker = fleet.workers["p1"]
        worker._sequence += 1
        for watcher in worker._watchers:
            watcher.put_nowait(WorkerEvent(worker._sequence, worker.load, stored=tuple(hashes)))
        await until(lambda: service.registry.index.hits(hashes) == {"p1": 64})
        request = replace(a_request(), prompt=tuple(range(64)))
        await collect(service, request)
        assert fleet.workers["p1"].seen
        assert not fleet.workers["p0"].seen
        # R16: a dead worker's prefixes attract nobody.
        worker.kill()
        await until(lambda: service.registry.index.hits(hashes) == {})
        tokens, _ = await collect(service, replace(request, request_id="again"))
        assert tokens == fake_answer(request.prompt, 6)


async def test_a_missed_event_starts_over_with_a_snapshot() -> None:
    async with serving() as (service, fleet):
        worker = fleet.workers["p0"]
        hashes = prefix_hashes(range(32), root_hash("fake-weights", ""))
        worker.cached.update(hashes)
        worker.report(skip=3)
        await until(lambda: service.registry.index.hits(hashes) == {"p0": 32})
        assert service.registry.worker("p0").state is WorkerState.READY


async def test_a_new_epoch_is_a_new_worker() -> None:
    async with serving() as (service, fleet):
        decode = fleet.workers["d0"]
        decode.mute_after = 1
        answer = asyncio.ensure_future(collect(service, a_request(max_tokens=5)))
        await until(lambda: decode.holding)
        decode.kill()
        await until(lambda: service.registry.worker("d0").state is WorkerState.DEAD)
        decode.mute_after = None
        decode.restart()
        tokens, _ = await answer
        assert tokens == fake_answer(a_request().prompt, 5)
        assert service.registry.worker("d0").info.epoch == 2


async def test_silence_is_suspect_then_lost() -> None:
    fleet = FakeFleet()
    worker = fleet.add(FakeWorker("p0", Role.PREFILL))
    registry = a_registry(fleet, suspect_after_s=0.1)
    registry.set_members(["p0"], [])
    try:
        view = registry.worker("p0")
        await until(lambda: view.state is WorkerState.READY)
        worker.hung = True
        await until(lambda: view.state is WorkerState.SUSPECT)
        assert "silent" in view.reason
        assert registry.ready(Role.PREFILL) == []
        worker.hung = False
        worker.report()
        await until(lambda: view.state is WorkerState.READY)
        worker.hung = True
        await until(lambda: view.state is WorkerState.DEAD)
        worker.hung = False
        await until(lambda: view.state is WorkerState.READY)
    finally:
        await registry.close()


async def test_a_hung_worker_gives_its_requests_up() -> None:
    """R11: one stopped worker holds up only what it already had, and not for long."""
    async with serving(decode=2) as (service, fleet):
        for link in service.registry.workers:
            assert link.alive
        fleet.workers["d0"].hung = True
        answer = asyncio.ensure_future(collect(service, a_request("a")))
        other = asyncio.ensure_future(collect(service, a_request("b", start=3)))
        await until(lambda: len(service.registry.worker("d0").attempts) == 1)
        service.registry.worker("d0").lost(WorkerLostError("silent for 15 s"))
        assert (await answer)[0] == fake_answer(a_request().prompt, 6)
        assert (await other)[0] == fake_answer(a_request(start=3).prompt, 6)
        fleet.workers["d0"].kill()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"role": Role.DECODE}, "has the role decode, not prefill"),
        ({"hash_unit_tokens": 32}, "prefixes of 32 tokens, this router of 16"),
    ],
)
async def test_workers_that_do_not_fit_are_refused(change: dict[str, object], words: str) -> None:
    fleet = FakeFleet()
    worker = fleet.add(FakeWorker("p0", Role.PREFILL))
    worker.info = replace(worker.info, **change)  # type: ignore[arg-type]
    registry = a_registry(fleet)
    registry.set_members(["p0"], [])
    try:
        await until(lambda: words in registry.worker("p0").reason)
        assert registry.worker("p0").state is WorkerState.STARTING
        assert words in registry.explain(Role.PREFILL)
    finally:
        await registry.close()


async def test_another_layout_is_refused_with_both_sides() -> None:
    """R10: a pair that cannot hand over is never made."""
    async with serving() as (service, fleet):
        odd = fleet.add(FakeWorker("p1", Role.PREFILL))
        odd.info = replace(odd.info, layout=replace(odd.info.layout, head_dim=16))
        service.registry.set_members(["p0", "p1"], ["d0"])
        words = "head_dim is 16, the other workers have 8"
        await until(lambda: words in service.registry.worker("p1").reason)
        assert [worker.worker_id for worker in service.registry.ready(Role.PREFILL)] == ["p0"]


async def test_two_workers_of_one_name_are_told_apart_by_refusing_one() -> None:
    async with serving() as (service, fleet):
        twin = fleet.add(FakeWorker("p1", Role.PREFILL))
        twin.info = replace(twin.info, worker_id="p0")
        service.registry.set_members(["p0", "p1"], ["d0"])
        await until(lambda: "is called p0, like the one at p0" in service.registry.worker("p1").reason)
        assert [worker.address for worker in service.registry.ready(Role.PREFILL)] == ["p0"]
        fleet.workers["p0"].kill()  # a name that is free again may be taken
        await until(lambda: [worker.address for worker in service.registry.ready(Role.PREFILL)] == ["p1"])


async def test_members_that_leave_finish_first() -> None:
    async with serving(decode=2) as (service, fleet):
        answer = asyncio.ensure_future(collect(service, a_request(max_tokens=30)))
        await until(lambda: fleet.workers["d0"].steps > 2)
        service.registry.set_members(["p0"], ["d1"])
        assert service.registry.worker("d0").state is WorkerState.DRAINING
        tokens, _ = await answer
        assert tokens == fake_answer(a_request().prompt, 30)
        await until(lambda: "d0" not in [worker.address for worker in service.registry.workers])
        assert len(service.records.find("r").attempts) == 1
        await collect(service, a_request("next"))
        assert fleet.workers["d1"].seen


@pytest.mark.parametrize("drained", [True, False])
async def test_only_a_loss_that_nobody_asked_for_is_a_warning(drained: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(decode=2) as (service, fleet):
        gone = fleet.workers["d1"]
        if drained:
            gone.state = WorkerState.DRAINING
            gone.report()
            await until(lambda: service.registry.worker("d1").state is WorkerState.DRAINING)
        gone.kill()
        await until(lambda: service.registry.worker("d1").state is WorkerState.DEAD)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == ([] if drained else ["worker out of service: the connection to d1 broke"])


async def test_new_members_take_part() -> None:
    async with serving(prefill=0, decode=0) as (service, fleet):
        with pytest.raises(UnavailableError, match="no worker has connected"):
            service.registry.served_model()
        fleet.add(FakeWorker("p0", Role.PREFILL))
        fleet.add(FakeWorker("d0", Role.DECODE))
        answer = asyncio.ensure_future(collect(service, a_request()))
        await asyncio.sleep(0.01)
        service.registry.set_members(["p0"], ["d0"])
        tokens, _ = await answer
        assert len(tokens) == 6
