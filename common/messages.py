"""What routers and workers tell each other about requests, as frozen dataclasses.

Read this file first. `handoff.py` has what workers tell each other, `workers.py` what they say of themselves:
together that is every type that crosses a process boundary. It knows nothing of how the messages travel (`rpc/`
converts them to protobuf, `sim/` passes them as they are). Durations are relative seconds, never clock
readings: no two machines share a clock.

Legend: *index* is the place of a generated token in the answer (0, 1, 2, …); *position* is its place
in the whole sequence (prompt first).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FinishReason(enum.StrEnum):
    """Why an answer ended. ``STOP`` and ``LENGTH`` are OpenAI's words for success."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


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
