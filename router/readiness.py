"""`/ready`: does a request get through prefill, transfer and decode, now?

Real traffic that did within the last seconds is proof enough. Otherwise a request of two tokens is sent
the normal way, ahead of all others. If it does not come back in time, the cluster may merely be busy:
that is so when each stage that has work made steps meanwhile. A hung engine makes none, and is not ready.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

from common.errors import BatonError, DeadlineError
from common.lifecycle import Tasks
from common.messages import GenerationRequest, SamplingParams
from router.schemas import INT32
from router.service import PROBE, RouterService

RECENT_S = 5.0
"""Proof of this age still counts."""

FAILURE_CACHE_S = 1.0
"""A failed probe is not repeated for this long, lest impatient health checks load a sick cluster."""

PROBE_PROMPT = (1, 2)


@dataclass(frozen=True, slots=True)
class Verdict:
    reasons: tuple[str, ...] = ()
    """Why not; empty when ready."""

    @property
    def ready(self) -> bool:
        return not self.reasons


READY = Verdict()


class Readiness:
    """One probe at a time, whoever asks. ``timeout_s`` is the probe's own deadline."""

    def __init__(self, service: RouterService, timeout_s: float) -> None:
        self._service = service
        self._timeout_s = timeout_s
        self._tasks = Tasks()
        self._probe: asyncio.Task[Verdict] | None = None
        self._failure: tuple[float, Verdict] | None = None

    async def check(self) -> Verdict:
        now = asyncio.get_running_loop().time()
        if self._service.stopping:
            return Verdict(("the router is stopping",))
        registry, pulse = self._service.registry, self._service.pulse
        missing = registry.missing(now)
        if missing is not None:
            return Verdict((registry.explain(missing[0]),))
        if min(pulse.handed_off_at, pulse.decoded_at) >= now - RECENT_S:
            return READY
        if self._failure is not None and self._failure[0] >= now - FAILURE_CACHE_S:
            return self._failure[1]
        if self._probe is None or self._probe.done():
            self._probe = self._tasks.spawn(self._run(), "readiness probe")
        return await asyncio.shield(self._probe)

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self) -> Verdict:
        before = self._steps()
        try:
            await self._request()
            self._failure = None
            return READY
        except BatonError as error:
            late = isinstance(error, DeadlineError)
            if late and self._busy(before):
                return READY
            waited = f" within {self._timeout_s:g} s" if late else ""
            verdict = Verdict((f"the probe did not get through{waited}: {error.message}",))
            self._failure = (asyncio.get_running_loop().time(), verdict)
            return verdict

    async def _request(self) -> None:
        request = GenerationRequest(
            self._service.draw_id(PROBE),
            PROBE_PROMPT,
            SamplingParams(max_tokens=2, min_tokens=2, temperature=0.0, ignore_eos=True),
            priority=-INT32,
            timeout_s=self._timeout_s,
        )
        async with aclosing(self._service.generate(request)) as events:
            async for _ in events:
                pass

    def _steps(self) -> dict[str, int]:
        return {w.address: w.load.prefill_steps + w.load.decode_steps for w in self._service.registry.workers}

    def _busy(self, before: dict[str, int]) -> bool:
        """Each role has a worker that made steps, or none that has work."""
        registry, after = self._service.registry, self._steps()
        moved = []
        for role in registry.roles:
            workers = registry.ready(role)
            stepped = any(after[w.address] > before.get(w.address, 0) for w in workers)
            idle = not any(w.load.num_waiting or w.load.num_running for w in workers)
            moved.append((stepped, stepped or idle))
        return any(stepped for stepped, _ in moved) and all(fine for _, fine in moved)
