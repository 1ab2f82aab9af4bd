"""One request end to end, on a fake fleet: the happy paths, and every way to fail."""

from __future__ import annotations

import asyncio

import pytest

from common.config import RouterConfig
from common.errors import (
    ContextLengthError,
    DeadlineError,
    DrainingError,
    EngineError,
    HandoffError,
    NoCapacityError,
    OverloadedError,
    UnavailableError,
)
from common.messages import FinishReason
from common.workers import Role
from router.attempt_runner import CLOSE_TIMEOUT_S
from router.fakes import fake_answer
from tests.router.fleet import a_request, collect, serving, until


async def test_split_answer() -> None:
    async with serving() as (service, fleet):
        request = a_request(max_tokens=6)
        tokens, end = await collect(service, request)
        assert tokens == fake_answer(request.prompt, 6)
        assert end.reason is FinishReason.LENGTH
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (20, 6)
        await until(lambda: service.records.num_live == 0)
        record = service.records.find("r").to_json(0.0)
        assert record["state"] == "finished"
        assert record["attempts"] == [{"prefill": "p0", "decode": "d0", "reason": "new", "outcome": "length"}]
        counts = record["tokens"]
        assert counts["cached_prefill"] + counts["pulled"] + counts["computed_prefill"] == counts["prompt"] == 20
        assert counts["cached_decode"] + counts["received"] + counts["computed_decode"] == 20
        assert counts["emitted"] == 6
        assert record["decision"]["prefill"]["worker"] == "p0"
        assert fleet.idle


async def test_first_token_can_be_the_last() -> None:
    async with serving() as (service, fleet):
        request = a_request(max_tokens=1)
        tokens, end = await collect(service, request)
        assert tokens == fake_answer(request.prompt, 1)
        assert end.reason is FinishReason.LENGTH
        await until(lambda: service.records.num_live == 0)
        assert service.records.find("r").decode_context.total == 20
        assert fleet.idle


async def test_first_token_does_not_wait_for_the_transfer() -> None:
    async with serving() as (service, fleet):
        fleet.workers["d0"].mute_after = 0
        events = service.generate(a_request())
        first = await asyncio.wait_for(anext(events), 1.0)
        assert first.tokens == tuple(fake_answer(a_request().prompt, 1))
        await events.aclose()
        await until(lambda: fleet.idle)


async def test_colocated_answer() -> None:
    async with serving(prefill=0, decode=2, mode="colocated") as (service, fleet):
        request = a_request(max_tokens=5)
        tokens, _ = await collect(service, request)
        assert tokens == fake_answer(request.prompt, 5)
        await until(lambda: service.records.num_live == 0)
        record = service.records.find("r").to_json(0.0)
        assert record["attempts"][0]["prefill"] is None
        assert record["tokens"]["computed_prefill"] == 20
        assert fleet.idle


async def test_many_at_once() -> None:
    async with serving(prefill=2, decode=2) as (service, fleet):
        requests = [a_request(f"r{i}", num_prompt=5 + i, start=i) for i in range(60)]
        answers = await asyncio.gather(*(collect(service, request) for request in requests))
        for request, (tokens, _) in zip(requests, answers, strict=True):
            assert tokens == fake_answer(request.prompt, 6)
        await until(lambda: fleet.idle and service.records.num_live == 0)
        assert all(not worker.attempts for worker in service.registry.workers)
        assert all(len(worker.outstanding) == 0 for worker in service.registry.workers)


# ── lost workers ──────────────────────────────────────────────────────────────────────────────────


async def test_decode_worker_dies_midway() -> None:
    async with serving(prefill=1, decode=2) as (service, fleet):
        request = a_request(max_tokens=30)
        victim = fleet.workers["d0"]
        answer = asyncio.ensure_future(collect(service, request))
        await until(lambda: service.records.find("r") and service.records.find("r").emitted >= 5)
        victim.kill()
        tokens, _ = await answer
        assert tokens == fake_answer(request.prompt, 30)
        retry = fleet.workers["d1"].seen[-1]
        assert retry.attempt == 1
        assert list(retry.generated) == fake_answer(request.prompt, len(retry.generated))
        assert len(retry.generated) >= 5
        await until(lambda: service.records.num_live == 0)
        record = service.records.find("r").to_json(0.0)
        assert [a["outcome"] for a in record["attempts"]] == ["worker_lost", "length"]
        counts = record["tokens"]
        assert counts["cached_prefill"] + counts["pulled"] + counts["computed_prefill"] == 20
        assert fleet.idle


