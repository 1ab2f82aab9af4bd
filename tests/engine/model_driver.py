"""Runs token sequences through a loaded model in any chunking and company, and gives all logits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common.config import EngineConfig
from common.messages import SamplingParams
from engine.batch import build_batch
from engine.checkpoint import find_checkpoint, read_architecture
from engine.loading import LoadedModel, load_model
from engine.plan import SequenceStep

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


KINDS: dict[str, dict[str, Any]] = {
    "auto": {},
    "ordinary": {"kernels": "torch"},
    "invariant": {"kernels": "torch", "batch_invariant": True},
    "native": {"kernels": "native"},
}
"""What computes, and how it is asked for."""


def load(folder: Path, kind: str = "auto", *, block_size: int = 16, blocks: int = 256) -> LoadedModel:
    a = read_architecture(find_checkpoint(folder))
    halves = 1 if a.latent is not None else 2
    block_bytes = a.num_layers * halves * block_size * a.num_kv_heads * a.head_dim * 4
    config = EngineConfig(device="cpu", block_size=block_size, pool_bytes=blocks * block_bytes, **KINDS[kind])
    return load_model(folder, config, "auto", 2, None, None, lambda text: None)


def hf_logits(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """The oracle: transformers' logits [len(tokens), V] in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0]


class Driver:
    """Sequences by name, each with shuffled blocks of its own."""

    def __init__(self, loaded: LoadedModel, seed: int = 0) -> None:
        self.loaded = loaded
        self._free = list(range(loaded.cache.num_blocks))
        random.Random(seed).shuffle(self._free)
        self.blocks: dict[str, list[int]] = {}

    def step(self, name: str, tokens: Sequence[int], start: int) -> SequenceStep:
        held = self.blocks.setdefault(name, [])
        while len(held) * self.loaded.cache.layout.block_size < start + len(tokens):
            held.append(self._free.pop())
        return SequenceStep(name, list(tokens), start, list(held), GREEDY)

    def run(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        """The logits [V] after each step's last token."""
        cache = self.loaded.cache
        with torch.inference_mode():
            batch = build_batch(list(enumerate(steps)), cache.layout.block_size, cache.device)
            logits = self.loaded.model.forward(batch, cache)
        by_place = dict(zip(batch.order, logits, strict=True))
        return [by_place[place] for place in range(len(steps))]

    def run_all(
        self, sequences: dict[str, list[int]], rng: random.Random, longest: int
    ) -> dict[str, dict[int, torch.Tensor]]:
        """Runs ``sequences`` to their ends in random chunks of 1 to ``longest`` tokens, mixed at random.
        Gives the logits that were seen, by name and position.
        """
        done = dict.fromkeys(sequences, 0)
        seen: dict[str, dict[int, torch.Tensor]] = {name: {} for name in sequences}
        while any(done[name] < len(tokens) for name, tokens in sequences.items()):
            names = [name for name, tokens in sequences.items() if done[name] < len(tokens)]
            names = rng.sample(names, rng.randint(1, len(names)))
            steps = []
            for name in names:
                count = 1 if rng.random() < 0.4 else rng.randint(1, longest)
                steps.append(self.step(name, sequences[name][done[name] : done[name] + count], done[name]))
            for name, step, logits in zip(names, steps, self.run(steps), strict=True):
                done[name] += len(step.token_ids)
                seen[name][done[name] - 1] = logits
        return seen


def random_tokens(rng: random.Random, count: int, vocab: int = 512) -> list[int]:
    return [rng.randrange(vocab) for _ in range(count)]
