"""Real workers with a tiny model, over real gRPC and shared memory, in one process: the first of each role
is set to fail at some stage. The answer is that of a cluster without faults, token for token.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from common.config import load_config
from common.errors import BatonError
from common.messages import GenerationRequest, SamplingParams
from decode_worker.process import run_decode_worker
from prefill_worker.process import run_prefill_worker
from router.answer import NewTokens
from router.gateway_process import GrpcClients
from router.service import RouterService
from tests.tiny_model import build_tiny_llama

pytestmark = pytest.mark.e2e

NUM_REQUESTS, NUM_TOKENS = 4, 24
RUN = {"prefill": run_prefill_worker, "decode": run_decode_worker}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def worker(role: str, name: str, model: Path, *overrides: str) -> AsyncIterator[str]:
    """Its address."""
    config = load_config(
        None,
        [
            f"model.name={model}",
            "engine.pool_bytes=4000000",
            "engine.threads=1",
            "engine.step_timeout_s=2",
            "transfer.lease_s=1",
            "worker.heartbeat_s=0.1",
            "cluster.stop_timeout_s=1",
            *overrides,
        ],
    )
    stop, address = asyncio.Event(), asyncio.get_running_loop().create_future()
    process = asyncio.ensure_future(RUN[role](config, name, address.set_result, stop, lambda _: None))
    try:
        async with asyncio.timeout(60):
            yield await address
    finally:
        stop.set()
        await asyncio.wait([process], timeout=20)
        assert process.done()


@asynccontextmanager
async def cluster(model: Path, failing: dict[str, str]) -> AsyncIterator[RouterService]:
    """Two workers of each role; the first ones have the failpoints ``failing`` (role → setting)."""
    async with AsyncExitStack() as stack:
        addresses: dict[str, list[str]] = {"prefill": [], "decode": []}
        for role, number in (("prefill", 0), ("prefill", 1), ("decode", 0), ("decode", 1)):
            overrides = [f"failpoints.{failing[role]}"] if role in failing and number == 0 else []
            entered = await stack.enter_async_context(worker(role, f"{role}-{number}", model, *overrides))
            addresses[role].append(entered)
        config = load_config().router
        service = RouterService(
            config, GrpcClients(None), router_id="router-0", rng=random.Random(0), suspect_after_s=3.0
        )
        stack.push_async_callback(service.close)
        service.registry.set_members(addresses["prefill"], addresses["decode"])
        async with asyncio.timeout(20):
            while sum(w.state.value == "ready" for w in service.registry.workers) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield service


def prompt(number: int) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(2, 250) for _ in range(70))


async def ask(service: RouterService, number: int) -> list[int]:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    tokens: list[int] = []
    async for event in service.generate(GenerationRequest(f"r{number}", prompt(number), sampling, timeout_s=60.0)):
        if isinstance(event, NewTokens):
            tokens.extend(event.tokens)
    return tokens


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What transformers say."""
    import torch
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answers = []
    for number in range(NUM_REQUESTS):
        tokens = list(prompt(number))
        for _ in range(NUM_TOKENS):
            with torch.no_grad():
                tokens.append(int(oracle(torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt(number)) :])
    return answers


@pytest.mark.parametrize(
    ("role", "failpoint"),
    [
        ("decode", "reserve=1*delay:6"),
        ("decode", "join=1*error:ticket"),
        ("decode", "decode_step=1*hang"),
        ("prefill", "prefill_start=1*error:draining"),
        ("prefill", "prefill_step=1*hang"),
        ("prefill", "push=1*error:handoff"),
        ("prefill", "commit=1*hang"),
    ],
)
async def test_the_answers_are_those_of_a_cluster_without_faults(
    model: Path, expected: list[list[int]], role: str, failpoint: str
) -> None:
    async with cluster(model, {role: failpoint}) as service:
        answers = await asyncio.gather(*(ask(service, number) for number in range(NUM_REQUESTS)))
        assert answers == expected
        records = [service.records.find(f"r{number}") for number in range(NUM_REQUESTS)]
        assert sum(len(record.attempts) for record in records if record is not None) > NUM_REQUESTS
        async with asyncio.timeout(10):
            while service.records.num_live or await held(service, failpoint):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def held(service: RouterService, failpoint: str) -> int:
    """Blocks that somebody holds. A worker whose step hangs for ever keeps its own, and is lost to the router
    from time to time.
    """
    total = 0
    for view in service.registry.workers:
        if "step" in failpoint and view.worker_id.endswith("-0"):
            continue
        try:
            client = view.prefill_client if view.role.value == "prefill" else view.decode_client
            ledger = await client.ledger()
        except BatonError:
            return 1
        assert ledger.balanced
        total += len(ledger.holders)
    return total
