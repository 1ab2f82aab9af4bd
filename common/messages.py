"""Every type that crosses a process boundary, as frozen dataclasses.

Read this file first: it names all that routers, prefill workers and decode workers tell each other.
It knows nothing of how the messages travel (`rpc/` converts them to protobuf, `sim/` passes them as
they are). Durations are relative seconds, never clock readings: no two machines share a clock.

Legend: *index* is the place of a generated token in the answer (0, 1, 2, …); *position* is its place
in the whole sequence (prompt first).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

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


class FinishReason(enum.StrEnum):
    """Why an answer ended. ``STOP`` and ``LENGTH`` are OpenAI's words for success."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


# ── requests ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Added to one token's logit before anything else is done with it."""

    token: int
    bias: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen.

    Randomness is a pure function of (``seed``, ``child``, position): the same request gives the same
    tokens wherever and in whatever company it runs. ``child`` counts the answers to one prompt.

    In this order: ``logit_bias``; penalties; ``temperature`` (0 is greedy, and the rest is moot); ``top_k``,
    ``top_p``, ``min_p``, each on what the one before left (0, 1.0 and 0.0 switch them off).
    ``repetition_penalty`` divides positive logits, and multiplies negative ones, of every token in prompt or
    answer (Keskar et al. 2019, "CTRL"; 1.0: off). ``frequency_penalty`` times its count in the answer, and
    ``presence_penalty`` once it is there, are taken off a token's logit (OpenAI's definition; 0.0: off).
    ``min_p``: tokens less likely than that share of the likeliest one are left out.

    ``min_tokens``: end tokens are masked until that many tokens were generated.
    ``ignore_eos``: an end token may be sampled, and generation goes on.
    ``num_logprobs``: with each token comes its log probability, and those of so many likeliest tokens;
    None: neither. ``score_prompt``: the prompt's tokens get the same, but for the first, which follows nothing.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    child: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[LogitBias, ...] = ()
    num_logprobs: int | None = None
    score_prompt: bool = False

    @property
    def penalizes(self) -> bool:
        """The choice hangs on the tokens before it, beyond what the model makes of them."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A worker that, as the router believes, holds the KV of a context's first ``num_tokens`` tokens."""

    worker_id: str
    address: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One attempt at one answer.

    ``generated`` holds the tokens that the router accepted from earlier attempts: they are forced,
    never sampled again, and generation continues at index ``len(generated)``.
    ``cache_salt`` separates prefix caches (tenant, adapter, model); equal prompts under different
    salts share nothing. ``timeout_s`` is what is left of the request's time, ``None`` for no limit.
    ``prefix_source``: the worker that computes the context had better pull its beginning from there.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    attempt: int = 0
    generated: tuple[int, ...] = ()
    cache_salt: str = ""
    priority: int = 0
    timeout_s: float | None = None
    trace: str = ""
    prefix_source: PrefixSource | None = None

    @property
    def key(self) -> str:
        """The name of this attempt on a worker: unique, and readable in a ledger."""
        return f"{self.request_id}#{self.attempt}"

    @property
    def context(self) -> tuple[int, ...]:
        """All tokens whose KV is needed before the next one can be sampled."""
        return self.prompt + self.generated


@dataclass(frozen=True, slots=True)
class ContextTokens:
    """Where the KV of a context came from, on one side of one attempt, in tokens.

    On the prefill side ``cached + pulled + computed`` = context, on the decode side
    ``cached + received + computed`` = context (law 4). ``moved`` is *pulled* or *received*.
    """

    cached: int = 0
    moved: int = 0
    computed: int = 0

    @property
    def total(self) -> int:
        return self.cached + self.moved + self.computed


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one attempt on the worker that generated its last token.

    ``context`` is of that worker's side; ``prefill_context`` of the prefill worker's, if the handoff told.
    ``error_code`` and ``error_message`` are set when ``reason`` is ``ERROR`` (codes: `common.errors`).
    """

    reason: FinishReason
    context: ContextTokens = ContextTokens()
    preemptions: int = 0
    error_code: str = ""
    error_message: str = ""
    queue_s: float = 0.0
    handoff_s: float = 0.0
    decode_s: float = 0.0
    prefill_context: ContextTokens = ContextTokens()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of a token's probability."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What the model itself thought of one token of the answer: under the distribution of its plain logits,
    before bias, penalties, temperature and filters. ``top``: the likeliest tokens there, likeliest first
    (of equally likely ones the smaller id); the chosen one need not be among them.
    """

    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one attempt: ``tokens[i]`` has index ``first_index + i``, and ``logprobs[i]`` where
    they are wanted; ``prompt_logprobs`` come with the first one, from a worker that computed the prompt."""

    request_id: str
    attempt: int
    first_index: int
    tokens: tuple[int, ...]
    finish: Finish | None = None
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """All that one decode step produced for one router: one frame of the multiplexed stream."""

    deltas: tuple[TokenDelta, ...]


# ── the handoff ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How a worker's KV pool lies in memory: all that a peer must agree on before bytes move.

    A pool block holds, for each layer, ``block_size`` tokens of keys and as many of values, each
    token ``num_kv_heads * head_dim`` numbers of ``dtype`` (this rank's heads
    ``head_start .. head_start + num_kv_heads`` of ``total_kv_heads``). With ``kind`` "mla" it holds one
    latent vector a token instead of keys and values: one head of ``head_dim`` numbers, the same on every
    rank. ``model`` is the fingerprint of the weights: KV of other weights is never accepted.
    """

    model: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    head_start: int = 0
    total_kv_heads: int = 0
    tp_rank: int = 0
    tp_size: int = 1
    kind: str = "gqa"
    version: int = 1

    @property
    def dtype_bytes(self) -> int:
        return {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}[self.dtype]

    @property
    def halves(self) -> int:
        """Keys and values are two, a latent is one."""
        return 1 if self.kind == "mla" else 2

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys *or* values (or its latent) in one layer."""
        return self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def block_layer_bytes(self) -> int:
        """Bytes of one block in one layer: keys and values."""
        return self.halves * self.block_size * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers: keys and values."""
        return self.num_layers * self.block_layer_bytes


