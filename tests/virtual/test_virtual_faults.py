"""Faults that a whole-cluster scenario has to be set up for: one test for each kind."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from contextlib import aclosing
from typing import Any

import pytest

from common.config import load_config
from common.errors import BatonError, RequestCancelledError, TicketError, WorkerLostError
from common.handoff import Ticket
from common.messages import GenerationRequest, TokenBatch
from common.workers import WorkerState
from decode_worker.worker import DecodeWorker
from router.readiness import Readiness
from router.service import RouterService
from sim.cluster import SimCluster, SimConfig
from sim.loop import run
from tests.virtual.scenario import assert_right, request, scenario


def config(*overrides: str, **changes: Any) -> SimConfig:
    base = load_config(None, ["prefill.chunk_tokens=64", "decode.chunk_tokens=32", *overrides])
    return SimConfig(**{"num_blocks": 256, "base": base, **changes})


async def read(worker: DecodeWorker, router_id: str, batches: list[TokenBatch]) -> None:
    async with aclosing(worker.tokens(router_id)) as stream:
        batches.extend([batch async for batch in stream])


# ── the decode worker ─────────────────────────────────────────────────────────────────────────────


def test_a_second_token_stream_ends_what_was_asked_for_over_the_first() -> None:
    """The router lost its stream and comes again before the worker has noticed: it knows nothing any more of
    what it asked for over the first one, so nobody would ever end that."""

    async def story(cluster: SimCluster) -> None:
        worker = cluster.decode_workers["decode-0"]
        first = asyncio.ensure_future(read(worker, "r", []))
        await asyncio.sleep(0)
        await worker.reserve("r", request("waits", 100, 1000))
        assert (await worker.ledger()).reserved > 0
        second = asyncio.ensure_future(read(worker, "r", []))
        await asyncio.sleep(0.001)
        ledger = await worker.ledger()
        assert ledger.holders == ()
        # The first one's end, when it is noticed at last, does not concern what the second one asks for.
        await worker.reserve("r", request("stays", 100, 1000))
        first.cancel()
        await asyncio.sleep(0.001)
        assert [holder.request for holder in (await worker.ledger()).holders] == ["stays#0"]
        second.cancel()
        await asyncio.sleep(0.001)
        assert (await worker.ledger()).holders == ()

    scenario(config(), story)


def test_a_stream_that_nobody_reads_is_replaced_all_the_same() -> None:
    """The first stream's writer is stuck in a dead connection: it cannot notice anything."""

    async def story(cluster: SimCluster) -> None:
        worker = cluster.decode_workers["decode-0"]
        stuck = worker.tokens("r")
        opening = asyncio.ensure_future(anext(stuck))
        await asyncio.sleep(0)
        await worker.reserve("r", request("a", 100, 1000))
        await worker.cancel("a", 0)
        assert len((await opening).deltas) == 1
        await worker.reserve("r", request("b", 100, 1000))
        second = asyncio.ensure_future(read(worker, "r", []))
        await asyncio.sleep(0.001)
        assert (await worker.ledger()).holders == ()
        second.cancel()
        await stuck.aclose()

    scenario(config(), story)


def test_a_broken_stream_that_the_worker_notices_late_costs_no_work() -> None:
    """The whole way: the router reconnects at once, the requests go on, and nothing runs twice for long."""
    settings = config(decode=2)

    async def story(cluster: SimCluster) -> None:
        asking = [asyncio.ensure_future(cluster.ask(request(f"r{i}", 100, 300, seed=i))) for i in range(4)]
        await asyncio.sleep(1.0)
        cluster.hosts["decode-0"].break_streams(noticed_after_s=60.0)
        await asyncio.sleep(1.0)
        held = [h.request for ledger in await cluster.ledgers() for h in ledger.holders]
        assert sorted(name.split("#")[0] for name in held) == ["r0", "r1", "r2", "r3"]
        for outcome in await asyncio.gather(*asking):
            assert_right(outcome, settings)

    scenario(settings, story)