async def test_prefill_worker_dies_in_prefill() -> None:
    async with serving(prefill=2, decode=1, step_s=0.02) as (service, fleet):
        request = a_request()
        answer = asyncio.ensure_future(collect(service, request))
        await until(lambda: fleet.workers["p0"].seen)
        fleet.workers["p0"].kill()
        tokens, _ = await answer
        assert tokens == fake_answer(request.prompt, 6)
        assert fleet.workers["p1"].seen
        assert fleet.workers["d0"].cancelled == ["r#0"]
        await until(lambda: fleet.idle)


async def test_prefill_worker_may_die_after_the_handoff() -> None:
    async with serving() as (service, fleet):
        request = a_request(max_tokens=20)
        answer = asyncio.ensure_future(collect(service, request))
        await until(lambda: service.records.find("r") and service.records.find("r").emitted >= 3)
        fleet.workers["p0"].kill()
        tokens, _ = await answer
        assert tokens == fake_answer(request.prompt, 20)
        assert len(service.records.find("r").attempts) == 1


async def test_attempts_are_limited_and_the_last_error_is_told() -> None:
    async with serving(config=RouterConfig(max_attempts=2)) as (service, fleet):
        worker = fleet.workers["p0"]
        original = worker.admit

        def failing(request):
            worker.error = HandoffError("the transfer broke")
            original(request)

        worker.admit = failing
        with pytest.raises(HandoffError, match="the transfer broke"):
            await collect(service, a_request())
        assert len(worker.seen) == 2
        assert service.records.find("r").state == "failed"
        await until(lambda: fleet.idle)


async def test_errors_that_are_not_retriable_end_the_request() -> None:
    async with serving(prefill=2) as (service, fleet):
        fleet.workers["p0"].error = EngineError("it cannot be run")
        with pytest.raises(EngineError, match="cannot be run"):
            await collect(service, a_request())
        assert not fleet.workers["p1"].seen
        await until(lambda: fleet.idle)


async def test_draining_worker_is_left() -> None:
    async with serving(prefill=1, decode=2) as (service, fleet):
        fleet.workers["d0"].error = DrainingError("d0 takes nothing new")
        tokens, _ = await collect(service, a_request())
        assert tokens == fake_answer(a_request().prompt, 6)
        assert fleet.workers["d1"].seen


async def test_lost_after_its_last_token() -> None:
    """All tokens are there, only the last word is missing: nothing is generated again."""
    async with serving(prefill=1, decode=2) as (service, fleet):
        fleet.workers["d0"].die_unheard = True
        request = a_request(max_tokens=4)
        tokens, end = await collect(service, request)
        assert tokens == fake_answer(request.prompt, 4)
        assert end.reason is FinishReason.LENGTH
        assert not fleet.workers["d1"].seen


# ── every token once ──────────────────────────────────────────────────────────────────────────────


async def test_repeated_tokens_are_dropped_and_counted() -> None:
    async with serving() as (service, fleet):
        fleet.workers["d0"].repeat_tokens = True
        tokens, _ = await collect(service, a_request(max_tokens=6))
        assert tokens == fake_answer(a_request().prompt, 6)
        await until(lambda: service.records.num_live == 0)
        assert service.records.find("r").duplicates == 5


async def test_a_gap_is_an_error_and_a_retry() -> None:
    async with serving(prefill=1, decode=2) as (service, fleet):
        fleet.workers["d0"].skip_index = 3
        tokens, _ = await collect(service, a_request(max_tokens=8))
        assert tokens == fake_answer(a_request().prompt, 8)
        assert fleet.workers["d1"].seen[0].generated == tuple(fake_answer(a_request().prompt, 3))
        await until(lambda: fleet.idle)