@dataclass(frozen=True, slots=True)
class TransportOffer:
    """One way into a worker's KV pool. ``host_id`` names the machine for same-host transports."""

    name: str
    address: str
    host_id: str = ""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A worker's promise of blocks for one attempt: a decode worker's for a handoff, or any worker's for a
    prefix that it pulls (then ``context_tokens`` are the prefix).

    The worker already holds the KV of the first ``cached_tokens`` context tokens (a multiple
    of its block size, or the whole context less its partial block); ``block_ids`` are its blocks for
    the tokens from there on, in order. ``secret`` authorises writes; the ticket dies ``lease_s``
    after its last progress.
    """

    ticket_id: str
    request_id: str
    attempt: int
    worker_id: str
    epoch: int
    context_tokens: int
    cached_tokens: int
    block_ids: tuple[int, ...]
    layout: KVLayout
    offers: tuple[TransportOffer, ...]
    secret: bytes
    lease_s: float


@dataclass(frozen=True, slots=True)
class HandoffCommit:
    """The last word of a handoff: all blocks were pushed, and this is the first token.

    ``num_pieces`` is how many (layer, block of the receiver) pieces the handoff has; the receiver compares it
    with what arrived intact. ``finish`` is set when the first token already ends the answer. ``context``: where the
    sender had the KV from, and ``logprobs``, in case its own word to the router gets lost. A pulled prefix has no
    token: its commit says token 0, index 0.
    """

    ticket_id: str
    token: int
    index: int
    num_pieces: int
    finish: FinishReason | None = None
    context: ContextTokens = ContextTokens()
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class HandoffReceipt:
    """The decode worker's answer to a commit: what it received and verified."""

    ticket_id: str
    num_pieces: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PrefixRequest:
    """From one worker to another: push the KV of the first of ``tokens``, the ticket's context, into its blocks.

    The tokens after those help a holder with larger blocks to find the one that the context ends in.
    ``timeout_s``: what is left of the time of the request that it is for.
    """

    ticket: Ticket
    tokens: tuple[int, ...]
    cache_salt: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class PrefixReply:
    """``held_tokens`` of the prefix are in the worker's cache. When those are all, they were pushed: so many
    bytes. When there are fewer, nothing was."""

    held_tokens: int
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """From a prefill worker to the router, as soon as it is sampled (KV may still be under way).

    ``prompt_logprobs[i]`` belongs to prompt token i + 1, where they are wanted.
    """

    request_id: str
    attempt: int
    index: int
    token: int
    context: ContextTokens
    finish: FinishReason | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class HandoffDone:
    """From a prefill worker to the router: the decode worker verified and accepted the KV."""

    request_id: str
    attempt: int
    num_bytes: int
    num_blocks: int
    transport: str
    transfer_s: float = 0.0


PrefillEvent = FirstToken | HandoffDone


# ── workers ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that a worker serves. ``fingerprint`` is equal only for equal weights and dtype."""

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


@dataclass(slots=True)
class TransferCounters:
    """What one end of a worker's transfers has done since it started. A piece is one of the receiver's blocks in one
    layer. The end itself counts in it, a report has a copy.

    ``duplicates`` came again and were not written again; ``stale`` pieces came for a ticket or an
    opening that was over; ``corrupt`` ones did not verify; ``resent`` were asked for and sent again;
    ``fallbacks``: a preferred transport did not work and the next one was tried.
    """

    num_bytes: int = 0
    pieces: int = 0
    handoffs: int = 0
    failures: int = 0
    duplicates: int = 0
    stale: int = 0
    corrupt: int = 0
    resent: int = 0
    fallbacks: int = 0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's numbers between two steps. Blocks are pool blocks, tokens are context tokens.

    ``waiting_tokens`` is the uncached prompt work that is queued or under way (prefill), the KV
    tokens held by running sequences for decode are ``running_tokens``.
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
