"""Runs step plans on a model: the real `Executor`. All torch work happens on its one thread.

Knows plans, the model and the KV cache; no request and no schedule. The life of a step: the event loop
hands the plan over, the thread checks it, builds the batch, runs the layers (announcing each layer's KV
to the loop as it is written), samples, and hands the results back.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from common.config import EngineConfig
from common.errors import EngineError, InvalidRequestError
from common.handoff import KVLayout
from common.messages import Logprobs, SamplingParams
from engine.batch import build_batch
from engine.loading import LoadedModel, load_model
from engine.plan import LayerHook, SequenceStep, StepOutput, StepPlan, StepResult
from engine.sampler import RowSampling, Sampler, score, select_rows

Progress = Callable[[str], None]
"""Called on the event loop with what loading is doing now, for people to read."""

_T = TypeVar("_T")
_WARM_UP_TOKENS = 32
_TORCH_ERRORS = (RuntimeError, IndexError, ValueError, MemoryError)


class ModelRunner:
    """A model, its KV cache, and the thread that they live on. Made by `load`."""

    def __init__(self, thread: ThreadPoolExecutor, loaded: LoadedModel) -> None:
        self._thread = thread
        self._model = loaded.model
        self._sampler = Sampler(loaded.info.eos_token_ids)
        self.architecture = loaded.architecture
        self.model_info = loaded.info
        self.cache = loaded.cache
        self.layout: KVLayout = loaded.cache.layout
        self.num_blocks = loaded.cache.num_blocks

    @classmethod
    async def load(
        cls,
        model_path: str | Path,
        config: EngineConfig,
        dtype: str = "auto",
        num_threads: int | None = None,
        progress: Progress | None = None,
        *,
        name: str | None = None,
        max_model_len: int | None = None,
    ) -> ModelRunner:
        """Loads the checkpoint at ``model_path`` and runs it once.

        ``num_threads``: compute threads when ``config.threads`` is not set. ``name``: of the served model,
        by default the path's last part. Raises ConfigError or EngineError.
        """
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix="torch")

        def tell(text: str) -> None:
            if progress is not None:
                loop.call_soon_threadsafe(progress, text)

        threads = config.threads or num_threads or os.cpu_count() or 1
        try:
            wanted = (Path(model_path), config, dtype, threads, name, max_model_len, tell)
            runner = cls(thread, await _run_on(thread, lambda: load_model(*wanted)))
            await _run_on(thread, runner._warm_up)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return runner

    async def execute(self, plan: StepPlan, on_layer: LayerHook | None = None) -> StepOutput:
        """Runs ``plan``; see `engine.plan.Executor`. Raises EngineError when the step as a whole failed.

        When cancelled, it still waits for the step to end: after it returns, no block is touched.
        """
        written: Callable[[int], None] | None = None
        if on_layer is not None:
            loop, hook = asyncio.get_running_loop(), on_layer

            def written(layer: int) -> None:
                # Queued before the step's own end, which the loop hears of through the same queue.
                loop.call_soon_threadsafe(hook, plan, layer)

        return await _run_on(self._thread, lambda: self._step(plan, written))

    async def close(self) -> None:
        """Waits for the step under way, then ends the thread."""
        await _run_on(self._thread, lambda: None)
        self._thread.shutdown()

    def _step(self, plan: StepPlan, written: Callable[[int], None] | None = None) -> StepOutput:
        results = [self._refusal(step) for step in plan.steps]
        runnable = [(place, step) for place, step in enumerate(plan.steps) if results[place] is None]
        if runnable:
            try:
                with torch.inference_mode():
                    self._run(plan, runnable, results, written)
            except _TORCH_ERRORS as error:
                text = " ".join(str(error).split())
                raise EngineError(f"step {plan.step_id} of {plan.num_tokens} tokens failed: {text}") from error
        return StepOutput(plan.step_id, tuple(result or StepResult() for result in results))

    def _run(
        self,
        plan: StepPlan,
        runnable: list[tuple[int, SequenceStep]],
        results: list[StepResult | None],
        written: Callable[[int], None] | None,
    ) -> None:
        """One forward pass; fills in ``results`` of the steps that want a token."""
        batch = build_batch(runnable, self.layout.block_size, self.cache.device)
        notice = _LayerNotice(written, self.cache.device)
        logits = self._model.forward(batch, self.cache, notice.written)
        notice.finish()
        wanted: list[int] = []
        rows: list[RowSampling] = []
        sampled: list[int] = []
        scores: dict[int, tuple[Logprobs, ...]] = {}
        row = 0
        for place in batch.order:
            step = plan.steps[place]
            if step.targets:
                scores[place] = score(logits[row : row + len(step.targets)], step.targets, step.num_logprobs)
            row += step.num_logit_rows
            if step.sampling is not None:
                wanted.append(place)
                sampled.append(row - 1)
                position = step.start + len(step.token_ids)
                rows.append(RowSampling(step.sampling, position, step.mask_end_tokens, step.sampling_state))
        for place, result in zip(wanted, self._sampler.sample(select_rows(logits, sampled), rows), strict=True):
            results[place] = result
        for place, told in scores.items():
            results[place] = replace(results[place] or StepResult(), target_logprobs=told)

    def _refusal(self, step: SequenceStep) -> StepResult | None:
        """Why ``step`` cannot be run, or None. What is wrong with one sequence must not fail others."""
        count, limit = len(step.token_ids), self.model_info.max_model_len
        context = step.start + count
        if not count or step.start < 0:
            return _failed(EngineError.code, f"a step needs new tokens, it has {count} from position {step.start}")
        if context > limit:
            return _failed(EngineError.code, f"the context limit is {limit} tokens, the sequence has {context}")
        needed = -(-context // self.layout.block_size)
        if len(step.block_ids) < needed:
            held = len(step.block_ids)
            return _failed(EngineError.code, f"{context} tokens need {needed} blocks, the sequence has {held}")
        low, high = min(step.block_ids), max(step.block_ids)
        if low < 0 or high >= self.num_blocks:
            return _failed(EngineError.code, f"blocks {low}..{high} reach outside the pool of {self.num_blocks}")
        low, high = min(step.token_ids), max(step.token_ids)
        if low < 0 or high >= self.model_info.vocab_size:
            last = self.model_info.vocab_size - 1
            return _failed(InvalidRequestError.code, f"token ids must lie in 0..{last}, they span {low}..{high}")
        return None

    def _warm_up(self) -> None:
        """The first pass pays for lazy set-up of kernels and memory; better now than in a request."""
        size = self.layout.block_size
        count = min(_WARM_UP_TOKENS, self.model_info.max_model_len - 1, self.num_blocks * size - 1)
        blocks = list(range(min(self.num_blocks, count // size + 1)))
        greedy = SamplingParams(max_tokens=1, temperature=0.0)
        for step in (
            SequenceStep("warm-up", [0] * count, 0, blocks, greedy),
            SequenceStep("warm-up", [0], count, blocks, greedy),
        ):
            if step.token_ids:
                self._step(StepPlan(0, (step,)))
        for layer in self.cache.layers:
            layer[: len(blocks)].zero_()


class _LayerNotice:
    """Announces layers whose KV is complete. On a GPU the host runs ahead of the device, so a layer is
    announced one layer later, once its event has passed; that leaves the device busy meanwhile.
    """

    def __init__(self, notify: Callable[[int], None] | None, device: torch.device) -> None:
        self._notify = notify
        self._pending: tuple[int, torch.cuda.Event] | None = None
        self._is_cuda = device.type == "cuda"

    @property
    def written(self) -> Callable[[int], None] | None:
        if self._notify is None:
            return None
        return self._after_event if self._is_cuda else self._notify

    def finish(self) -> None:
        if self._pending is not None and self._notify is not None:
            layer, event = self._pending
            event.synchronize()
            self._pending = None
            self._notify(layer)

    def _after_event(self, layer: int) -> None:
        event = torch.cuda.Event()
        event.record()
        self.finish()
        self._pending = (layer, event)


def _failed(code: str, message: str) -> StepResult:
    return StepResult(error_code=code, error_message=message)


async def _run_on(thread: ThreadPoolExecutor, work: Callable[[], _T]) -> _T:
    """``work()`` on ``thread``; a cancelled caller still waits until it has ended."""
    future = asyncio.get_running_loop().run_in_executor(thread, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
