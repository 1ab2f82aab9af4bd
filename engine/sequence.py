"""A request inside the engine: its tokens, how many of them have KV, and which blocks hold it.

A sequence that has n tokens of which n-1 are computed decodes; one with more to compute is a prompt
(or, after preemption or a crash, a context) under way. There is no other difference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.errors import BatonError, from_wire
from common.hashing import root_hash
from common.messages import ContextTokens, FinishReason, GenerationRequest, Logprobs
from engine.plan import SequenceStep, StepResult
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
        "num_pulling",
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
        self.num_pulling = 0
        """Tokens after the computed ones whose KV is being pulled: until that has ended its blocks must not move."""
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

    def step(self, count: int) -> SequenceStep:
        """Its part in a step that computes its next ``count`` tokens, and samples when those are all. From here
        on it is in flight, until `absorb`."""
        self.in_flight = True
        start, end = self.num_computed, self.num_computed + count
        return SequenceStep(
            self.key,
            self.tokens[start:end],
            start,
            tuple(self.block_ids),
            self.request.sampling if end == len(self.tokens) else None,
            self.mask_end_tokens,
            self.sampling_state,
            self.tokens[start + 1 : end + 1] if self.is_scoring else (),
            self.request.sampling.num_logprobs or 0,
        )

    def absorb(self, step: SequenceStep, result: StepResult) -> BatonError | None:
        """Takes in what the step gave, but for the token; returns why the sequence ends, if it failed or was
        aborted meanwhile."""
        self.in_flight = False
        if self.error is None and result.error_code:
            self.error = from_wire(result.error_code, result.error_message)
        if self.error is None:
            self.num_computed += len(step.token_ids)
            self.prompt_logprobs.extend(result.target_logprobs)
        return self.error

    def pullable(self, block_size: int) -> int:
        """Tokens after the cached ones that its prefix source is believed to hold, in full blocks. The last token is
        always computed."""
        source = self.request.prefix_source
        if source is None or self.is_scoring:
            return 0
        end = min(source.num_tokens, self.num_context - 1) // block_size * block_size
        return max(0, end - self.num_computed)

    def pulled(self, num_tokens: int) -> None:
        """The pull has ended and brought the KV of ``num_tokens`` tokens."""
        self.num_pulling = 0
        self.num_computed += num_tokens
        context = self.context
        self.context = replace(context, moved=num_tokens, computed=context.computed - num_tokens)

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

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be computed; 1 means decoding."""
        return len(self.tokens) - self.num_computed - self.num_pulling

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
