"""Placement: which prefill worker and which decode worker a request goes to.

Pure: it reads loads and prefix hits, and has no clock, no state and no side effect. The rule is least
estimated work. For a prefill worker that is the prompt tokens that wait there plus those of this
request that it would have to compute; so a prefix hit counts for as much as it saves and no more, and a
hot prefix cannot pull everything to one worker: once the others' queues are shorter by the length of
the prefix, they win. A prefix that another worker holds may be pulled from there instead of computed, where
that is estimated to take less. For a decode worker it is the time of its next step plus the tokens to move
there. In adaptive mode a request goes to the decode worker alone when what that lacks is little: it computes
that itself.

Ties go to the worker that comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import ContextLengthError, NoCapacityError
from common.messages import PrefixSource

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
    @property
    def clogged(self) -> Collection[str]:
        """Ids of decode workers to which this prefill worker's KV does not get away."""
        ...


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs: KV of ``context_tokens`` now, room for ``final_tokens`` at its end. ``all_computed``:
    on the worker that computes it, whatever is cached (its prompt is scored)."""

    context_tokens: int
    final_tokens: int
    all_computed: bool = False


@dataclass(frozen=True, slots=True)
class PullCost:
    """What pulling takes, in tokens that could be computed meanwhile: ``fixed_tokens``, and for each token
    ``token_share``."""

    token_share: float
    fixed_tokens: int

    def of(self, num_tokens: int) -> int:
        return self.fixed_tokens + math.ceil(self.token_share * num_tokens)


@dataclass(frozen=True, slots=True)
class Pull:
    """A prefix of ``prefix_tokens`` tokens is at another worker: those that the chosen one lacks, ``num_tokens``,
    are to be pulled from there, which is estimated to take as long as computing ``cost_tokens``."""

    address: str
    worker_id: str
    prefix_tokens: int
    num_tokens: int
    cost_tokens: int


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
    pull: Pull | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """``prefill`` is None when the decode worker computes the prompt itself: colocated, or adaptive where it
    lacks little of it. ``reason`` says why it is so."""

    prefill: Choice | None
    decode: Choice
    reason: str = ""

    @property
    def prefix_source(self) -> PrefixSource | None:
        """Where the worker that computes the prompt pulls its beginning from."""
        pull = (self.prefill or self.decode).pull
        return PrefixSource(pull.worker_id, pull.address, pull.prefix_tokens) if pull is not None else None


def place_pair(
    demand: Demand,
    prefills: Sequence[Outlook],
    decodes: Sequence[Outlook],
    hits: Mapping[str, int],
    *,
    backlog_tokens: int,
    avoid: Collection[str] = (),
    pulls: PullCost | None = None,
) -> Decision:
    """The pair with the least estimated work.

    ``hits``: worker address → tokens of the prompt that it holds. ``backlog_tokens``: a prefill worker
    with this much waiting, or without room for the prompt, gets no more, since backlog belongs into the
    router's queue, where it is in order and holds no decode worker's blocks. Nor is a pair made of which the one
    does not get rid of what it has computed for the other. Workers in ``avoid`` are taken only when there is no
    other. ``pulls``: prefixes may be pulled, at this cost, from any of the workers.

    Raises NoCapacityError when all are full for now, ContextLengthError when none is large enough.
    """
    offer = _offer(demand, [*prefills, *decodes], hits, avoid, pulls)
    prefills = _large_enough(prefills, demand.context_tokens, "prefill")
    decodes = _large_enough(decodes, demand.final_tokens, "decode")
    free = [w for w in prefills if w.waiting_tokens < backlog_tokens and _has_room(w, demand, hits)]
    if not free:
        raise NoCapacityError(
            f"each of {len(prefills)} prefill workers has {backlog_tokens} tokens or more to compute, "
            f"or no room for the KV of {demand.context_tokens}"
        )
    roomy = _with_room(demand, decodes, hits)
    paired = [worker for worker in free if not worker.clogged or _reached(worker, roomy)]
    if not paired:
        raise NoCapacityError(
            f"the KV that {len(free)} prefill workers have computed for the decode workers with room has yet to arrive"
        )

    def prefill_load(worker: Outlook) -> int:
        return worker.waiting_tokens

    prefill = _least_work(_preferred(paired, avoid), demand, hits, prefill_load, computes=True, offer=offer)
    (chosen,) = [worker for worker in paired if worker.address == prefill.address]
    decode = _least_work(_preferred(_reached(chosen, roomy), avoid), demand, hits, _decode_load)
    return Decision(prefill=prefill, decode=decode, reason="split")


def _reached(prefill: Outlook, decodes: Sequence[Outlook]) -> list[Outlook]:
    """Those to which the KV of ``prefill`` gets away."""
    return [worker for worker in decodes if worker.worker_id not in prefill.clogged]


def place_local(
    demand: Demand,
    decodes: Sequence[Outlook],
    hits: Mapping[str, int],
    *,
    most_tokens: int,
    avoid: Collection[str] = (),
) -> Decision | None:
    """The decode worker with the least estimated work, alone, if it lacks ``most_tokens`` of the context or fewer
    (adaptive mode); None if it lacks more, so that a prefill worker should compute them. Raises as `place_pair`
    does, for decode workers.
    """
    roomy = _preferred(_with_room(demand, _large_enough(decodes, demand.final_tokens, "decode"), hits), avoid)
    choice = _least_work(roomy, demand, hits, _decode_load, computes=True)
    missing = _missing(demand, choice.hit_tokens, computes=True)
    if missing > most_tokens:
        return None
    return Decision(None, choice, f"local: {choice.worker_id} lacks {missing} tokens, up to {most_tokens} it computes")


def place_single(
    demand: Demand,
    workers: Sequence[Outlook],
    hits: Mapping[str, int],
    *,
    avoid: Collection[str] = (),
    pulls: PullCost | None = None,
) -> Decision:
    """The worker of role *both* with the least estimated work. ``pulls`` and errors as for `place_pair`."""
    offer = _offer(demand, workers, hits, avoid, pulls)
    roomy = _preferred(_with_room(demand, _large_enough(workers, demand.final_tokens, "decode"), hits), avoid)

    def load(worker: Outlook) -> int:
        # Each running sequence takes one token of every step from the prompts.
        return worker.waiting_tokens + worker.num_sequences

    choice = _least_work(roomy, demand, hits, load, computes=True, offer=offer)
    return Decision(prefill=None, decode=choice, reason="colocated")


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


def _missing(demand: Demand, hit_tokens: int, *, computes: bool) -> int:
    """Tokens of the context that a worker has to get, or to compute."""
    if computes and demand.all_computed:
        return demand.context_tokens
    # At least one token is computed (its logits are wanted), whatever the cache holds.
    return max(1, demand.context_tokens - hit_tokens)


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a worker that lacks it could pull: the first ``num_tokens`` of a context, from ``holder``."""

    holder: Outlook
    prefix_tokens: int
    num_tokens: int
    cost: PullCost

    def saves(self, hit_tokens: int) -> int:
        """For a worker that holds ``hit_tokens`` itself: tokens that it need not compute, less what the pull takes.
        The holder itself saves nothing."""
        num_tokens = self.num_tokens - hit_tokens
        return max(0, num_tokens - self.cost.of(num_tokens)) if num_tokens > 0 else 0

    def pull(self, hit_tokens: int) -> Pull | None:
        if not self.saves(hit_tokens):
            return None
        num_tokens = self.num_tokens - hit_tokens
        return Pull(
            self.holder.address, self.holder.worker_id, self.prefix_tokens, num_tokens, self.cost.of(num_tokens)
        )


