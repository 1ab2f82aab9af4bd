"""The controller: brings the cluster up, keeps it up, ends it. Without Ray, so that tests need none.

Life of the cluster:

1. `run` starts a process for every slot at once. Workers report their address, routers their URLs.
2. When all are there and every router's `/ready` answers (a prompt went through prefill, transfer and
   decode), the controller reports `Ready`. A process that fails before that ends the start with its reason.
3. From then on a process that dies is started again in its slot, with its id, after a growing pause;
   whoever it is, the routers hear at once which workers are left and later where the new one is.
   A worker that ends by itself has drained and is not replaced.
4. When `stop` is set, routers end first (they finish or end their streams), then workers; what does not
   serve yet, or has not ended in time, is killed.

It does not know how processes are made (`Launcher`), nor anything of requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.placement import Placement, Slot
from common.config import ClusterConfig
from common.errors import BatonError, DeadlineError, WorkerLostError
from common.lifecycle import Tasks, first_of
from common.workers import Role

log = logging.getLogger(__name__)

RESTART_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
PROBE_PAUSE_S = 0.2
PATIENCE_S = 3.0
"""Routers and workers find each other within this time; later it is told what the start waits for."""

CALL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a process serves: a worker's ``address``, or a router's two URLs."""

    address: str = ""
    http_url: str = ""
    grpc_url: str = ""