# ── the end of waiting ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("moment", ["at once", "reserve", "prefill", "decode"])
async def test_cancel_frees_both_sides(moment: str) -> None:
    async with serving(step_s=0.02) as (service, fleet):
        prefill, decode = fleet.workers["p0"], fleet.workers["d0"]
        events = service.generate(a_request(max_tokens=1000))
        reader = asyncio.ensure_future(anext(events))
        if moment == "at once":
            await asyncio.sleep(0)
        elif moment == "reserve":
            decode.hung = True
            await until(lambda: service.registry.worker("d0").attempts)
        elif moment == "prefill":
            await until(lambda: prefill.holding)
        else:
            await reader
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await events.aclose()
        decode.hung = False
        await until(lambda: service.records.num_live == 0 and fleet.idle)
        assert service.records.find("r").state == "cancelled"
        assert service.metrics.requests_running._value.get() == 0
        # The next one is served at once.
        tokens, _ = await asyncio.wait_for(collect(service, a_request("next", max_tokens=2)), 2.0)
        assert len(tokens) == 2


async def test_deadline_ends_everything() -> None:
    async with serving() as (service, fleet):
        fleet.workers["d0"].mute_after = 1
        with pytest.raises(DeadlineError, match=r"0\.05 s"):
            await collect(service, a_request(max_tokens=50, timeout_s=0.05))
        assert service.records.find("r").finish_reason == "deadline_exceeded"
        await until(lambda: fleet.idle)
        assert fleet.workers["d0"].cancelled == ["r#0"]


async def test_deadline_holds_in_the_queue() -> None:
    async with serving(num_blocks=4) as (service, fleet):
        hog = asyncio.ensure_future(collect(service, a_request("hog", num_prompt=40, max_tokens=20)))
        fleet.workers["d0"].mute_after = 0
        await until(lambda: fleet.workers["d0"].holding)
        with pytest.raises(DeadlineError):
            await collect(service, a_request("late", num_prompt=40, timeout_s=0.05))
        assert not any(seen.request_id == "late" for seen in fleet.workers["p0"].seen)
        hog.cancel()
        await asyncio.gather(hog, return_exceptions=True)


async def test_want_of_capacity_waits_in_order() -> None:
    async with serving(num_blocks=4, max_model_len=64) as (service, fleet):
        order: list[str] = []

        async def one(name: str, **fields: int) -> None:
            await collect(service, a_request(name, num_prompt=30, max_tokens=10, **fields))
            order.append(name)

        jobs = [asyncio.ensure_future(one(f"r{i}")) for i in range(6)]
        await asyncio.sleep(0)
        jobs.append(asyncio.ensure_future(one("urgent", priority=-1)))
        await asyncio.gather(*jobs)
        served = [seen.request_id for seen in fleet.workers["p0"].seen]
        assert served[:2] == ["r0", "r1"]
        assert served[2] == "urgent"
        assert served[3:] == ["r2", "r3", "r4", "r5"]
        assert all(seen.attempt == 0 for seen in fleet.workers["p0"].seen)


async def test_a_refusal_is_no_attempt() -> None:
    async with serving() as (service, fleet):
        fleet.workers["d0"].error = NoCapacityError("no slot is free")
        tokens, _ = await collect(service, a_request())
        assert tokens == fake_answer(a_request().prompt, 6)
        await until(lambda: service.records.num_live == 0)
        assert len(service.records.find("r").attempts) == 1
        assert [seen.attempt for seen in fleet.workers["d0"].seen] == [0, 0]


async def test_prefill_worker_without_room_is_no_attempt() -> None:
    async with serving() as (service, fleet):
        fleet.workers["p0"].error = NoCapacityError("no block is free")
        tokens, _ = await collect(service, a_request())
        assert tokens == fake_answer(a_request().prompt, 6)
        await until(lambda: service.records.num_live == 0 and fleet.idle)
        assert len(service.records.find("r").attempts) == 1
        assert fleet.workers["d0"].cancelled == ["r#0"]