def test_a_slow_reader_costs_memory_for_its_tokens_only() -> None:
    """However many steps it lags, there is one delta for each attempt."""

    async def story(cluster: SimCluster) -> None:
        worker = cluster.decode_workers["decode-0"]
        stream = worker.tokens("r")
        opening = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        for name in ("a", "b"):
            await worker.submit("r", request(name, 20, 200))
        first = await opening
        await asyncio.sleep(30.0)
        batch = await anext(stream)
        assert [delta.request_id for delta in batch.deltas] == ["a", "b"]
        for delta in batch.deltas:
            seen = sum(len(d.tokens) for d in first.deltas if d.request_id == delta.request_id)
            assert (delta.first_index, len(delta.tokens)) == (seen, 200 - seen)
            assert delta.finish is not None
        await stream.aclose()

    scenario(config(mode="colocated"), story)


def test_a_cancel_that_overtakes_its_question_is_remembered() -> None:
    async def story(cluster: SimCluster) -> None:
        worker = cluster.decode_workers["decode-0"]
        reading = asyncio.ensure_future(read(worker, "r", []))
        await asyncio.sleep(0)
        await worker.cancel("late", 0)
        with pytest.raises(RequestCancelledError):
            await worker.reserve("r", request("late", 100, 10))
        with pytest.raises(RequestCancelledError):
            await worker.submit("r", request("late", 100, 10))
        assert (await worker.ledger()).holders == ()
        await worker.reserve("r", dataclasses.replace(request("late", 100, 10), attempt=1))
        reading.cancel()

    scenario(config(), story)


@pytest.mark.parametrize("mode", ["split", "colocated"])
def test_cancels_that_overtake_leave_nothing_behind(mode: str) -> None:
    """Calls take up to 50 ms longer than each other; clients leave before the answer to the reservation."""
    settings = config(mode=mode, jitter_s=0.05)

    async def story(cluster: SimCluster) -> None:
        await cluster.ask(request("first", 10, 2))
        for number in range(40):
            asking = asyncio.ensure_future(cluster.ask(request(f"r{number}", 100, 3000)))
            await asyncio.sleep(0.002 * (number % 20))
            asking.cancel()
            await asyncio.wait([asking])
        await asyncio.sleep(0.5)
        assert [ledger.holders for ledger in await cluster.ledgers() if ledger.holders] == []

    scenario(settings, story)


def test_a_reservation_that_fails_half_way_leaves_nothing() -> None:
    async def story(cluster: SimCluster) -> None:
        worker = cluster.decode_workers["decode-0"]
        reading = asyncio.ensure_future(read(worker, "r", []))
        await asyncio.sleep(0)
        receiver = worker._exchange.receiver
        expect, receiver.expect = receiver.expect, _refuse  # type: ignore[method-assign]
        with pytest.raises(TicketError, match="no room"):
            await worker.reserve("r", request("half", 100, 10))
        assert (await worker.ledger()).holders == ()
        assert (worker.load().num_running, worker.load().num_waiting) == (0, 0)
        receiver.expect = expect  # type: ignore[method-assign]
        await worker.reserve("r", request("half", 100, 10))
        reading.cancel()

    scenario(config(), story)


def _refuse(*_: object) -> None:
    raise TicketError("no room for tickets")


def test_a_cancel_that_is_lost_on_the_way_is_said_again() -> None:
    """The decode worker does not answer the cancel in time; its connection stays, and so would the work."""

    async def story(cluster: SimCluster) -> None:
        await cluster.ask(request("first", 10, 2))
        worker, lost = cluster.decode_workers["decode-0"], []
        cancel = worker.cancel

        async def lose(request_id: str, attempt: int) -> None:
            lost.append(request_id)
            if len(lost) > 2:
                await cancel(request_id, attempt)
            else:
                raise WorkerLostError("no answer within 5 s")

        worker.cancel = lose  # type: ignore[method-assign]
        asking = asyncio.ensure_future(cluster.ask(request("long", 100, 3000)))
        await asyncio.sleep(1.0)
        asking.cancel()
        await asyncio.sleep(5.0)
        assert (await worker.ledger()).holders == ()
        assert len(lost) == 3

    scenario(config(), story)