class Process(Protocol):
    """One process in a slot. Every call raises WorkerLostError when the process is gone."""

    async def serving(self) -> Endpoint:
        """Waits until it serves. Raises the BatonError that it failed with."""
        ...

    async def ended(self) -> None:
        """Waits until it has ended by itself. Raises what it failed with, WorkerLostError when it died."""
        ...

    async def set_members(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        """Tells a router all worker addresses."""
        ...

    async def unready(self) -> str:
        """Why a router's `/ready` says no; empty when it says yes."""
        ...

    async def stop(self) -> None:
        """Asks it to end; `ended` tells when it has."""
        ...

    def kill(self) -> None: ...


class Launcher(Protocol):
    def start(self, slot: Slot, last: Endpoint | None, progress: Callable[[str], None]) -> Process:
        """Starts a process. ``last`` is where the one before it served: a router serves there again."""
        ...


class Controller:
    """Keeps ``placement`` alive. ``fixed`` are workers started by hand: (prefill, decode) addresses."""

    def __init__(
        self,
        config: ClusterConfig,
        placement: Placement,
        launcher: Launcher,
        *,
        progress: Callable[[str], None],
        ready: Callable[[Sequence[Endpoint]], None],
        fixed: tuple[Sequence[str], Sequence[str]] = ((), ()),
    ) -> None:
        self._config = config
        self._placement = placement
        self._launcher = launcher
        self._progress = progress
        self._ready = ready
        self._fixed = fixed
        self._processes: dict[str, Process] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._started = False
        self._unready = ""
        """Why the router that is asked at present is not ready."""
        self._complete = asyncio.Event()
        self._changed = asyncio.Event()
        self._failure: asyncio.Future[None] | None = None

    def members(self) -> tuple[list[str], list[str]]:
        """Addresses of the living workers: (prefill, decode). Workers of both roles count as decode."""
        pools: tuple[list[str], list[str]] = (list(self._fixed[0]), list(self._fixed[1]))
        for slot in self._placement.workers:
            if slot.id in self._endpoints:
                pools[0 if slot.role is Role.PREFILL else 1].append(self._endpoints[slot.id].address)
        return pools

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop``, then ends all. Raises what made the start fail, or DeadlineError."""
        self._failure = asyncio.get_running_loop().create_future()
        tasks = Tasks(on_failure=self._fail)
        try:
            for slot in self._placement.slots:
                tasks.spawn(self._keep(slot), f"keep {slot.id}")
            tasks.spawn(self._push_members(), "push members")
            await first_of(self._bring_up(), stop.wait(), asyncio.shield(self._failure))
            if not stop.is_set():
                await first_of(stop.wait(), asyncio.shield(self._failure))
        finally:
            await tasks.close()
            await self._end_all()
            if self._failure.done():
                self._failure.exception()  # it was raised above, or stop came first: not "never retrieved"

    # ── keeping one slot filled ───────────────────────────────────────────────────────────────────

    async def _keep(self, slot: Slot) -> None:
        pause_s = RESTART_PAUSE_S
        last: Endpoint | None = None
        while True:
            process = self._launcher.start(slot, last, lambda text: self._progress(f"{slot.id}: {text}"))
            self._processes[slot.id] = process
            try:
                async with asyncio.timeout(self._config.start_timeout_s):
                    last = self._endpoints[slot.id] = await process.serving()
                self._changed.set()
                if len(self._endpoints) == len(self._placement.slots):
                    self._complete.set()
                pause_s = RESTART_PAUSE_S
                await process.ended()
                failure: BatonError | None = None
            except BatonError as error:
                failure = error
            except TimeoutError:
                failure = DeadlineError(f"{slot.id} did not serve within {self._config.start_timeout_s:g} s")
            self._endpoints.pop(slot.id, None)
            self._changed.set()
            process.kill()
            if not self._started:
                raise failure or WorkerLostError(f"{slot.id} ended while the cluster was starting")
            if failure is None and slot.kind == "worker":
                self._progress(f"{slot.id}: left")
                del self._processes[slot.id]
                return
            self._progress(f"{slot.id}: lost ({failure or 'it ended'}); starting it again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    # ── the whole ─────────────────────────────────────────────────────────────────────────────────

    async def _bring_up(self) -> None:
        timeout_s = self._config.start_timeout_s
        slots = self._placement.slots
        try:
            async with asyncio.timeout(timeout_s):
                await self._complete.wait()
                self._progress("all processes are up; waiting for a first prompt to pass through")
                for slot in self._placement.routers:
                    await self._until_it_answers(slot)
        except TimeoutError:
            missing = [slot.id for slot in slots if slot.id not in self._endpoints]
            what = f"no address from {', '.join(missing)}" if missing else self._unready
            raise DeadlineError(f"the cluster did not start within {timeout_s:g} s: {what}") from None
        self._started = True
        self._ready([self._endpoints[slot.id] for slot in self._placement.routers])

    async def _until_it_answers(self, slot: Slot) -> None:
        """Asks until a prompt passes through, and tells what is in its way when that takes long."""
        loop = asyncio.get_running_loop()
        patient_until, told = loop.time() + PATIENCE_S, ""
        while reason := await self._processes[slot.id].unready():
            self._unready = reason
            if reason != told and loop.time() >= patient_until:
                told = reason
                self._progress(f"{slot.id} is not ready: {reason}")
            await asyncio.sleep(PROBE_PAUSE_S)

    async def _push_members(self) -> None:
        """Tells every router all members after each change, and again where that did not succeed."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            prefill, decode = self.members()
            unheard = False
            for slot in self._placement.routers:
                if slot.id not in self._endpoints:
                    continue
                try:
                    async with asyncio.timeout(CALL_TIMEOUT_S):
                        await self._processes[slot.id].set_members(prefill, decode)
                except (BatonError, TimeoutError) as error:
                    log.warning("%s was not told its workers: %s", slot.id, error or "no answer")
                    unheard = True
            if unheard:
                await asyncio.sleep(RESTART_PAUSE_S)
                self._changed.set()

    async def _end_all(self) -> None:
        """Routers, then workers; each half gets half of the time."""
        for slots in (self._placement.routers, self._placement.workers):
            alive = [slot.id for slot in slots if slot.id in self._processes]
            await asyncio.gather(*(self._end(name, self._config.stop_timeout_s / 2) for name in alive))

    async def _end(self, name: str, timeout_s: float) -> None:
        process = self._processes[name]
        if name not in self._endpoints:  # it has nothing to finish, and while it loads it does not listen
            process.kill()
            return
        try:
            async with asyncio.timeout(timeout_s):
                await process.stop()
                await process.ended()
        except TimeoutError:
            log.warning("%s did not end within %g s: killed", name, timeout_s)
        except BatonError as error:  # it has ended, by a failure that was told when it mattered
            log.debug("%s ended with: %s", name, error)
        finally:
            process.kill()
