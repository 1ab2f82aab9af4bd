"""What a decode worker computes next: one token for every running sequence, and contexts that are its own.

                  reserve ──▶ reserved ──KV arrived: join──▶ running ──end──▶ gone
    (local prefill) submit ──▶ (pulling ──pulled──▶)──────▶ running │
                                            resumed ▲               ▼ blocks ran out
                                                    └── preempted ◀─┘

A running sequence has tokens to compute: one (it decodes) or more (its context is computed here, in
chunks: colocated, adaptive, or after preemption). Everything that decodes is in every step; contexts share what
`chunk_tokens` allows beside them. When blocks run out the sequence that joined last gives its blocks
back and starts again when there are enough, before anyone new: nobody starves, and since the one that
has run longest is never the victim while another runs, somebody always ends.

Pure: it knows sequences, blocks and numbers; no tickets, no network.
"""

from __future__ import annotations

from common.errors import BatonError, NoCapacityError
from common.messages import ContextTokens, Logprobs
from common.workers import ModelInfo
from engine.blocks import BlockPool, BlockState, Holding
from engine.plan import SequenceStep, StepOutput, StepPlan
from engine.sequence import Sequence, SequenceOutput, finish_reason


class DecodeScheduler:
    """``max_sequences``: sequences reserved, pulled for, running or preempted; ``chunk_tokens``: context tokens in
    one step beside the decodes."""

    def __init__(self, pool: BlockPool, model: ModelInfo, max_sequences: int, chunk_tokens: int) -> None:
        self._pool = pool
        self._model = model
        self._max_sequences = max_sequences
        self._chunk_tokens = chunk_tokens
        self._reserved: dict[str, Sequence] = {}
        self._pulling: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}
        self._preempted: dict[str, Sequence] = {}
        self._pulls: list[Sequence] = []
        self._next_step_id = 0
        self.preemptions = 0
        self.recomputed_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self._reserved) + len(self._pulling) + len(self._preempted)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running_tokens(self) -> int:
        """Tokens whose KV the running sequences read."""
        return sum(s.num_computed for s in self._running.values())

    @property
    def waiting_tokens(self) -> int:
        """Context tokens still to be computed on this worker."""
        contexts = [s for s in self._running.values() if not s.is_decoding]
        return sum(s.num_remaining for s in (*contexts, *self._pulling.values(), *self._preempted.values()))

    # ── in ────────────────────────────────────────────────────────────────────────────────────────

    def reserve(self, sequence: Sequence, now: float) -> None:
        """Holds blocks for the context and the first token. The KV of a cached prefix counts as there.

        Raises NoCapacityError with the numbers when the pool or the batch is full.
        """
        shared = self._pool.match(sequence.tokens, sequence.root, sequence.num_context)
        self._hold(sequence, shared, now)
        sequence.num_computed = len(shared) * self._pool.block_size
        cached = sequence.num_computed
        sequence.context = ContextTokens(cached=cached, moved=sequence.num_context - cached)
        self._reserved[sequence.key] = sequence

    def submit(self, sequence: Sequence, now: float) -> None:
        """Takes a sequence whose context is computed here. Raises NoCapacityError."""
        most = 0 if sequence.is_scoring else sequence.num_context - 1
        shared = self._pool.match(sequence.tokens, sequence.root, most)
        self._hold(sequence, shared, now)
        cached = sequence.num_computed = len(shared) * self._pool.block_size
        sequence.context = ContextTokens(cached=cached, computed=sequence.num_context - cached)
        sequence.num_pulling = sequence.pullable(self._pool.block_size)
        if sequence.num_pulling:
            self._pulling[sequence.key] = sequence
            self._pulls.append(sequence)
        else:
            self._start(sequence, now)

    def take_pulls(self) -> list[Sequence]:
        """Sequences that were submitted since the last call, and wait for `pulled`."""
        pulls, self._pulls = self._pulls, []
        return pulls

    def pulled(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """The pull for a sequence has ended: ``num_tokens`` came, and nothing writes its blocks any more."""
        del self._pulling[sequence.key]
        sequence.pulled(num_tokens)
        if sequence.error is not None:
            self._drop(sequence)
            return
        self._pool.publish(sequence.key, sequence.tokens, sequence.root, sequence.num_computed)
        self._start(sequence, now)

    def join(self, sequence: Sequence, token: int, now: float, logprobs: Logprobs | None = None) -> SequenceOutput:
        """All KV of a reserved sequence has arrived, and its first token: it decodes from now on.

        The output tells whether that token already ended it (its blocks are back then).
        """
        del self._reserved[sequence.key]
        index = sequence.num_generated
        sequence.num_computed = sequence.num_context
        self._pool.publish(sequence.key, sequence.tokens, sequence.root, sequence.num_computed)
        sequence.append(token)
        sequence.started_at = sequence.first_token_at = now
        self._running[sequence.key] = sequence
        self._pool.set_state(sequence.key, BlockState.RUNNING)
        finish = finish_reason(sequence, self._model.eos_token_ids, self._model.max_model_len)
        if finish is not None:
            self._drop(sequence)
        return SequenceOutput(sequence, index, token, finish, logprobs=logprobs)

    def abort(self, sequence: Sequence, error: BatonError) -> bool:
        """Ends a sequence at whatever stage. True: its blocks are back. False: it is in the running step and
        ends with it (an output with ``error``), or being pulled for and ends with that."""
        if sequence.in_flight or sequence.num_pulling:
            sequence.error = error
            return False
        self._drop(sequence)
        return True

    # ── a step ────────────────────────────────────────────────────────────────────────────────────

    def schedule(self, now: float) -> StepPlan | None:
        self._resume(now)
        self._grow()
        budget = self._chunk_tokens
        steps: list[SequenceStep] = []
        for sequence in self._running.values():
            count = sequence.num_remaining
            if count > 1:
                count = min(count, budget)
                budget -= count
                if count == 0:
                    continue
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
            if sequence.first_token_at is None:
                sequence.first_token_at = now
            finish = finish_reason(sequence, self._model.eos_token_ids, self._model.max_model_len)
            if finish is not None:
                self._drop(sequence)
            outputs.append(SequenceOutput(sequence, index, result.token, finish, logprobs=result.logprobs))
        return outputs

    # ── blocks ────────────────────────────────────────────────────────────────────────────────────

    def _hold(self, sequence: Sequence, shared: list[int], now: float) -> Holding:
        """Blocks for the context and one more token, for somebody new."""
        held = len(self._reserved) + len(self._pulling) + len(self._running) + len(self._preempted)
        if held >= self._max_sequences:
            raise NoCapacityError(f"the batch is full: decode.max_sequences is {self._max_sequences}, {held} are held")
        if self._preempted:
            raise NoCapacityError(f"{len(self._preempted)} preempted sequences wait for blocks and come first")
        needed = self._pool.blocks_for(sequence.num_context + 1) - len(shared)
        # Room to grow for those who run, or they would be preempted at once; none is needed when alone.
        spare = self._spare_blocks if held else 0
        if self._pool.can_allocate(needed, shared, spare):
            holding = self._pool.allocate(sequence.key, needed, BlockState.RESERVED, now, shared)
            if holding is not None:
                sequence.block_ids = holding.block_ids
                return holding
        raise NoCapacityError(
            f"{needed} blocks are needed and {spare} kept for growth, "
            f"{self._pool.num_available} of {self._pool.num_blocks} are available"
        )

    @property
    def _spare_blocks(self) -> int:
        return max(1, self._pool.num_blocks // 100)

    def _start(self, sequence: Sequence, now: float) -> None:
        sequence.started_at = now
        self._running[sequence.key] = sequence
        self._pool.set_state(sequence.key, BlockState.RUNNING)

    def _resume(self, now: float) -> None:
        """Preempted sequences start again, in their order, as soon as their blocks are there."""
        while self._preempted:
            sequence = next(iter(self._preempted.values()))
            most = 0 if sequence.is_scoring else len(sequence.tokens) - 1
            shared = self._pool.match(sequence.tokens, sequence.root, most)
            needed = self._pool.blocks_for(len(sequence.tokens)) - len(shared)
            spare = self._spare_blocks if self._running else 0
            if not self._pool.can_allocate(needed, shared, spare):
                return
            holding = self._pool.allocate(sequence.key, needed, BlockState.RUNNING, now, shared)
            if holding is None:
                return
            del self._preempted[sequence.key]
            sequence.block_ids = holding.block_ids
            sequence.num_computed = len(shared) * self._pool.block_size
            self._start(sequence, now)
            self.recomputed_tokens += sequence.num_remaining - 1

    def _grow(self) -> None:
        """A slot for the KV of every token that this step computes, by preemption if need be."""
        for sequence in list(self._running.values()):
            while sequence.key in self._running and len(sequence.block_ids) < self._pool.blocks_for(
                len(sequence.tokens)
            ):
                if not self._pool.extend(sequence.key):
                    self._preempt(next(reversed(self._running.values())))

    def _preempt(self, sequence: Sequence) -> None:
        """Takes the blocks of the sequence that joined last. What the prefix cache keeps of them may
        make its return cheap."""
        del self._running[sequence.key]
        self._pool.release(sequence.key)
        sequence.block_ids = []
        sequence.num_computed = 0
        if sequence.is_scoring:
            sequence.prompt_logprobs.clear()
        sequence.preemptions += 1
        self.preemptions += 1
        self._preempted = {sequence.key: sequence, **self._preempted}

    def _drop(self, sequence: Sequence) -> None:
        self._reserved.pop(sequence.key, None)
        self._running.pop(sequence.key, None)
        self._preempted.pop(sequence.key, None)
        if self._pool.holds(sequence.key):
            self._pool.release(sequence.key)
