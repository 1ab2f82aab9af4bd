"""A router service on a fake fleet, as the tests of the router use it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from common.config import RouterConfig
from common.messages import GenerationRequest, SamplingParams
from common.workers import Role
from router.answer import Finished
from router.fakes import FakeFleet, FakeWorker
from router.service import RouterService


@asynccontextmanager
async def serving(
    prefill: int = 1, decode: int = 1, *, mode: str = "split", config: RouterConfig | None = None, **worker: Any
) -> AsyncIterator[tuple[RouterService, FakeFleet]]:
    """A service with that many ready fake workers: p0, p1, … and d0, d1, …"""
    fleet = FakeFleet()
    prefills = [fleet.add(FakeWorker(f"p{i}", Role.PREFILL, **worker)) for i in range(prefill)]
    role = Role.BOTH if mode == "colocated" else Role.DECODE
    decodes = [fleet.add(FakeWorker(f"d{i}", role, **worker)) for i in range(decode)]
    service = RouterService(
        config or RouterConfig(worker_patience_s=0.5),
        fleet,
        router_id="router-test",
        rng=random.Random(7),
        mode=mode,  # type: ignore[arg-type]
        suspect_after_s=5.0,
    )
    service.registry.set_members([w.info.worker_id for w in prefills], [w.info.worker_id for w in decodes])
    try:
        if prefill + decode:
            await until(
                lambda: (
                    service.registry.missing(0.0) is None
                    and all(len(service.registry.ready(r)) == n for r, n in ((Role.PREFILL, prefill), (role, decode)))
                )
            )
        yield service, fleet
    finally:
        await service.close()


async def until(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Waits for ``condition``, which other tasks bring about."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the code under test has no event for this
            await asyncio.sleep(0.001)


def a_request(name: str = "r", num_prompt: int = 20, max_tokens: int = 6, **fields: Any) -> GenerationRequest:
    start = fields.pop("start", 1)
    prompt = tuple((start + i) % 200 for i in range(num_prompt))
    return GenerationRequest(name, prompt, SamplingParams(max_tokens=max_tokens), **fields)


async def collect(service: RouterService, request: GenerationRequest) -> tuple[list[int], Finished]:
    """The whole answer; checks that indices have no gap and no repeat."""
    tokens: list[int] = []
    async with aclosing(service.generate(request)) as events:
        async for event in events:
            if isinstance(event, Finished):
                return tokens, event
            assert event.first_index == len(tokens)
            tokens.extend(event.tokens)
    raise AssertionError("the answer ended without a word")
