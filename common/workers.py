"""What workers say of themselves, as frozen dataclasses: the handshake, load, events and the ledger.

Knows nothing of requests, nor of how these messages travel.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from common.handoff import KVLayout, TransferCounters

PROTOCOL_VERSION = 2
"""Version of the worker protocol; both sides of every handshake must agree on it."""


class Role(enum.StrEnum):
    """What a worker does. ``BOTH`` computes prompts and decodes, with no handoff (colocated mode)."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class WorkerState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that a worker serves. ``fingerprint`` is equal only for equal weights and dtype."""

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's numbers between two steps. Blocks are pool blocks, tokens are context tokens.

    ``waiting_tokens`` is the uncached prompt work that is queued or under way (prefill), the KV
    tokens held by running sequences for decode are ``running_tokens``. ``clogged`` are the ids of decode workers
    for which a prefill worker computes nothing now: what it computed for them before is still on its way. Prompts
    for them are not among ``waiting_tokens``.
    """

    state: WorkerState = WorkerState.STARTING
    num_waiting: int = 0
    num_running: int = 0
    waiting_tokens: int = 0
    running_tokens: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    computed_context_tokens: int = 0
    decoded_tokens: int = 0
    preemptions: int = 0
    kv_bytes_sent: int = 0
    kv_bytes_received: int = 0
    sending: TransferCounters = field(default_factory=TransferCounters)
    receiving: TransferCounters = field(default_factory=TransferCounters)
    clogged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's side of the handshake. ``epoch`` differs for every start of the same worker id."""

    worker_id: str
    role: Role
    epoch: int
    host: str
    host_id: str
    pids: tuple[int, ...]
    address: str
    model: ModelInfo
    layout: KVLayout
    total_blocks: int
    max_sequence_tokens: int
    hash_unit_tokens: int
    transports: tuple[str, ...] = ()
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """One element of a worker's event stream, numbered 1, 2, 3, … within an epoch.

    ``stored`` and ``removed`` are prefix hashes (one per hash unit) that entered or left the prefix
    cache. A ``snapshot`` replaces all that was known: its ``stored`` is the complete set. A consumer
    that sees a gap in ``sequence`` must watch anew, which starts with a snapshot.
    """

    sequence: int
    load: WorkerLoad
    snapshot: bool = False
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds blocks: a request attempt, in which state, how many, for how long."""

    request: str
    state: str
    blocks: int
    age_s: float


@dataclass(frozen=True, slots=True)
class WorkerLedger:
    """Every block of one worker, between two steps: the five counts add up to ``total`` (law 3)."""

    worker_id: str
    role: Role
    total: int
    free: int
    cached: int
    reserved: int
    running: int
    in_transfer: int
    holders: tuple[Holder, ...] = field(default=())

    @property
    def balanced(self) -> bool:
        counted = self.free + self.cached + self.reserved + self.running + self.in_transfer
        return counted == self.total
