"""A modelled accelerator: costs time like one, and keeps KV that can be wrong.

A slot of its memory holds the *state* of its token: a hash of all tokens up to and including it. The
next token is a function of the state of the last one and of the request's seed. So the answer to a
prompt is known without any cluster (`expected_tokens`), and a block that was lost, mixed up, sent too
early or reused too soon gives other tokens, as it would with a real model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from common.handoff import KVLayout
from common.messages import Logprobs, SamplingParams
from engine.plan import LayerHook, SequenceStep, StepOutput, StepPlan, StepResult

_MASK = (1 << 61) - 1


def _mix(state: int, token: int) -> int:
    return (state * 1_000_003 + token * 7_919 + 12_345) & _MASK


def _choose(state: int, sampling: SamplingParams, position: int, vocab_size: int) -> int:
    """The token at ``position`` after ``state``; ids 0 and 1 are kept for end tokens."""
    return 2 + _mix(_mix(_mix(state, sampling.seed & _MASK), sampling.child), position) % (vocab_size - 2)


def expected_tokens(prompt: Sequence[int], sampling: SamplingParams, vocab_size: int) -> list[int]:
    """The whole answer (``max_tokens`` of it) that a faultless cluster gives."""
    state = 0
    for token in prompt:
        state = _mix(state, token)
    tokens: list[int] = []
    for _ in range(sampling.max_tokens):
        token = _choose(state, sampling, len(prompt) + len(tokens), vocab_size)
        tokens.append(token)
        state = _mix(state, token)
    return tokens


def expected_logprobs(prompt: Sequence[int], tokens: Sequence[int]) -> list[Logprobs]:
    """What is told of each of the answer's ``tokens``. No distribution stands behind it: like the token, it is a
    function of all the tokens before, so that one that comes from elsewhere is found out."""
    state = 0
    for token in prompt:
        state = _mix(state, token)
    told = []
    for token in tokens:
        told.append(_logprobs(state))
        state = _mix(state, token)
    return told


def _logprobs(state: int) -> Logprobs:
    return Logprobs(-float(state % 1024))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of one step: ``base_s`` + decodes by KV tokens and batch + context tokens by rate.

    The defaults fit Splitwise's measurements of llama2-70b on H100 (see the traces' README).
    """

    context_tokens_per_s: float = 5846.0
    base_s: float = 0.02957
    per_kv_token_s: float = 2.203e-7
    per_sequence_s: float = 1.981e-4

    def step_s(self, plan: StepPlan) -> float:
        seconds = 0.0
        decodes = 0
        for step in plan.steps:
            if len(step.token_ids) == 1 and step.start > 0:
                decodes += 1
                seconds += self.per_kv_token_s * step.start + self.per_sequence_s
            else:
                seconds += len(step.token_ids) / self.context_tokens_per_s
        return seconds + (self.base_s if decodes else 0.0)


class DeviceMemory:
    """The slots of one worker's pool: ``slots[block * block_size + offset]`` is a token's state, and
    ``heads[block]`` the state before the block's first token, so that a chain of blocks can be checked."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.slots: list[int | None] = [None] * (num_blocks * layout.block_size)
        self.heads: list[int | None] = [None] * num_blocks

    def copy_from(self, source: DeviceMemory, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> None:
        size = self.layout.block_size
        for source_block, target_block in zip(source_blocks, target_blocks, strict=True):
            self.slots[target_block * size : (target_block + 1) * size] = source.slots[
                source_block * size : (source_block + 1) * size
            ]
            self.heads[target_block] = source.heads[source_block]

    def broken_link(self, block_ids: Sequence[int], num_tokens: int) -> int | None:
        """The first of the blocks of ``num_tokens`` tokens that does not continue the one before it."""
        size, slots, heads = self.layout.block_size, self.slots, self.heads
        state: int | None = 0
        for index in range(-(-num_tokens // size)):
            block_id = block_ids[index]
            if heads[block_id] != state or state is None:
                return index
            state = slots[block_id * size + size - 1]
        return None


class SimDevice:
    """An `engine.plan.Executor` on modelled time. Between `stall` and `resume` no step ends."""

    def __init__(self, memory: DeviceMemory, cost: CostModel, vocab_size: int) -> None:
        self._running = asyncio.Event()
        self._running.set()
        self._memory = memory
        self._cost = cost
        self._vocab_size = vocab_size

    async def execute(self, plan: StepPlan, on_layer: LayerHook | None = None) -> StepOutput:
        await asyncio.sleep(self._cost.step_s(plan))
        await self._running.wait()
        output = self.compute(plan)
        if on_layer is not None:
            for layer in range(self._memory.layout.num_layers):
                on_layer(plan, layer)
        return output

    def stall(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def compute(self, plan: StepPlan) -> StepOutput:
        """The step's effect, without its time."""
        return StepOutput(plan.step_id, tuple(self._run(step) for step in plan.steps))

    async def close(self) -> None:
        return None

    def _run(self, step: SequenceStep) -> StepResult:
        slots, size, blocks = self._memory.slots, self._memory.layout.block_size, step.block_ids
        heads = self._memory.heads
        state: int | None = 0
        if step.start:
            broken = self._memory.broken_link(blocks, step.start)
            at = step.start - 1
            state = slots[blocks[at // size] * size + at % size]
            if state is None or broken is not None:
                return StepResult(None, "engine", f"block {broken} of {step.sequence_id} holds foreign or no KV")
        assert state is not None
        scores: list[Logprobs] = []
        for position, token in enumerate(step.token_ids, step.start):
            if position % size == 0:
                heads[blocks[position // size]] = state
            state = _mix(state, token)
            slots[blocks[position // size] * size + position % size] = state
            if len(scores) < len(step.targets):
                scores.append(_logprobs(state))
        if step.sampling is None:
            return StepResult(target_logprobs=tuple(scores))
        token = _choose(state, step.sampling, step.start + len(step.token_ids), self._vocab_size)
        told = _logprobs(state) if step.sampling.num_logprobs is not None else None
        return StepResult(token, logprobs=told, target_logprobs=tuple(scores))
