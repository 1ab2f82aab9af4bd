"""What workers tell each other, as frozen dataclasses: who has room for whose KV, how it lies there, and that it came.

Knows nothing of the frames that KV travels in (`kv_transfer/frames.py`), nor of how these messages do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.messages import ContextTokens, FinishReason, Logprobs


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
    context: ContextTokens = field(default_factory=ContextTokens)
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
