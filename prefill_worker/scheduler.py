"""What a prefill worker computes next: chunks of prompts, first come first served, under a token budget.

    add ──▶ waiting ──blocks──▶ running (chunk by chunk) ──first token──▶ held for the handoff ──release──▶ gone
                         │        ▲
                         └ pulling ┘  (its beginning comes from another worker)

What is held while its KV travels piles up where a link or a decode worker is slow: beyond a bound
(`undelivered.py`) no further prompt for that worker is begun or gone on with, and those for others pass it.

Pure: it knows sequences, blocks and numbers; nothing of handoffs but that blocks stay held until
somebody says `release`.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from common.errors import BatonError
from common.messages import ContextTokens
from common.workers import ModelInfo
from engine.blocks import BlockPool, BlockState
from engine.plan import SequenceStep, StepOutput, StepPlan
from engine.sequence import Sequence, SequenceOutput, finish_reason
from prefill_worker.undelivered import Undelivered


class PrefillScheduler:
    """``chunk_tokens``: new tokens in one step, over all sequences; ``max_sequences``: prompts in one step;
    ``undelivered_tokens``: see `Undelivered`."""

    def __init__(
        self,
        pool: BlockPool,
        model: ModelInfo,
        chunk_tokens: int,
        max_sequences: int,
        undelivered_tokens: float = math.inf,
    ) -> None:
        self._pool = pool
        self._model = model
        self._chunk_tokens = chunk_tokens
        self._max_sequences = max_sequences
        self._waiting: dict[str, Sequence] = {}
        self._pulling: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}
        self._held: dict[str, Sequence] = {}
        self._undelivered = Undelivered(undelivered_tokens)
        self._next_step_id = 0
        self._admitted: list[Sequence] = []
        self._pulls: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._pulling) + len(self._running) + len(self._held)

    @property
    def waiting_tokens(self) -> int:
        """Context tokens still to compute, but those for clogged targets."""
        clogged = self._undelivered.clogged()
        parts = (self._waiting, self._pulling, self._running)
        target = self._undelivered.target
        return sum(s.num_remaining for part in parts for s in part.values() if target(s.key) not in clogged)

    @property
    def clogged(self) -> tuple[str, ...]:
        """The targets for which nothing is computed now (`Undelivered`)."""
        return tuple(sorted(self._undelivered.clogged()))

    def add(self, sequence: Sequence, target: str = "", num_there: int = 0) -> None:
        """Puts a sequence in the queue: smaller priority first, then the order of arrival. Its KV is for the
        worker ``target``, which has that of the first ``num_there`` tokens."""
        self._waiting[sequence.key] = sequence
        self._undelivered.expect(sequence.key, target, sequence.num_context - num_there)
        if sequence.request.priority != 0 or any(s.request.priority for s in self._waiting.values()):
            self._waiting = dict(sorted(self._waiting.items(), key=lambda item: item[1].request.priority))

    def take_admitted(self) -> list[Sequence]:
        """Sequences that since the last call got their blocks, and the pulled KV in them."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def take_pulls(self) -> list[Sequence]:
        """Sequences that got their blocks since the last call, and wait for `pulled`."""
        pulls, self._pulls = self._pulls, []
        return pulls

    def schedule(self, now: float) -> StepPlan | None:
        clogged = self._undelivered.clogged()
        self._admit(now, clogged)
        budget = self._chunk_tokens
        steps: list[SequenceStep] = []
        for sequence in self._running.values():
            if budget == 0 or len(steps) == self._max_sequences:
                break
            if self._undelivered.target(sequence.key) in clogged:
                continue
            start = sequence.num_computed
            count = self._chunk(start, sequence.num_remaining, budget, first=not steps)
            if count == 0:
                break
            budget -= count
            steps.append(sequence.step(count))
        if not steps:
            return None
        self._next_step_id += 1
        return StepPlan(self._next_step_id, tuple(steps))

    def update(self, plan: StepPlan, output: StepOutput, now: float) -> list[SequenceOutput]:
        outputs: list[SequenceOutput] = []
        for step, result in zip(plan.steps, output.results, strict=True):
            sequence = self._running[step.sequence_id]
            error = sequence.absorb(step, result)
            if error is not None:
                outputs.append(SequenceOutput(sequence, sequence.num_generated, error=error))
                self._drop(sequence)
                continue
            self._pool.publish(sequence.key, sequence.tokens, sequence.root, sequence.num_computed)
            if result.token is None:
                continue
            index = sequence.num_generated
            sequence.append(result.token)
            sequence.first_token_at = now
            finish = finish_reason(sequence, self._model.eos_token_ids, self._model.max_model_len)
            del self._running[sequence.key]
            self._held[sequence.key] = sequence
            self._undelivered.computed(sequence.key)
            self._pool.set_state(sequence.key, BlockState.IN_TRANSFER)
            outputs.append(SequenceOutput(sequence, index, result.token, finish, logprobs=result.logprobs))
        return outputs

    def abort(self, sequence: Sequence, error: BatonError) -> bool:
        """Ends a sequence at whatever stage. True: its blocks are back. False: it is in the running step and
        ends with it (an output with ``error``), or being pulled for and ends with that."""
        if sequence.in_flight or sequence.num_pulling:
            sequence.error = error
            return False
        self._drop(sequence)
        return True

    def pulled(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """The pull for a sequence has ended: ``num_tokens`` came, and nothing writes its blocks any more."""
        del self._pulling[sequence.key]
        sequence.pulled(num_tokens)
        if sequence.error is not None:
            self._drop(sequence)
            return
        self._pool.publish(sequence.key, sequence.tokens, sequence.root, sequence.num_computed)
        self._pool.set_state(sequence.key, BlockState.RUNNING)
        self._running[sequence.key] = sequence
        self._admitted.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """The handoff of a held sequence is over: its blocks become cache. Unknown ones are ignored."""
        self._drop(sequence)

    def _admit(self, now: float, clogged: Collection[str]) -> None:
        """Gives blocks to the head of the queue; nobody overtakes it, unless its target is ``clogged``."""
        passing = (key for key in (*self._pulling, *self._running) if self._undelivered.target(key) not in clogged)
        num_active = sum(1 for _ in passing)
        for sequence in list(self._waiting.values()):
            if num_active >= self._max_sequences:
                return
            if self._undelivered.target(sequence.key) in clogged:
                continue
            # The last token is always computed: its logits are the first token.
            most = 0 if sequence.is_scoring else sequence.num_context - 1
            shared = self._pool.match(sequence.tokens, sequence.root, most)
            needed = self._pool.blocks_for(sequence.num_context) - len(shared)
            holding = self._pool.allocate(sequence.key, needed, BlockState.RUNNING, now, shared)
            if holding is None:
                return
            num_active += 1
            del self._waiting[sequence.key]
            sequence.block_ids = holding.block_ids
            sequence.num_computed = len(shared) * self._pool.block_size
            sequence.context = ContextTokens(
                cached=sequence.num_computed, computed=sequence.num_context - sequence.num_computed
            )
            sequence.started_at = now
            sequence.num_pulling = sequence.pullable(self._pool.block_size)
            if sequence.num_pulling:
                self._pool.set_state(sequence.key, BlockState.RESERVED)
                self._pulling[sequence.key] = sequence
                self._pulls.append(sequence)
            else:
                self._running[sequence.key] = sequence
                self._admitted.append(sequence)

    def _chunk(self, start: int, remaining: int, budget: int, first: bool) -> int:
        """Tokens of the next chunk. All but the last chunk of a prompt end on a block boundary, since
        only complete blocks can be handed over; a lone prompt may break that where a block is larger
        than the whole budget."""
        if remaining <= budget:
            return remaining
        aligned = (start + budget) // self._pool.block_size * self._pool.block_size - start
        if aligned > 0:
            return aligned
        return budget if first else 0

    def _drop(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence.key, None)
        self._running.pop(sequence.key, None)
        self._held.pop(sequence.key, None)
        self._undelivered.forget(sequence.key)
        if self._pool.holds(sequence.key):
            self._pool.release(sequence.key)
