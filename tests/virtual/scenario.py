"""What the virtual-time scenarios share: a cluster, requests, and the laws to check at the end."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from common.messages import GenerationRequest, SamplingParams
from sim.cluster import Outcome, SimCluster, SimConfig
from sim.device import expected_tokens
from sim.loop import run

T = TypeVar("T")


def scenario(config: SimConfig, story: Callable[[SimCluster], Awaitable[T]]) -> T:
    """Runs ``story`` on a fresh cluster. Afterwards every block must be free or cached (law 3)."""

    async def main() -> T:
        cluster = SimCluster(config)
        await cluster.start()
        result = await story(cluster)
        for ledger in await cluster.settled():
            assert ledger.balanced
            assert ledger.free + ledger.cached == ledger.total, ledger
        await cluster.close()
        return result

    return run(main())


def request(
    name: str, length: int, max_tokens: int, *, seed: int = 0, shared: int = 0, timeout_s: float = 600.0
) -> GenerationRequest:
    """A prompt of ``length`` tokens, the first ``shared`` of them common to all requests."""
    rng = random.Random(name)
    prompt = [5] * min(shared, length) + [rng.randrange(2, 32_000) for _ in range(max(0, length - shared))]
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)
    return GenerationRequest(name, tuple(prompt), sampling, timeout_s=timeout_s)


def assert_right(outcome: Outcome, config: SimConfig) -> None:
    """The whole answer, token for token (laws 1 and 2)."""
    assert outcome.error is None, outcome.error
    sampling = outcome.request.sampling
    assert outcome.tokens == expected_tokens(outcome.request.prompt, sampling, config.vocab_size)
