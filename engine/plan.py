"""One step of the engine, as data, and the two seams around it.

A step is a list of (sequence, new tokens). A prefill chunk and a decode are the same thing, with many
or with one new token: the role of a worker is its `Scheduler`. An `Executor` runs a plan; it sees
token ids, positions, block ids and sampling, and never a request.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.messages import Logprobs, SamplingParams
from engine.sampling_state import SamplingState


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """What one sequence does in one step.

    ``token_ids`` are new: their KV is written at positions ``start ..``; positions below ``start``
    are read from ``block_ids`` (pool blocks of the sequence, in order, enough for all tokens up to
    and including the new ones). ``sampling`` is set when the token after the last new one is wanted:
    its position is ``start + len(token_ids)``. ``mask_end_tokens``: end tokens may not be chosen.
    ``sampling_state``: where ``sampling`` has penalties or biases. ``targets[i]``: the known token after
    ``token_ids[i]``, for steps whose tokens are to be scored (``num_logprobs`` of the likeliest each).
    """

    sequence_id: str
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    sampling: SamplingParams | None = None
    mask_end_tokens: bool = False
    sampling_state: SamplingState | None = None
    targets: Sequence[int] = ()
    num_logprobs: int = 0

    @property
    def num_logit_rows(self) -> int:
        """The logits of so many of its tokens are wanted: of its last, or of all."""
        return len(self.targets) + (self.sampling is not None)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. ``step_id`` counts up within a worker."""

    step_id: int
    steps: tuple[SequenceStep, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(step.token_ids) for step in self.steps)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave one sequence: the sampled token, or why there is none.

    ``token`` is None when none was wanted; ``logprobs`` comes with it where they are wanted;
    ``target_logprobs`` are those of the step's ``targets``.
    ``error_code``/``error_message``: this sequence failed
    (say, logits that are not finite); its neighbours did not.
    """

    token: int | None = None
    error_code: str = ""
    error_message: str = ""
    logprobs: Logprobs | None = None
    target_logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """``results[i]`` belongs to ``plan.steps[i]``."""

    step_id: int
    results: tuple[StepResult, ...]


LayerHook = Callable[[StepPlan, int], None]
"""Called with (plan, layer) on the event loop once that layer's KV of the whole plan is written."""


class Executor(Protocol):
    """Runs plans, one at a time. In production the model runner on its own thread, in simulation a
    sleep of ``cost(plan)``.

    ``on_layer``, when given, is called on the event loop, in layer order, as each layer's KV is
    complete, and always before `execute` returns.
    """

    async def execute(self, plan: StepPlan, on_layer: LayerHook | None = None) -> StepOutput: ...

    async def close(self) -> None: ...