def test_an_answer_that_overtakes_the_workers_word_is_no_loss() -> None:
    """A colocated worker's tokens, all of them, may come before its answer to the question itself."""
    settings = config(mode="colocated")

    async def story(cluster: SimCluster) -> None:
        worker = cluster.decode_workers["decode-0"]
        submit = worker.submit

        async def answer_late(router_id: str, asked: GenerationRequest) -> None:
            await submit(router_id, asked)
            await asyncio.sleep(2.0)

        worker.submit = answer_late  # type: ignore[method-assign]
        outcome = await cluster.ask(request("quick", 63, 3))
        assert_right(outcome, settings)
        record = cluster.service.records.find("quick").to_json(0.0)
        assert [attempt["outcome"] for attempt in record["attempts"]] == ["length"]
        assert record["tokens"]["computed_prefill"] == record["tokens"]["computed_decode"] == 63
        assert cluster.service.registry.worker("decode-0").accepting

    scenario(settings, story)


@pytest.mark.parametrize("mode", ["split", "colocated"])
def test_a_cancel_at_any_moment_of_a_request(mode: str) -> None:
    """From before the reservation to the first decode steps, a quarter of a millisecond apart: before, with and
    after the commit too. Nothing stays, the next one is right."""
    settings = config(mode=mode)

    async def story(cluster: SimCluster) -> None:
        for number in range(400):
            asking = asyncio.ensure_future(cluster.ask(request(f"r{number}", 100, 50)))
            await asyncio.sleep(number * 250e-6)
            asking.cancel()
            await asyncio.wait([asking])
            if number % 20 == 0:
                await asyncio.sleep(0.1)
                assert [ledger.holders for ledger in await cluster.ledgers() if ledger.holders] == []
        assert_right(await cluster.ask(request("after", 100, 50)), settings)
        for worker in cluster.decode_workers.values():
            assert worker.metrics.handoffs_failed._value.get() == 0

    scenario(settings, story)


def test_a_lease_that_ends_in_the_moment_of_the_commit() -> None:
    """The first piece arrives as the lease ends, give or take: one side wins, and the answer is right."""
    lease_s, block_layer_bytes = 0.5, 16 * 2 * 8 * 128 * 2
    settings = config(f"transfer.lease_s={lease_s}", "router.max_attempts=50", decode=2)

    async def story(cluster: SimCluster) -> None:
        attempts = []
        for number in range(120):
            # The computing takes its part of the lease: a few milliseconds.
            for link in cluster.links.values():
                link.bytes_per_s = block_layer_bytes / (lease_s - number * 5e-5)
            asking = asyncio.ensure_future(cluster.ask(request(f"r{number}", 10, 3)))
            await asyncio.sleep(4.0)
            for link in cluster.links.values():
                link.bytes_per_s = settings.link_bytes_per_s
            assert_right(await asking, settings)
            record = cluster.service.records.find(f"r{number}")
            assert record is not None
            attempts.append(len(record.attempts))
        assert min(attempts) == 1 < max(attempts)

    scenario(settings, story)


# ── the prefill worker ────────────────────────────────────────────────────────────────────────────


def test_a_prompt_without_room_waits_in_the_router_and_holds_nothing() -> None:
    """Prompts that the prefill worker has no blocks for yet, since transfers are slow: each would hold a decode
    worker's blocks until its ticket has expired."""
    settings = config("transfer.lease_s=2", num_blocks=32, link_bytes_per_s=2e6, decode=3)

    async def story(cluster: SimCluster) -> None:
        asking = [asyncio.ensure_future(cluster.ask(request(f"r{i}", 400, 5, seed=i))) for i in range(6)]
        await asyncio.sleep(1.0)
        assert sum(ledger.reserved > 0 for ledger in await cluster.ledgers()) == 1
        assert cluster.service.num_queued == 5
        for outcome in await asyncio.gather(*asking):
            assert_right(outcome, settings)
            record = cluster.service.records.find(outcome.request.request_id)
            assert record is not None
            assert len(record.attempts) == 1

    scenario(settings, story)


