"""Drives a scheduler by hand: no loop, no time, the modelled device for KV that can be wrong."""

from __future__ import annotations

from common.handoff import KVLayout
from common.messages import GenerationRequest, SamplingParams
from common.workers import ModelInfo
from engine.plan import StepOutput, StepPlan
from engine.sequence import Sequence
from sim.device import CostModel, DeviceMemory, SimDevice

VOCAB = 1000
MODEL = ModelInfo("sim", "sim", VOCAB, 10_000, (0,))


def layout(block_size: int) -> KVLayout:
    return KVLayout("sim", 2, 1, 8, block_size, "float32")


def sequence(name: str, prompt: list[int], max_tokens: int, *, priority: int = 0, seed: int = 0) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)
    return Sequence(GenerationRequest(name, tuple(prompt), sampling, priority=priority), "sim", 0.0)


class Device:
    """Runs plans at once."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.memory = DeviceMemory(layout(block_size), num_blocks)
        self._device = SimDevice(self.memory, CostModel(float("inf"), 0.0, 0.0, 0.0), VOCAB)

    def run(self, plan: StepPlan) -> StepOutput:
        return self._device.compute(plan)
