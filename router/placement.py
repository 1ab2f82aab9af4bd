"""Placement: which prefill worker and which decode worker a request goes to.

Pure: it reads loads and prefix hits, and has no clock, no state and no side effect. The rule is least
estimated work. For a prefill worker that is the prompt tokens that wait there plus those of this
request that it would have to compute; so a prefix hit counts for as much as it saves and no more, and a
hot prefix cannot pull everything to one worker: once the others' queues are shorter by the length of
the prefix, they win. For a decode worker it is the time of its next step plus the tokens to move there.

Ties go to the worker that comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import ContextLengthError, NoCapacityError

SEQUENCE_TOKENS = 900
"""One more sequence in a decode step takes as long as this many more KV tokens (a fit of Splitwise's
H100 measurements: 0.1981 ms per sequence, 0.0002203 ms per token)."""

MAX_RECORDED = 16
"""Scores of at most this many candidates are kept in a decision."""


class Outlook(Protocol):
    """A worker's load as this router believes it to be now: the last report and what it sent since."""

    @property
    def address(self) -> str: ...
    @property
    def worker_id(self) -> str: ...
    @property
    def waiting_tokens(self) -> int: ...
    @property
    def running_tokens(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def available_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def max_sequence_tokens(self) -> int: ...
    @property
    def accepting(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs: KV of ``context_tokens`` now, room for ``final_tokens`` at its end."""

    context_tokens: int
    final_tokens: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One worker and the numbers that chose it. ``work`` is what was compared, in tokens."""

    address: str
    worker_id: str
    work: int
    load_tokens: int
    hit_tokens: int
    scores: tuple[tuple[str, int], ...] = ()
    """(worker id, work) of the candidates, this one included, when they are few."""


@dataclass(frozen=True, slots=True)
class Decision:
    """``prefill`` is None when the decode worker computes the prompt itself (colocated)."""

    prefill: Choice | None
    decode: Choice


def place_pair(
    demand: Demand,
    prefills: Sequence[Outlook],
    decodes: Sequence[Outlook],
    hits: Mapping[str, int],
    *,
    backlog_tokens: int,
    avoid: Collection[str] = (),
) -> Decision:
    """The pair with the least estimated work.

    ``hits``: worker address → tokens of the prompt that it holds. ``backlog_tokens``: a prefill worker
    with this much waiting, or without room for the prompt, gets no more, since backlog belongs into the
    router's queue, where it is in order and holds no decode worker's blocks. Workers in ``avoid`` are taken
    only when there is no other.

    Raises NoCapacityError when all are full for now, ContextLengthError when none is large enough.
    """
    prefills = _large_enough(prefills, demand.context_tokens, "prefill")
    decodes = _large_enough(decodes, demand.final_tokens, "decode")
    free = [w for w in prefills if w.waiting_tokens < backlog_tokens and _has_room(w, demand, hits)]
    ready = _preferred(free, avoid)
    if not ready:
        raise NoCapacityError(
            f"each of {len(prefills)} prefill workers has {backlog_tokens} tokens or more to compute, "
            f"or no room for the KV of {demand.context_tokens}"
        )
    roomy = _preferred(_with_room(demand, decodes, hits), avoid)

    def prefill_load(worker: Outlook) -> int:
        return worker.waiting_tokens

    return Decision(
        prefill=_least_work(ready, demand, hits, prefill_load),
        decode=_least_work(roomy, demand, hits, _decode_load),
    )


def place_single(
    demand: Demand, workers: Sequence[Outlook], hits: Mapping[str, int], *, avoid: Collection[str] = ()
) -> Decision:
    """The worker of role *both* with the least estimated work. Raises as `place_pair` does."""
    roomy = _preferred(_with_room(demand, _large_enough(workers, demand.final_tokens, "decode"), hits), avoid)

    def load(worker: Outlook) -> int:
        # Each running sequence takes one token of every step from the prompts.
        return worker.waiting_tokens + worker.num_sequences

    return Decision(prefill=None, decode=_least_work(roomy, demand, hits, load))


def _decode_load(worker: Outlook) -> int:
    return worker.running_tokens + SEQUENCE_TOKENS * worker.num_sequences


def _large_enough(workers: Sequence[Outlook], num_tokens: int, role: str) -> list[Outlook]:
    fitting = [worker for worker in workers if worker.max_sequence_tokens >= num_tokens]
    if not fitting:
        largest = max((worker.max_sequence_tokens for worker in workers), default=0)
        raise ContextLengthError(f"{num_tokens} tokens do not fit any {role} worker; the largest holds {largest}")
    return fitting


def _with_room(demand: Demand, workers: Sequence[Outlook], hits: Mapping[str, int]) -> list[Outlook]:
    roomy = [worker for worker in workers if _has_room(worker, demand, hits)]
    if not roomy:
        raise NoCapacityError(
            f"none of {len(workers)} decode workers has room for the KV of {demand.context_tokens} tokens"
        )
    return roomy


def _has_room(worker: Outlook, demand: Demand, hits: Mapping[str, int]) -> bool:
    missing = demand.context_tokens - hits.get(worker.address, 0)
    return worker.accepting and worker.available_blocks * worker.block_size >= missing


def _preferred(workers: list[Outlook], avoid: Collection[str]) -> list[Outlook]:
    return [worker for worker in workers if worker.address not in avoid] or workers


def _least_work(
    workers: Sequence[Outlook], demand: Demand, hits: Mapping[str, int], load_of: Callable[[Outlook], int]
) -> Choice:
    works = []
    for worker in workers:
        # At least one token is computed (its logits are wanted), whatever the cache holds.
        missing = max(1, demand.context_tokens - hits.get(worker.address, 0))
        works.append(load_of(worker) + missing)
    work = min(works)
    best = workers[works.index(work)]
    return Choice(
        address=best.address,
        worker_id=best.worker_id,
        work=work,
        load_tokens=load_of(best),
        hit_tokens=hits.get(best.address, 0),
        scores=tuple((worker.worker_id, score) for worker, score in zip(workers, works, strict=True))
        if len(workers) <= MAX_RECORDED
        else (),
    )
