"""What hangs on an answer beyond its tokens, in a cluster where things go wrong: log probabilities, answers
that share a prompt, and ends that the reader of an answer decides (at a stop string).
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from common.config import load_config
from common.errors import BatonError
from common.messages import FinishReason, GenerationRequest, Logprobs
from common.workers import Role
from router.answer import Finished, NewTokens
from sim.cluster import SimCluster, SimConfig
from sim.device import expected_logprobs, expected_tokens
from tests.virtual.scenario import assert_right, request, scenario


def config(*overrides: str, **changes: Any) -> SimConfig:
    base = load_config(None, ["prefill.chunk_tokens=64", "decode.chunk_tokens=32", *overrides])
    return SimConfig(**{"num_blocks": 512, "base": base, **changes})


async def read(
    cluster: SimCluster, asked: GenerationRequest, follows: str | None = None, end_at: int | None = None
) -> tuple[list[int], list[Logprobs], Finished]:
    """The whole answer; its reader ends it at ``end_at`` tokens."""
    tokens: list[int] = []
    told: list[Logprobs] = []
    async with aclosing(cluster.service.generate(asked, follows=follows)) as events:
        async for event in events:
            if isinstance(event, Finished):
                return tokens, told, event
            assert isinstance(event, NewTokens)
            tokens.extend(event.tokens)
            told.extend(event.logprobs)
            if end_at is not None and len(tokens) >= end_at:
                cluster.service.end_at(asked.request_id, end_at)
                del tokens[end_at:], told[end_at:]
    raise AssertionError("the answer did not end")


def wanting_logprobs(name: str, length: int, max_tokens: int) -> GenerationRequest:
    asked = request(name, length, max_tokens)
    return replace(asked, sampling=replace(asked.sampling, num_logprobs=0))


@pytest.mark.parametrize("mode", ["split", "colocated"])
@pytest.mark.parametrize("kill", ["prefill-0", "decode-0", None])
def test_logprobs_are_whole_whatever_dies(mode: str, kill: str | None) -> None:
    """One for each token, the first included, and none of a token that was made again."""
    settings = config(mode=mode, prefill=2, decode=2)

    async def story(cluster: SimCluster) -> None:
        asked = [wanting_logprobs(f"r{i}", 40 + 37 * i, 60) for i in range(8)]
        reading = [asyncio.ensure_future(read(cluster, one)) for one in asked]
        await asyncio.sleep(0.35)
        if kill in cluster.workers:
            await cluster.kill(kill)
        for one, (tokens, told, finished) in zip(asked, await asyncio.gather(*reading), strict=True):
            assert tokens == expected_tokens(one.prompt, one.sampling, settings.vocab_size)
            assert told == expected_logprobs(one.prompt, tokens)
            assert finished.usage.completion_tokens == 60

    scenario(settings, story)


@pytest.mark.parametrize("mode", ["split", "colocated"])
@pytest.mark.parametrize("kill", ["prefill-0", "decode-0", None])
@pytest.mark.parametrize("at_s", [0.03, 0.05, 0.07, 0.3])
def test_prompts_are_scored_whole_whatever_dies(mode: str, kill: str | None, at_s: float) -> None:
    """In chunks, with a warm prefix cache that must not be used, beside others; before any token is read."""
    settings = config(mode=mode, prefill=2, decode=2)

    async def story(cluster: SimCluster) -> None:
        lengths = [1, 2, 16, 64, 65, 200]
        asked = [wanting_logprobs(f"r{i}", length, 20) for i, length in enumerate(lengths)]
        asked = [replace(one, sampling=replace(one.sampling, score_prompt=True)) for one in asked]
        await asyncio.gather(*(read(cluster, replace(one, request_id=f"warm-{one.request_id}")) for one in asked))

        async def scored(one: GenerationRequest) -> tuple[tuple[Logprobs, ...], list[int]]:
            told: tuple[Logprobs, ...] = ()
            tokens: list[int] = []
            async with aclosing(cluster.service.generate(one)) as events:
                async for event in events:
                    if isinstance(event, NewTokens):
                        assert not event.first_index or not event.prompt_logprobs
                        told = told or event.prompt_logprobs
                        tokens.extend(event.tokens)
            return told, tokens

        reading = [asyncio.ensure_future(scored(one)) for one in asked]
        await asyncio.sleep(at_s)
        if kill in cluster.workers:
            await cluster.kill(kill)
        for one, (told, tokens) in zip(asked, await asyncio.gather(*reading), strict=True):
            assert tokens == expected_tokens(one.prompt, one.sampling, settings.vocab_size)
            assert list(told) == expected_logprobs(one.prompt[:1], one.prompt[1:])

    scenario(settings, story)


@pytest.mark.parametrize("seed", range(4))
def test_readers_that_end_their_answers_leave_nothing(seed: int) -> None:
    """At every stage, with workers that die: what was read is right, what was used adds up, and the workers
    stop within a step."""
    rng = random.Random(seed)
    settings = config(prefill=2, decode=2, seed=seed)

    async def story(cluster: SimCluster) -> None:
        async def client(number: int) -> None:
            await asyncio.sleep(rng.random() * 3)
            asked = wanting_logprobs(f"r{number}", rng.randint(1, 400), 200)
            end_at = rng.choice([1, 2, rng.randint(3, 100), 200])
            tokens, told, finished = await read(cluster, asked, end_at=end_at)
            expected = expected_tokens(asked.prompt, asked.sampling, settings.vocab_size)
            assert tokens == expected[:end_at]
            assert told == expected_logprobs(asked.prompt, tokens)
            assert (finished.reason, finished.usage.completion_tokens) == (FinishReason.STOP, end_at)

        asking = [asyncio.ensure_future(client(number)) for number in range(30)]
        for name in ("decode-1", "prefill-0"):
            await asyncio.sleep(1.0)
            await cluster.kill(name)
            cluster.restart(name)
        await asyncio.gather(*asking)
        await cluster.settled()
        for number in range(30):
            record = cluster.service.records.find(f"r{number}")
            assert record is not None
            told = record.to_json(0.0)
            assert (told["state"], told["finish_reason"]) == ("finished", "stop")

    scenario(settings, story)


def test_an_answer_that_its_reader_ends_takes_no_more_steps() -> None:
    settings = config()

    async def story(cluster: SimCluster) -> None:
        asked = request("ends", 100, 5000)
        await read(cluster, asked, end_at=10)
        step_s = settings.cost.base_s + 1e-3
        await asyncio.sleep(2 * step_s)
        assert (await cluster.ledgers())[0].holders == ()
        assert cluster.decode_workers["decode-0"].load().decoded_tokens <= 12
        record = cluster.service.records.find("ends")
        assert record is not None
        tokens = record.to_json(0.0)["tokens"]
        assert tokens["cached_decode"] + tokens["received"] + tokens["computed_decode"] == tokens["prompt"] == 100
        assert tokens["emitted"] == 10

    scenario(settings, story)


@pytest.mark.parametrize("kill", ["prefill-0", "decode-0", None])
def test_answers_to_one_prompt_share_its_kv(kill: str | None) -> None:
    """The prompt is computed and moved once, and its last block once more for each; a worker that dies
    meanwhile costs time, and no answer."""
    settings = config(prefill=2, decode=2)

    async def story(cluster: SimCluster) -> None:
        leader = request("leader", 324, 40)
        children = [
            replace(leader, request_id=f"child-{i}", sampling=replace(leader.sampling, child=i)) for i in range(1, 4)
        ]
        reading = [asyncio.ensure_future(read(cluster, leader))]
        await asyncio.sleep(0)
        reading += [asyncio.ensure_future(read(cluster, child, follows="leader")) for child in children]
        if kill is not None:
            await asyncio.sleep(0.08)
            await cluster.kill(kill)
        for asked, (tokens, _, _) in zip([leader, *children], await asyncio.gather(*reading), strict=True):
            assert tokens == expected_tokens(asked.prompt, asked.sampling, settings.vocab_size)
        if kill is None:
            computed = sum(worker.load().computed_context_tokens for worker in cluster.prefill_workers.values())
            assert computed == 324 + 3 * 4
            blocks = sum(w.load().kv_bytes_received for w in cluster.decode_workers.values())
            layout = cluster.decode_workers["decode-0"].info.layout
            assert blocks == (21 + 3) * layout.block_bytes

    scenario(settings, story)


def test_r1_aborts_while_kv_is_awaited_from_a_worker_that_then_dies() -> None:
    """50 times: the push is held up, the client goes, the prefill worker dies; then one is served."""
    slow = {"prefill-0": {"push": "delay:0.5"}}
    settings = config(failpoints=slow)

    async def story(cluster: SimCluster) -> None:
        for number in range(50):
            asking = asyncio.ensure_future(cluster.ask(request(f"gone{number}", 200, 50)))
            await asyncio.sleep(0.05)  # reserved, and the push begun
            assert (await cluster.decode_workers["decode-0"].ledger()).reserved
            await asyncio.sleep(0.3 * number / 50)
            asking.cancel()
            await asyncio.sleep(0.002 * (number % 3))
            await cluster.kill("prefill-0")
            await asyncio.sleep(0.01)
            ledger = await cluster.decode_workers["decode-0"].ledger()
            assert ledger.holders == (), number
            assert ledger.free + ledger.cached == ledger.total
            cluster.restart("prefill-0")
            await asyncio.sleep(0.3)  # the router has found it again
            assert cluster.service.registry.ready(Role.PREFILL)
        assert_right(await cluster.ask(request("normal", 200, 50)), settings)

    scenario(settings, story)


@pytest.mark.parametrize("code", ["invalid_request", "no_capacity", "internal"])
def test_r2_a_decode_worker_that_refuses_after_the_prefill_frees_both(code: str) -> None:
    """Whatever it says at the last moment: the client hears it (or is served, if it can be tried again), and
    the prefill worker's blocks are free at once."""
    settings = config(failpoints={"decode-0": {"join": f"1*error:{code}"}})

    async def story(cluster: SimCluster) -> None:
        outcome = await cluster.ask(request("refused", 200, 20))
        if outcome.error is not None:
            assert isinstance(outcome.error, BatonError)
            assert "join" in outcome.error.message
        else:
            assert_right(outcome, settings)
        await asyncio.sleep(0.05)
        for ledger in await cluster.ledgers():
            assert ledger.holders == ()
        assert_right(await cluster.ask(request("next", 200, 20)), settings)

    scenario(settings, story)
