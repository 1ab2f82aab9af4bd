"""A request inside the engine: its tokens, how many of them have KV, and which blocks hold it.

A sequence that has n tokens of which n-1 are computed decodes; one with more to compute is a prompt
(or, after preemption or a crash, a context) under way. There is no other difference.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import BatonError
from common.hashing import root_hash
from common.messages import ContextTokens, FinishReason, GenerationRequest, Logprobs
from engine.sampling_state import SamplingState


class Sequence:
    """``tokens`` = prompt + forced tokens of earlier attempts + what was sampled here."""

    __slots__ = (
        "arrival",
        "block_ids",
        "context",
        "error",
        "first_token_at",
        "in_flight",
        "key",
        "num_computed",
        "num_context",
        "preemptions",
        "prompt_logprobs",
        "request",
        "root",
        "sampling_state",
        "started_at",
        "tokens",
    )

    def __init__(self, request: GenerationRequest, model: str, arrival: float) -> None:
        self.request = request
        self.key = request.key
        self.tokens: list[int] = [*request.prompt, *request.generated]
        self.num_context = len(self.tokens)
        self.prompt_logprobs: list[Logprobs] = []
        """What the model thought of the prompt's tokens so far, from the second one on."""
        self.sampling_state = SamplingState.of(request.sampling, request.prompt, request.generated)
        self.num_computed = 0
        self.block_ids: list[int] = []
        self.root = root_hash(model, request.cache_salt)
        self.arrival = arrival
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.context = ContextTokens()
        self.preemptions = 0
        self.in_flight = False
        """Part of the step that is running: its blocks must not move."""
        self.error: BatonError | None = None
        """Why it is to be ended as soon as it is not in flight."""

    def append(self, token: int) -> None:
        """The next token of the answer."""
        self.tokens.append(token)
        if self.sampling_state is not None:
            self.sampling_state.add(token)

    @property
    def is_scoring(self) -> bool:
        """Prompt tokens are still to be scored here: all of them have to be computed, whatever is cached. One
        that goes on with accepted tokens has been scored before."""
        request = self.request
        return (
            request.sampling.score_prompt
            and not request.generated
            and len(self.prompt_logprobs) < len(request.prompt) - 1
        )

    def targets(self, start: int, count: int) -> list[int]:
        """The known tokens after those of a step, as far as it is to score them."""
        return self.tokens[start + 1 : start + count + 1] if self.is_scoring else []

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be computed; 1 means decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """The next step computes one token that this worker or a predecessor sampled."""
        return self.num_remaining == 1 and len(self.tokens) > self.num_context

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far; also the index of the next one."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def log_fields(self) -> dict[str, object]:
        """What a log line about it has to name."""
        return {"request_id": self.request.request_id, "attempt": self.request.attempt}

    @property
    def mask_end_tokens(self) -> bool:
        return self.num_generated < self.request.sampling.min_tokens


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a step did for a sequence. ``finish`` ends it; ``error`` says why when it failed."""

    sequence: Sequence
    index: int
    token: int | None = None
    finish: FinishReason | None = None
    error: BatonError | None = None
    logprobs: Logprobs | None = None


def finish_reason(sequence: Sequence, eos_token_ids: tuple[int, ...], max_model_len: int) -> FinishReason | None:
    """Whether the last token of ``sequence`` ends it: an end token, or a limit."""
    sampling = sequence.request.sampling
    token = sequence.tokens[-1]
    if token in sampling.stop_token_ids or (token in eos_token_ids and not sampling.ignore_eos):
        return FinishReason.STOP
    if sequence.num_generated >= sampling.max_tokens or len(sequence.tokens) >= max_model_len:
        return FinishReason.LENGTH
    return None
