"""The controller against processes that are made of nothing but futures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from cluster import controller
from cluster.controller import Controller, Endpoint
from cluster.placement import Slot, plan_placement
from common.config import ClusterConfig, parse_config
from common.errors import BatonError, DeadlineError, EngineError, WorkerLostError

PROMPTLY_S = 5.0


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RESTART_PAUSE_S", "PROBE_PAUSE_S", "PATIENCE_S"):
        monkeypatch.setattr(controller, name, 0.02)


class FakeProcess:
    def __init__(self, slot: Slot, number: int, log: list[str]) -> None:
        self.slot, self.number, self._log = slot, number, log
        loop = asyncio.get_running_loop()
        self.endpoint: asyncio.Future[Endpoint] = loop.create_future()
        self.end: asyncio.Future[None] = loop.create_future()
        self.members: list[tuple[list[str], list[str]]] = []
        self.unready_answers = [""]
        self.deaf = False
        self.obeys = True

    def serve(self) -> None:
        name = f"{self.slot.id}/{self.number}"
        router = self.slot.kind == "router"
        self.endpoint.set_result(Endpoint(http_url=name, grpc_url=name) if router else Endpoint(address=name))

    def fail(self, error: BatonError) -> None:
        for future in (self.endpoint, self.end):
            if not future.done():
                future.set_exception(error)
                future.exception()

    async def serving(self) -> Endpoint:
        return await asyncio.shield(self.endpoint)

    async def ended(self) -> None:
        await asyncio.shield(self.end)

    async def set_members(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        if self.deaf:
            raise WorkerLostError("deaf")
        self.members.append((list(prefill), list(decode)))

    async def unready(self) -> str:
        return self.unready_answers.pop(0) if len(self.unready_answers) > 1 else self.unready_answers[0]

    async def stop(self) -> None:
        self._log.append(f"stop {self.slot.id}")
        if self.obeys and not self.end.done():
            self.end.set_result(None)

    def kill(self) -> None:
        self._log.append(f"kill {self.slot.id}")


class FakeLauncher:
    """Keeps every process that was started; ``prepare`` sees each one first."""

    def __init__(self, prepare: Callable[[FakeProcess], None] = FakeProcess.serve) -> None:
        self.started: dict[str, list[FakeProcess]] = {}
        self.last_seen: dict[str, Endpoint | None] = {}
        self.log: list[str] = []
        self._prepare = prepare

    def start(self, slot: Slot, last: Endpoint | None, progress: Callable[[str], None]) -> FakeProcess:
        processes = self.started.setdefault(slot.id, [])
        process = FakeProcess(slot, len(processes), self.log)
        processes.append(process)
        self.last_seen[slot.id] = last
        self._prepare(process)
        return process

    def newest(self, slot_id: str) -> FakeProcess:
        return self.started[slot_id][-1]


class Cluster:
    """A controller at work, and what it said."""

    def __init__(self, launcher: FakeLauncher, **changes: float) -> None:
        config = parse_config({"prefill": {"workers": 2}, "decode": {"workers": 1}})
        self.launcher = launcher
        self.progress: list[str] = []
        self.ready: asyncio.Future[list[Endpoint]] = asyncio.get_running_loop().create_future()
        self.stop = asyncio.Event()
        self.controller = Controller(
            ClusterConfig(**changes),
            plan_placement(config, 2, 0),
            launcher,
            progress=self.progress.append,
            ready=lambda routers: self.ready.set_result(list(routers)),
        )
        self.work = asyncio.ensure_future(self.controller.run(self.stop))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PROMPTLY_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def end(self) -> None:
        self.stop.set()
        async with asyncio.timeout(PROMPTLY_S):
            await self.work


async def test_says_ready_when_all_serve_and_the_routers_know_all() -> None:
    cluster = Cluster(FakeLauncher())
    routers = await asyncio.wait_for(cluster.ready, PROMPTLY_S)
    assert [router.http_url for router in routers] == ["router-0/0"]
    assert cluster.launcher.newest("router-0").members[-1] == (["prefill-0/0", "prefill-1/0"], ["decode-0/0"])
    await cluster.end()


async def test_is_not_ready_before_a_prompt_passes_through() -> None:
    def prepare(process: FakeProcess) -> None:
        process.unready_answers = ["no way", "no way", ""]
        process.serve()

    launcher = FakeLauncher(prepare)
    cluster = Cluster(launcher)
    await asyncio.wait_for(cluster.ready, PROMPTLY_S)
    assert launcher.newest("router-0").unready_answers == [""]
    await cluster.end()


async def test_what_keeps_a_start_waiting_is_told_once_and_in_the_end() -> None:
    def prepare(process: FakeProcess) -> None:
        process.unready_answers = ["no common transport"]
        process.serve()

    cluster = Cluster(FakeLauncher(prepare), start_timeout_s=0.3)
    with pytest.raises(DeadlineError, match=r"within 0\.3 s: no common transport"):
        await asyncio.wait_for(cluster.work, PROMPTLY_S)
    assert [text for text in cluster.progress if "ready" in text] == ["router-0 is not ready: no common transport"]


async def test_stops_routers_before_workers_and_kills_only_after_asking() -> None:
    cluster = Cluster(FakeLauncher())
    await asyncio.wait_for(cluster.ready, PROMPTLY_S)
    await cluster.end()
    log = cluster.launcher.log
    assert log[0] == "stop router-0"
    assert log.index("kill router-0") < log.index("stop prefill-0") < log.index("kill prefill-0")
    assert sorted(log) == sorted(f"{verb} {slot}" for verb in ("stop", "kill") for slot in cluster.launcher.started)


async def test_kills_who_does_not_stop_in_time() -> None:
    launcher = FakeLauncher()
    cluster = Cluster(launcher, stop_timeout_s=0.1)
    await asyncio.wait_for(cluster.ready, PROMPTLY_S)
    launcher.newest("decode-0").obeys = False
    await cluster.end()
    assert "kill decode-0" in launcher.log


async def test_start_fails_with_the_reason_of_the_one_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    def prepare(process: FakeProcess) -> None:
        if process.slot.id == "prefill-1":
            process.fail(EngineError("no such weights"))

    cluster = Cluster(FakeLauncher(prepare))
    with pytest.raises(EngineError, match="no such weights"):
        await asyncio.wait_for(cluster.work, PROMPTLY_S)
    assert "kill decode-0" in cluster.launcher.log
    assert not cluster.ready.done()
    assert caplog.records == []  # the reason is said once, by whoever called


async def test_start_ends_at_its_deadline_and_names_who_is_missing() -> None:
    def prepare(process: FakeProcess) -> None:
        if process.slot.id != "decode-0":
            process.serve()

    cluster = Cluster(FakeLauncher(prepare), start_timeout_s=0.1)
    with pytest.raises(DeadlineError, match=r"decode-0"):
        await asyncio.wait_for(cluster.work, PROMPTLY_S)


async def test_stop_while_starting_asks_only_those_that_serve() -> None:
    def prepare(process: FakeProcess) -> None:
        process.obeys = False  # what loads does not listen
        if process.slot.id == "decode-0":
            process.obeys = True
            process.serve()

    cluster = Cluster(FakeLauncher(prepare), stop_timeout_s=600)
    await cluster.until(lambda: bool(cluster.controller.members()[1]))
    await cluster.end()
    log = cluster.launcher.log
    assert [entry for entry in log if entry.startswith("stop")] == ["stop decode-0"]
    assert {f"kill {slot_id}" for slot_id in cluster.launcher.started} <= set(log)


async def test_a_dead_worker_leaves_the_routers_at_once_and_comes_back_in_its_slot() -> None:
    launcher = FakeLauncher()
    cluster = Cluster(launcher)
    await asyncio.wait_for(cluster.ready, PROMPTLY_S)
    launcher.newest("prefill-0").fail(WorkerLostError("kill -9"))
    router = launcher.newest("router-0")
    await cluster.until(lambda: (["prefill-1/0"], ["decode-0/0"]) in router.members)
    await cluster.until(lambda: router.members[-1] == (["prefill-0/1", "prefill-1/0"], ["decode-0/0"]))
    assert len(launcher.started["decode-0"]) == 1
    await cluster.end()


async def test_a_worker_that_left_by_itself_is_not_replaced() -> None:
    launcher = FakeLauncher()
    cluster = Cluster(launcher)
    await asyncio.wait_for(cluster.ready, PROMPTLY_S)
    launcher.newest("prefill-0").end.set_result(None)
    await cluster.until(lambda: "prefill-0: left" in cluster.progress)
    assert len(launcher.started["prefill-0"]) == 1
    await cluster.until(lambda: launcher.newest("router-0").members[-1][0] == ["prefill-1/0"])
    await cluster.end()


async def test_a_dead_router_comes_back_where_it_was_and_hears_its_workers() -> None:
    launcher = FakeLauncher()
    cluster = Cluster(launcher)
    await asyncio.wait_for(cluster.ready, PROMPTLY_S)
    launcher.newest("router-0").fail(WorkerLostError("kill -9"))
    await cluster.until(lambda: len(launcher.started["router-0"]) == 2)
    assert launcher.last_seen["router-0"] == Endpoint(http_url="router-0/0", grpc_url="router-0/0")
    await cluster.until(lambda: bool(launcher.newest("router-0").members))
    await cluster.end()


async def test_a_router_that_did_not_hear_is_told_again() -> None:
    launcher = FakeLauncher()
    cluster = Cluster(launcher)
    await asyncio.wait_for(cluster.ready, PROMPTLY_S)
    router = launcher.newest("router-0")
    router.deaf = True
    launcher.newest("prefill-1").fail(WorkerLostError("kill -9"))
    await cluster.until(lambda: len(launcher.started["prefill-1"]) == 2)
    router.deaf = False
    await cluster.until(lambda: router.members[-1][0] == ["prefill-0/0", "prefill-1/1"])
    await cluster.end()