def _offer(
    demand: Demand,
    workers: Sequence[Outlook],
    hits: Mapping[str, int],
    avoid: Collection[str],
    cost: PullCost | None,
) -> _Offer | None:
    """The worker that holds most of the prompt gives, of equal ones the least busy."""
    if cost is None or demand.all_computed or not hits:
        return None
    holders = [worker for worker in workers if worker.address in hits and worker.address not in avoid]
    if not holders:
        return None
    best = min(holders, key=lambda worker: (-hits[worker.address], worker.num_sequences))
    prefix_tokens = hits[best.address]
    # The last token is computed.
    return _Offer(best, prefix_tokens, min(prefix_tokens, demand.context_tokens - 1), cost)


def _least_work(
    workers: Sequence[Outlook],
    demand: Demand,
    hits: Mapping[str, int],
    load_of: Callable[[Outlook], int],
    *,
    computes: bool = False,
    offer: _Offer | None = None,
) -> Choice:
    """``computes``: what is missing is computed by the worker itself, but for what it pulls of the ``offer``."""
    works = []
    for worker in workers:
        hit_tokens = hits.get(worker.address, 0)
        saved = offer.saves(hit_tokens) if offer is not None else 0
        works.append(load_of(worker) + _missing(demand, hit_tokens, computes=computes) - saved)
    work = min(works)
    best = workers[works.index(work)]
    hit_tokens = hits.get(best.address, 0)
    return Choice(
        address=best.address,
        worker_id=best.worker_id,
        work=work,
        load_tokens=load_of(best),
        hit_tokens=hit_tokens,
        scores=tuple((worker.worker_id, score) for worker, score in zip(workers, works, strict=True))
        if len(workers) <= MAX_RECORDED
        else (),
        pull=offer.pull(hit_tokens) if offer is not None else None,
    )
