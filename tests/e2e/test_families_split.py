"""Families whose KV is of another kind than Llama's, split over two processes: the tokens of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.asking import Prompt, ask_all, check_record
from tests.e2e.fleet import fleet
from tests.tiny_families import build_tiny

pytestmark = pytest.mark.e2e

NUM_TOKENS = 12
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 200)


def greedy(folder: Path, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The oracle: what transformers says after ``prompt``."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize("variant", ["deepseek v3", "gemma3"])
def test_tokens_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    """Latents as cache; windows of some layers, beyond which other layers see."""
    folder = build_tiny(tmp_path, variant)
    asked = [
        Prompt(tuple((17 * length + 5 * i * i + i) % 250 for i in range(length)), NUM_TOKENS, (("temperature", 0),))
        for length in LENGTHS
    ]
    sets = [f"model.name={folder}", "model.served_name=tiny", "engine.pool_bytes=4000000", "prefill.chunk_tokens=64"]
    with fleet(sets=sets) as running:
        running.model = "tiny"
        replies = ask_all(running, asked, concurrency=4)
        for prompt, reply in zip(asked, replies, strict=True):
            assert reply.token_ids == greedy(folder, prompt.token_ids), len(prompt.token_ids)
            check_record(running, reply)
        running.quiet()
