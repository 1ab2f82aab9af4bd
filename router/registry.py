"""Membership: which workers there are, which of them are ready, and what they hold.

The members are addresses, from the configuration or from the controller (`set_members`); all else comes
from the workers themselves, over one link each. All workers must serve the same weights in a KV layout
that can be passed on: the first one that connects sets the standard, and one that differs is refused
with both sides' values, visible in /cluster. When the last one of a standard is gone, the next sets it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from common.config import Mode
from common.errors import ConfigError, LayoutMismatchError, UnavailableError
from common.handoff import KVLayout
from common.hashing import HASH_UNIT_TOKENS
from common.lifecycle import Tasks
from common.workers import ModelInfo, Role, WorkerInfo, WorkerState
from router.prefix_index import PrefixIndex
from router.worker import Worker
from router.worker_link import ClientFactory, WorkerLink

SHARED_LAYOUT_FIELDS = ("model", "kind", "num_layers", "total_kv_heads", "head_dim", "version")
"""What the KV layouts of all workers have in common; blocks, formats and how heads are dealt may differ."""


class Registry:
    """The workers of one router, in the order of their addresses.

    ``on_news`` is called whenever a worker comes, goes, or reports.
    """

    def __init__(
        self, clients: ClientFactory, *, router_id: str, mode: Mode, suspect_after_s: float, on_news: Callable[[], None]
    ) -> None:
        self.mode = mode
        self.index = PrefixIndex()
        self.model: ModelInfo | None = None
        """The model that is served; stays when all workers are gone."""
        self._layout: KVLayout | None = None
        self._clients = clients
        self._router_id = router_id
        self._suspect_after_s = suspect_after_s
        self._on_news = on_news
        self._workers: dict[str, Worker] = {}
        self._pools: dict[Role, dict[str, Worker]] = {role: {} for role in Role}
        self._links: dict[str, asyncio.Task[None]] = {}
        self._tasks = Tasks()
        self._missing_since: dict[Role, float] = {}

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that a request needs."""
        return (Role.BOTH,) if self.mode == "colocated" else (Role.PREFILL, Role.DECODE)

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def worker(self, address: str) -> Worker:
        return self._workers[address]

    def ready(self, role: Role) -> list[Worker]:
        return [worker for worker in self._pools[role].values() if worker.state is WorkerState.READY]

    def missing(self, now: float) -> tuple[Role, float] | None:
        """A role that has no ready worker, and for how many seconds it has had none."""
        self._note_missing(now)
        return next(((role, now - since) for role, since in self._missing_since.items()), None)

    def _note_missing(self, now: float) -> None:
        """Looks at every change: else a loss would seem to last since one that was over long ago."""
        for role in self.roles:
            if any(worker.state is WorkerState.READY for worker in self._pools[role].values()):
                self._missing_since.pop(role, None)
            else:
                self._missing_since.setdefault(role, now)

    def _news(self) -> None:
        self._note_missing(asyncio.get_running_loop().time())
        self._on_news()

    def not_ready(self, *roles: Role) -> list[str]:
        """The workers (of ``roles``; of all) that take no work, each with its reason."""
        return [
            f"{w.worker_id} is {w.state}: {w.reason}"
            for w in self._workers.values()
            if w.state is not WorkerState.READY and (not roles or w.role in roles)
        ]

    def explain(self, role: Role) -> str:
        """Why no worker of ``role`` is ready."""
        reasons = self.not_ready(role)
        return f"no {role} worker is ready" + (f" ({'; '.join(reasons)})" if reasons else ": there is none")

    def served_model(self) -> ModelInfo:
        """The model, once a worker has told it."""
        if self.model is None:
            raise UnavailableError("no worker has connected yet, so the model's limits are unknown", retry_after_s=1.0)
        return self.model

    def largest_sequence(self, role: Role) -> int:
        """Tokens that the largest living worker of ``role`` can hold for one request; 0 when there is none."""
        return max((w.max_sequence_tokens for w in self._pools[role].values() if w.alive), default=0)

    # ── membership ────────────────────────────────────────────────────────────────────────────────

    def set_members(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        """From now on exactly these addresses are members. One that is left out finishes its requests."""
        decode_role = Role.BOTH if self.mode == "colocated" else Role.DECODE
        members = dict.fromkeys(decode, decode_role) | dict.fromkeys(prefill, Role.PREFILL)
        for address, role in [*((a, Role.PREFILL) for a in prefill), *((a, decode_role) for a in decode)]:
            worker = self._workers.get(address)
            if worker is None:
                self._join(Worker(address, role))
            else:
                worker.leaving = False
        for address, worker in list(self._workers.items()):
            if address not in members:
                worker.leaving = True
        self.release_leavers()
        self._news()

    def release_leavers(self) -> None:
        """Lets go of workers that are no members any more and have nothing to finish."""
        for address, worker in list(self._workers.items()):
            if worker.leaving and not worker.attempts:
                del self._workers[address], self._pools[worker.role][address]
                self.index.drop(address)
                self._links.pop(address).cancel()

    async def close(self) -> None:
        await self._tasks.close()

    def _join(self, worker: Worker) -> None:
        self._workers[worker.address] = self._pools[worker.role][worker.address] = worker
        link = WorkerLink(
            worker,
            self._clients,
            self.index,
            router_id=self._router_id,
            suspect_after_s=self._suspect_after_s,
            admit=self._admit,
            news=self._news,
        )
        self._links[worker.address] = self._tasks.spawn(link.run(), f"link {worker.address}")

    def _admit(self, worker: Worker, info: WorkerInfo) -> None:
        """Raises when the worker that answered does not fit the others."""
        if info.role is not worker.role:
            raise ConfigError(f"{info.worker_id} at {worker.address} has the role {info.role}, not {worker.role}")
        for other in self._workers.values():
            if other is not worker and other.alive and other.worker_id == info.worker_id:
                raise ConfigError(
                    f"the worker at {worker.address} is called {info.worker_id}, like the one at {other.address}: "
                    "give each its own worker.id"
                )
        if info.hash_unit_tokens != HASH_UNIT_TOKENS:
            raise ConfigError(
                f"{info.worker_id} hashes prefixes of {info.hash_unit_tokens} tokens, this router of {HASH_UNIT_TOKENS}"
            )
        if self._layout is None or not any(w.alive for w in self._workers.values() if w is not worker):
            self._layout, self.model = info.layout, info.model
            return
        for name in SHARED_LAYOUT_FIELDS:
            ours, theirs = getattr(self._layout, name), getattr(info.layout, name)
            if ours != theirs:
                raise LayoutMismatchError(
                    f"{info.worker_id} has KV of another kind: {name} is {theirs!r}, the other workers have {ours!r}"
                )
        if self.model is not None and info.model.fingerprint != self.model.fingerprint:
            raise LayoutMismatchError(
                f"{info.worker_id} serves the weights {info.model.fingerprint}, "
                f"the other workers {self.model.fingerprint}"
            )