def test_a_fault_in_one_handoff_ends_that_request_and_no_more() -> None:
    """An error that nobody expected is the request's; the worker serves on, and nobody tries it elsewhere."""
    settings = config(prefill=2)

    async def story(cluster: SimCluster) -> None:
        for worker in cluster.prefill_workers.values():

            async def broken(ticket: Ticket, block_ids: object, opened: Any = worker._exchange.sender.open) -> Any:
                if ticket.request_id == "poison":
                    raise KeyError("a bug")
                return await opened(ticket, block_ids)

            worker._exchange.sender.open = broken  # type: ignore[method-assign]
        asking = [asyncio.ensure_future(cluster.ask(request(name, 100, 20))) for name in ("a", "poison", "b")]
        a, poison, b = await asyncio.gather(*asking)
        assert_right(a, settings)
        assert_right(b, settings)
        assert poison.error is not None
        assert (poison.error.code, poison.tokens) == ("internal", [])
        record = cluster.service.records.find("poison")
        assert record is not None
        assert len(record.attempts) == 1
        assert all(worker.state is WorkerState.READY for worker in cluster.workers.values())

    scenario(settings, story)


def test_an_attempt_may_not_come_again_while_its_last_step_runs() -> None:
    """Its blocks are held until then; a second holder of the same name would break the engine."""

    async def story(cluster: SimCluster) -> None:
        decode, prefill = cluster.decode_workers["decode-0"], cluster.prefill_workers["prefill-0"]
        reading = asyncio.ensure_future(read(decode, "r", []))
        await asyncio.sleep(0)
        asked = request("twice", 300, 10)
        ticket = await decode.reserve("r", asked)
        events = prefill.prefill(asked, ticket)
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.001)
        first.cancel()
        await asyncio.wait([first])
        await asyncio.sleep(0)
        with pytest.raises(BatonError, match="under way"):
            await anext(prefill.prefill(asked, ticket))
        await asyncio.sleep(1.0)
        assert (await prefill.ledger()).holders == ()
        reading.cancel()
        await asyncio.sleep(0.01)
        assert_right(await cluster.ask(request("after", 300, 10)), cluster.config)

    scenario(config(), story)


def test_the_decode_worker_passes_on_what_the_prefill_worker_had_cached() -> None:
    """The prefill worker is gone after its commit, before its own word has reached the router: usage and
    record still tell the truth of both sides."""
    settings = config()

    async def story(cluster: SimCluster) -> None:
        asked = request("cold", 100, 20)
        await cluster.ask(asked)
        cluster.hosts["prefill-0"].latency_s = 1.0
        asking = asyncio.ensure_future(cluster.ask(dataclasses.replace(asked, request_id="warm")))
        # On its way: the question takes a second, the work a few milliseconds, the word back another second.
        await asyncio.sleep(1.5)
        cluster.hosts["prefill-0"].kill()
        outcome = await asking
        assert_right(outcome, settings)
        assert outcome.cached_tokens == 96
        record = cluster.service.records.find("warm").to_json(0.0)
        assert len(record["attempts"]) == 1
        tokens = record["tokens"]
        assert (tokens["cached_prefill"], tokens["computed_prefill"]) == (96, 4)
        assert tokens["cached_decode"] + tokens["received"] == 100

    scenario(settings, story)


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_usage_is_right_when_the_decode_worker_is_first_to_speak(max_tokens: int) -> None:
    settings = config()

    async def story(cluster: SimCluster) -> None:
        asked = request("cold", 100, max_tokens)
        await cluster.ask(asked)
        cluster.hosts["prefill-0"].latency_s = 3.0
        outcome = await cluster.ask(dataclasses.replace(asked, request_id="warm"))
        assert_right(outcome, settings)
        assert outcome.cached_tokens == 96

    scenario(settings, story)