async def test_full_queue_refuses() -> None:
    async with serving(num_blocks=4, config=RouterConfig(max_queue=2)) as (service, fleet):
        fleet.workers["d0"].mute_after = 0
        jobs = [asyncio.ensure_future(collect(service, a_request(f"r{i}", num_prompt=50))) for i in range(3)]
        await until(lambda: service.num_queued == 2)
        with pytest.raises(OverloadedError, match="max_queue is 2") as refusal:
            await collect(service, a_request("too many"))
        assert refusal.value.retry_after_s
        assert service.records.find("too many").state == "rejected"
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await until(lambda: fleet.idle and service.records.num_live == 0)


async def test_backlog_stays_in_the_router_by_priority() -> None:
    """A prefill worker gets about two chunks; what is urgent passes the rest of a burst (R40)."""
    async with serving(step_s=0.01) as (service, fleet):
        jobs = [
            asyncio.ensure_future(collect(service, a_request(f"r{i}", num_prompt=400, start=i, max_tokens=2)))
            for i in range(12)
        ]
        await asyncio.sleep(0.001)
        assert service.num_queued >= 8
        jobs.append(asyncio.ensure_future(collect(service, a_request("urgent", max_tokens=2, priority=-5))))
        await asyncio.gather(*jobs)
        served = [seen.request_id for seen in fleet.workers["p0"].seen]
        assert served.index("urgent") <= 4
        assert [name for name in served if name != "urgent"] == [f"r{i}" for i in range(12)]


async def test_nobody_to_serve() -> None:
    async with serving(config=RouterConfig(worker_patience_s=0.1)) as (service, fleet):
        fleet.workers["p0"].kill()
        await until(lambda: not service.registry.ready(Role.PREFILL))
        with pytest.raises(UnavailableError, match="no prefill worker is ready"):
            await collect(service, a_request())


async def test_a_restarted_worker_is_waited_for() -> None:
    async with serving() as (service, fleet):
        fleet.workers["d0"].kill()
        await until(lambda: not service.registry.ready(Role.DECODE))
        answer = asyncio.ensure_future(collect(service, a_request()))
        await asyncio.sleep(0.02)
        fleet.workers["d0"].restart()
        tokens, _ = await answer
        assert tokens == fake_answer(a_request().prompt, 6)
        assert service.registry.worker("d0").info.epoch == 2


async def test_too_large_for_any_worker() -> None:
    async with serving(num_blocks=4) as (service, _):
        with pytest.raises(ContextLengthError, match="largest holds 64"):
            await collect(service, a_request(num_prompt=60, max_tokens=6))


async def test_closing_ends_streams_with_a_reason() -> None:
    async with serving() as (service, fleet):
        answer = asyncio.ensure_future(collect(service, a_request(max_tokens=1000)))
        await until(lambda: fleet.workers["d0"].steps > 2)
        await service.close()
        with pytest.raises(UnavailableError, match="stopping"):
            await answer
        with pytest.raises(UnavailableError, match="stopping"):
            await collect(service, a_request("next"))


async def test_closing_tells_the_workers_before_it_lets_go_of_them(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (service, fleet):
        answer = asyncio.ensure_future(collect(service, a_request(max_tokens=1000)))
        await until(lambda: fleet.workers["d0"].steps > 2)
        await service.close()
        assert fleet.workers["d0"].cancelled == ["r#0"]
        assert fleet.idle
        assert [record for record in caplog.records if record.levelname != "INFO"] == []
        with pytest.raises(UnavailableError, match="stopping"):
            await answer


async def test_closing_does_not_wait_for_a_worker_that_hangs() -> None:
    async with serving() as (service, fleet):
        answer = asyncio.ensure_future(collect(service, a_request(max_tokens=1000)))
        await until(lambda: fleet.workers["d0"].steps > 2)
        fleet.workers["d0"].hung = True
        async with asyncio.timeout(CLOSE_TIMEOUT_S + 1.0):
            await service.close()
        with pytest.raises(UnavailableError, match="stopping"):
            await answer


async def test_closing_lets_short_ones_finish() -> None:
    async with serving() as (service, fleet):
        answer = asyncio.ensure_future(collect(service, a_request(max_tokens=20)))
        await until(lambda: fleet.workers["d0"].steps > 2)
        await service.close(grace_s=2.0)
        tokens, _ = await answer
        assert len(tokens) == 20
