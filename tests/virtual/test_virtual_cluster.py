"""The real router and workers under the virtual clock: right tokens, laws kept, whatever happens."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest

from common.config import Config, load_config
from common.errors import ContextLengthError, DeadlineError, InvalidRequestError, WorkerLostError
from common.messages import GenerationRequest
from sim.cluster import SimCluster, SimConfig
from sim.loop import DeadlockError, run
from tests.virtual.scenario import assert_right, request, scenario

CHUNK, BLOCK = 64, 16


def config(**changes: object) -> SimConfig:
    base = load_config(None, [f"prefill.chunk_tokens={CHUNK}", "decode.chunk_tokens=32"])
    settings: dict[str, object] = {"num_blocks": 256, "block_size": BLOCK, "base": base, **changes}
    return SimConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["split", "colocated"])
@pytest.mark.parametrize(
    "length", [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 1000]
)
def test_prompts_around_block_and_chunk_borders(mode: str, length: int) -> None:
    """Field report R13: prompts just beyond one chunk must not hang."""
    settings = config(mode=mode)

    async def story(cluster: SimCluster) -> None:
        cold = await cluster.ask(request("cold", length, 20))
        assert_right(cold, settings)
        assert cold.cached_tokens == 0
        warm = await cluster.ask(dataclasses.replace(cold.request, request_id="warm"))
        assert_right(warm, settings)
        assert warm.cached_tokens == (length - 1) // BLOCK * BLOCK

    scenario(settings, story)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_the_first_token_may_be_the_last(max_tokens: int) -> None:
    settings = config()

    async def story(cluster: SimCluster) -> None:
        outcome = await cluster.ask(request("r", 40, max_tokens))
        assert_right(outcome, settings)
        assert outcome.finish == "length"

    scenario(settings, story)


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_in_tiny_pools(seed: int) -> None:
    """Preemption, prefix hits, queues: the tokens stay right and the work is really split."""
    rng = random.Random(seed)
    settings = config(prefill=rng.randint(1, 3), decode=rng.randint(1, 3), num_blocks=rng.randint(20, 40), seed=seed)

    async def story(cluster: SimCluster) -> None:
        async def client(number: int) -> None:
            await asyncio.sleep(rng.random() * 2)
            length = rng.choice([1, 15, 16, 17, 63, 64, 65, 100])
            shared = rng.choice([0, 16, 32])
            outcome = await cluster.ask(request(f"r{number}", length, rng.randint(1, 150), seed=number, shared=shared))
            assert_right(outcome, settings)

        await asyncio.gather(*(client(number) for number in range(40)))
        for worker in cluster.prefill_workers.values():
            assert worker.load().decode_steps == 0
        loads = [worker.load() for worker in cluster.decode_workers.values()]
        if not sum(load.preemptions for load in loads):
            assert sum(load.computed_context_tokens for load in loads) == 0
        sent = sum(worker.load().kv_bytes_sent for worker in cluster.prefill_workers.values())
        assert sent == sum(load.kv_bytes_received for load in loads) > 0

    scenario(settings, story)


def test_preemption_happens_in_a_tiny_pool_and_changes_nothing() -> None:
    settings = config(num_blocks=16)

    async def story(cluster: SimCluster) -> int:
        outcomes = await asyncio.gather(*(cluster.ask(request(f"r{i}", 20, 150)) for i in range(6)))
        for outcome in outcomes:
            assert_right(outcome, settings)
        return cluster.decode_workers["decode-0"].load().preemptions

    assert scenario(settings, story) > 0


@pytest.mark.parametrize("seed", range(6))
def test_clients_that_leave_at_random_moments(seed: int) -> None:
    """Laws 3, 4 and 5 after 300 mixed requests of which a fifth is cancelled, before the first token too."""
    rng = random.Random(seed)
    settings = config(prefill=2, decode=2, num_blocks=64, seed=seed)

    async def story(cluster: SimCluster) -> None:
        finished: list[GenerationRequest] = []
        gone = 0

        async def client(number: int) -> None:
            nonlocal gone
            await asyncio.sleep(rng.random() * 30)
            asked = request(
                f"r{number}", rng.randint(1, 300), rng.randint(1, 80), seed=number, shared=rng.choice([0, 48])
            )
            if rng.random() < 0.8:
                assert_right(await cluster.ask(asked), settings)
                finished.append(asked)
                return
            task = asyncio.ensure_future(cluster.ask(asked))
            await asyncio.sleep(rng.choice([0.0, 0.0001, 0.0005, 0.001, 0.01, 0.05, 0.1, 0.5, 1.0]))
            task.cancel()
            await asyncio.wait([task])
            gone += 1

        await asyncio.gather(*(client(number) for number in range(300)))
        assert gone > 30
        await cluster.settled()
        for asked in finished:
            record = cluster.service.records.find(asked.request_id).to_json(0.0)["tokens"]
            length = len(asked.prompt)
            assert record["cached_prefill"] + record["pulled"] + record["computed_prefill"] == length
            assert record["cached_decode"] + record["received"] + record["computed_decode"] == length
            assert record["emitted"] == asked.sampling.max_tokens
        for worker in (*cluster.prefill_workers.values(), *cluster.decode_workers.values()):
            assert (worker.load().num_running, worker.load().num_waiting) == (0, 0)

    scenario(settings, story)


def test_r3_aborts_of_handed_over_requests_that_have_not_joined_leave_nothing() -> None:
    """Batch limit 1, five requests, four aborted."""
    base = load_config(None, ["decode.max_sequences=1"])
    settings = config(base=base)

    async def story(cluster: SimCluster) -> None:
        tasks = [asyncio.ensure_future(cluster.ask(request(f"r{i}", 100, 50))) for i in range(5)]
        await asyncio.sleep(0.3)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.wait(tasks[1:])
        assert_right(await tasks[0], settings)

    scenario(settings, story)


def test_r4_work_for_clients_that_left_does_not_delay_others() -> None:
    """Ten long prompts, gone after 0.2 s; a short one then meets an idle worker."""
    settings = config(num_blocks=4096)

    async def story(cluster: SimCluster) -> None:
        await cluster.ask(request("first", 20, 2))
        idle = await cluster.ask(request("idle", 20, 2))
        tasks = [asyncio.ensure_future(cluster.ask(request(f"long{i}", 5000, 20))) for i in range(10)]
        await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        short = await cluster.ask(request("short", 20, 2))
        chunk_s = CHUNK / settings.cost.context_tokens_per_s
        assert _ttft(short) <= _ttft(idle) + 2 * chunk_s + 0.01

    scenario(settings, story)


def _ttft(outcome: object) -> float:
    return outcome.first_token_at - outcome.arrived_at  # type: ignore[attr-defined, no-any-return]


def test_r5_the_request_after_a_cancel_in_prefill_is_served() -> None:
    settings = config(num_blocks=512)

    async def story(cluster: SimCluster) -> None:
        for round_number in range(20):
            task = asyncio.ensure_future(cluster.ask(request(f"long{round_number}", 3000, 20)))
            await asyncio.sleep(0.02 * round_number)
            task.cancel()
            await asyncio.wait([task])
            assert_right(await cluster.ask(request(f"next{round_number}", 100, 5)), settings)

    scenario(settings, story)


def test_r8_a_sequence_beyond_the_limit_is_refused_at_once_with_both_numbers() -> None:
    settings = config(max_model_len=256, num_blocks=64)

    async def story(cluster: SimCluster) -> None:
        for length, max_tokens in ((255, 1), (254, 2), (200, 56)):
            assert_right(await cluster.ask(request(f"fits{length}", length, max_tokens)), settings)
        for length, max_tokens in ((255, 2), (300, 1)):
            started = asyncio.get_running_loop().time()
            outcome = await cluster.ask(request(f"over{length}", length, max_tokens))
            assert isinstance(outcome.error, (ContextLengthError, InvalidRequestError)), outcome.error
            assert "256" in outcome.error.message
            assert asyncio.get_running_loop().time() - started < 1.0

    scenario(settings, story)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("moment_s", [0.001, 0.02, 0.05, 0.3, 1.0])
def test_a_killed_worker_breaks_no_stream(victim: str, moment_s: float) -> None:
    """Law 2: the tokens go on with no gap and no repeat on the workers that are left."""
    settings = config(prefill=2, decode=2, num_blocks=512)

    async def story(cluster: SimCluster) -> None:
        tasks = [asyncio.ensure_future(cluster.ask(request(f"r{i}", 150, 60, seed=i))) for i in range(8)]
        await asyncio.sleep(moment_s)
        await cluster.kill(victim)
        for task in tasks:
            assert_right(await task, settings)

    scenario(settings, story)


def test_a_cut_link_fails_over_and_the_lease_frees_the_blocks() -> None:
    base = load_config(None, ["transfer.lease_s=2"])
    settings = config(prefill=2, decode=1, base=base)

    async def story(cluster: SimCluster) -> None:
        cluster.links["prefill-0", "decode-0"].up = False
        outcomes = await asyncio.gather(*(cluster.ask(request(f"r{i}", 150, 20)) for i in range(4)))
        for outcome in outcomes:
            assert_right(outcome, settings)

    scenario(settings, story)


def test_nobody_left_is_an_error_with_a_reason_not_a_hang() -> None:
    settings = config()

    async def story(cluster: SimCluster) -> None:
        await cluster.ask(request("first", 20, 2))
        await cluster.kill("prefill-0")
        outcome = await cluster.ask(request("second", 20, 2))
        assert outcome.error is not None
        assert "no prefill worker is ready" in outcome.error.message

    scenario(settings, story)


def test_a_deadline_ends_a_request_and_frees_what_it_held() -> None:
    settings = config()

    async def story(cluster: SimCluster) -> None:
        outcome = await cluster.ask(request("slow", 20, 2000, timeout_s=3.0))
        assert isinstance(outcome.error, DeadlineError)
        assert asyncio.get_running_loop().time() < 4.0

    scenario(settings, story)


def test_a_worker_that_stops_reading_the_clock_is_a_deadlock() -> None:
    """A planted fault: the device never answers. Nothing can go on, and that raises."""
    settings = config(base=Config())

    async def main() -> None:
        cluster = SimCluster(settings)
        await cluster.start()
        await cluster.ask(request("first", 20, 2))

        async def never(*_: object) -> None:
            await asyncio.Event().wait()

        cluster.decode_workers["decode-0"]._executor.execute = never  # type: ignore[method-assign, assignment]
        await cluster.ask(request("second", 20, 20, timeout_s=1e8))

    with pytest.raises(DeadlockError):
        run(main(), horizon_s=500.0)


def test_worker_lost_is_what_the_router_hears() -> None:
    async def main() -> None:
        cluster = SimCluster(config())
        await cluster.start()
        client = cluster.decode("decode-0")
        await client.describe()
        await cluster.kill("decode-0")
        with pytest.raises(WorkerLostError, match="decode-0 is gone"):
            await client.describe()
        await cluster.close()

    run(main())


@pytest.mark.parametrize("max_tokens", [1, 40])
def test_a_late_first_token_from_the_prefill_worker_changes_nothing(max_tokens: int) -> None:
    """The decode worker's stream is whole by itself, and overtakes: one attempt, no gap, no repeat."""
    settings = config()

    async def story(cluster: SimCluster) -> None:
        await cluster.ask(request("first", 20, 2))
        cluster.hosts["prefill-0"].latency_s = 3.0
        outcome = await cluster.ask(request("late", 100, max_tokens))
        assert_right(outcome, settings)
        await cluster.settled()
        record = cluster.service.records.find("late").to_json(0.0)
        assert len(record["attempts"]) == 1
        assert cluster.service.metrics.duplicate_tokens._value.get() == 0

    scenario(settings, story)