# ── hung and broken engines ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_hung_engine_is_suspect_not_ready_and_its_requests_go_on_elsewhere(role: str) -> None:
    """Law 6 and field report R38: the process lives and answers, but its engine is in one step for ever."""
    settings = config("engine.step_timeout_s=2", "router.worker_patience_s=1", heartbeats=True, **{role: 2})

    async def story(cluster: SimCluster) -> None:
        service = cluster.service
        readiness = Readiness(service, 5.0)
        await asyncio.sleep(1.0)
        # A long prompt, and many tokens: both roles are at work when the engine stops.
        asking = [asyncio.ensure_future(cluster.ask(request(f"r{i}", 2000, 200, seed=i))) for i in range(2)]
        await asyncio.sleep(0.3)
        cluster.devices[f"{role}-0"].stall()
        worker, seen = cluster.workers[f"{role}-0"], service.registry.worker(f"{role}-0")
        for _ in range(40):
            if seen.state is WorkerState.SUSPECT:
                break
            await asyncio.sleep(0.1)
        assert seen.state is WorkerState.SUSPECT
        assert "step" in seen.reason
        assert worker.state is WorkerState.SUSPECT
        assert (await readiness.check()).ready  # the other one serves
        for outcome in await asyncio.gather(*asking):
            assert_right(outcome, settings)
        # Whatever happened to be there went on before its own deadline; now the other one hangs too.
        cluster.devices[f"{role}-1"].stall()
        lost = asyncio.ensure_future(cluster.ask(request("lost", 100, 20, timeout_s=60.0)))
        await asyncio.sleep(5.0)
        verdict = await readiness.check()
        assert not verdict.ready
        assert f"{role}-1 is suspect" in verdict.reasons[0]
        outcome = await lost
        assert outcome.error is not None
        assert outcome.error.code == "unavailable"
        assert "suspect" in outcome.error.message
        # They go on: so does the service.
        for device in cluster.devices.values():
            device.resume()
        await asyncio.sleep(2.0)
        assert (await readiness.check()).ready
        await readiness.close()

    scenario(settings, story)


def test_a_long_step_within_the_limit_is_no_reason_to_worry() -> None:
    settings = config("engine.step_timeout_s=5", heartbeats=True)

    async def story(cluster: SimCluster) -> None:
        asking = asyncio.ensure_future(cluster.ask(request("r", 100, 20)))
        await asyncio.sleep(0.2)
        cluster.devices["decode-0"].stall()
        for _ in range(40):
            await asyncio.sleep(0.1)
            assert cluster.service.registry.worker("decode-0").state is WorkerState.READY
        cluster.devices["decode-0"].resume()
        assert_right(await asking, settings)

    scenario(settings, story)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_worker_whose_engine_dies_says_so_and_takes_nothing(name: str) -> None:
    """A fault of the code's own in the engine's loop: the process has to end, not sit there."""

    async def main() -> None:
        cluster = SimCluster(config())
        await cluster.start()
        await cluster.ask(request("first", 20, 2))
        worker = cluster.workers[name]
        failed = asyncio.ensure_future(worker.failed())
        await asyncio.sleep(1.0)
        assert not failed.done()

        async def broken(*_: object) -> None:
            raise KeyError("a bug")

        cluster.devices[name].execute = broken  # type: ignore[method-assign, assignment]
        asking = asyncio.ensure_future(cluster.ask(request("second", 20, 20, timeout_s=5.0)))
        with pytest.raises(BatonError, match=r"broke down.*a bug"):
            await asyncio.wait_for(failed, 1.0)
        assert worker.state is WorkerState.DEAD
        with pytest.raises(BatonError, match="a bug"):
            await worker.failed()
        await asking
        with pytest.raises(BatonError, match="a bug"):
            await cluster.settled()

    run(main())


# ── drain and close ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_drain_has_a_deadline_and_what_is_left_goes_on_elsewhere(role: str) -> None:
    settings = config("worker.drain_timeout_s=2", **{role: 2})

    async def story(cluster: SimCluster) -> None:
        asking = [asyncio.ensure_future(cluster.ask(request(f"r{i}", 100, 400, seed=i))) for i in range(4)]
        await asyncio.sleep(1.0)
        worker = cluster.workers[f"{role}-0"]
        await worker.drain()
        started = asyncio.get_running_loop().time()
        await worker.drained()
        assert asyncio.get_running_loop().time() - started <= 2.0
        await cluster.kill(f"{role}-0")
        for outcome in await asyncio.gather(*asking):
            assert_right(outcome, settings)

    scenario(settings, story)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_whoever_waits_for_a_drain_hears_of_the_close(name: str) -> None:
    async def story(cluster: SimCluster) -> None:
        waiting = asyncio.ensure_future(cluster.workers[name].drained())
        await asyncio.sleep(1.0)
        assert not waiting.done()
        await cluster.kill(name)
        await asyncio.wait_for(waiting, 1.0)

    scenario(config(), story)


def test_a_router_that_closes_ends_all_its_requests_and_no_others() -> None:
    settings = config(prefill=2, decode=2)

    async def story(cluster: SimCluster) -> None:
        base = settings.base.router
        second = RouterService(base, cluster, router_id="router-1", rng=random.Random(1), chunk_tokens=64)
        second.registry.set_members(list(cluster.prefill_workers), list(cluster.decode_workers))

        async def ask_second(name: str) -> BatonError | None:
            try:
                async for _ in second.generate(request(name, 400, 300)):
                    pass
            except BatonError as error:
                return error
            return None

        theirs = [asyncio.ensure_future(cluster.ask(request(f"r{i}", 400, 100, seed=i))) for i in range(6)]
        ours = [asyncio.ensure_future(ask_second(f"s{i}")) for i in range(6)]
        await asyncio.sleep(1.0)
        await second.close()
        for error in await asyncio.gather(*ours):
            assert error is not None
            assert "stopping" in error.message
        await asyncio.sleep(0.1)
        held = [holder.request for ledger in await cluster.ledgers() for holder in ledger.holders]
        assert not [name for name in held if name.startswith("s")], held
        for outcome in await asyncio.gather(*theirs):
            assert_right(outcome, settings)

    scenario(settings, story)


# ── failpoints ────────────────────────────────────────────────────────────────────────────────────


STAGES = {
    "decode-0": [
        "reserve=2*error:no_capacity",
        "reserve=2*delay:7",
        "reserve=1*crash",
        "join=2*error:ticket",
        "join=1*crash",
        "decode_step=1*error:engine",
        "decode_step=1*hang",
        "decode_step=1*crash",
    ],
    "prefill-0": [
        "prefill_start=2*error:draining",
        "prefill_start=1*hang",
        "prefill_start=1*crash",
        "prefill_step=1*error:engine",
        "prefill_step=1*hang",
        "push=2*error:handoff",
        "push=1*hang",
        "push=1*crash",
        "commit=2*error:integrity",
        "commit=1*delay:4",
        "commit=1*crash",
    ],
}


@pytest.mark.parametrize(("name", "failpoint"), [(name, point) for name in STAGES for point in STAGES[name]])
def test_whatever_fails_at_whatever_stage_the_laws_hold(name: str, failpoint: str) -> None:
    """One worker fails there, others are left. Only a step that fails ends requests: a model that cannot be
    run somewhere cannot be expected to run elsewhere."""
    point, action = failpoint.split("=")
    settings = config(
        "transfer.lease_s=2",
        "engine.step_timeout_s=1",
        "worker.suspect_after_s=1",
        "worker.heartbeat_s=0.3",
        prefill=2,
        decode=2,
        heartbeats=True,
        failpoints={name: {point: action}},
    )

    async def story(cluster: SimCluster) -> None:
        failed: list[int] = []

        async def client(number: int) -> None:
            await asyncio.sleep(number * 0.3)
            outcome = await cluster.ask(request(f"r{number}", 150, 40, seed=number))
            if outcome.error is not None and outcome.error.code == "engine":
                failed.append(number)
            else:
                assert_right(outcome, settings)

        await asyncio.gather(*(client(number) for number in range(12)))
        assert bool(failed) is (action == "1*error:engine")
        records = [cluster.service.records.find(f"r{number}") for number in range(12)]
        assert (
            failed
            or "no_capacity" in action
            or max(len(record.attempts) for record in records if record is not None) > 1
        )
        if point.endswith("step") and action == "1*hang":  # it hangs for ever: only the end of the process helps
            assert cluster.workers[name].state is WorkerState.SUSPECT
            await cluster.kill(name)

    scenario(settings, story)
