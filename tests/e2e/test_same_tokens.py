"""Law 1 on the real model: transformers = colocated = split, token for token.

The oracle is teacher-forced: one forward pass of transformers over prompt and answer tells whether each
token of the answer is the greedy one, and how far the second best is behind; that is the same statement as
comparing with its `generate`, by induction over the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.model_store import resolve
from tests.e2e.asking import Prompt, Reply, ask_all, random_text_ids
from tests.e2e.fleet import Fleet, fleet

BLOCK = 16
BLOCK_BYTES = 30 * 2 * BLOCK * 3 * 64 * 4  # layers × (K, V) × tokens × heads × dim × float32
NEAR_TIE = 1e-3

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(5400)]


class Oracle:
    """transformers on the same GGUF, float32."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, GgufConfig

        path = resolve("smollm2-135m")
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        ).eval()

    def differences(self, prompt: Sequence[int], answer: Sequence[int]) -> list[tuple[int, float]]:
        """(index, by how much the oracle prefers its own) of each token that is not the greedy one."""
        ids = torch.tensor([[*prompt, *answer]])
        with torch.inference_mode():
            hidden = self._model.model(ids[:, :-1]).last_hidden_state[0, len(prompt) - 1 :]
            logits = self._model.lm_head(hidden)
        best = logits.max(dim=-1).values
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        gaps = (best - chosen).tolist()
        return [(index, gap) for index, gap in enumerate(gaps) if gap > 0]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def lengths(count: int, longest: int, chunk: int) -> list[int]:
    """``count`` prompt lengths of 1 to ``longest``: those around block and chunk borders, and others between,
    denser where they are short."""
    borders = (BLOCK - 1, BLOCK, BLOCK + 1, chunk - 1, chunk, chunk + 1, 2 * chunk + 1)
    fixed = [1, *borders, longest]
    others = count - len(fixed)
    return fixed + [1 + int((longest - 1) * (i / (others + 1)) ** 2) for i in range(1, others + 1)]


def salted(prompts: Sequence[Prompt], salt: str) -> list[Prompt]:
    """The same prompts in a prefix cache of their own: cold again."""
    return [replace(prompt, parameters=(*prompt.parameters, ("cache_salt", salt))) for prompt in prompts]


def check_against(oracle: Oracle, prompts: Sequence[Prompt], replies: Sequence[Reply]) -> list[str]:
    """Fails on a real difference; returns the near ties."""
    ties = []
    for prompt, reply in zip(prompts, replies, strict=True):
        assert len(reply.token_ids) == prompt.max_tokens
        for index, gap in oracle.differences(prompt.token_ids, reply.token_ids):
            where = f"prompt of {len(prompt.token_ids)} tokens, token {index}: {gap:.2e} behind the best"
            assert gap < NEAR_TIE, where
            ties.append(where)
    return ties


def check_equal(name: str, oracle: Oracle, prompts: Sequence[Prompt], left: list[Reply], right: list[Reply]) -> None:
    """Equal token for token; where they part, both must have been within a near tie of the oracle's choice."""
    for prompt, one, other in zip(prompts, left, right, strict=True):
        if one.token_ids == other.token_ids:
            continue
        index = next(i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if a != b)
        for reply in (one, other):
            gaps = dict(oracle.differences(prompt.token_ids, reply.token_ids[: index + 1]))
            assert gaps.get(index, 0.0) < NEAR_TIE, f"{name}: {len(prompt.token_ids)} tokens, index {index}"
        print(f"near tie, {name}: prompt of {len(prompt.token_ids)} tokens parts at token {index}")  # noqa: T201


def check_split(running: Fleet, prompts: Sequence[Prompt], replies: Sequence[Reply]) -> None:
    """The split is real: counters, bytes and records say so."""
    loads = running.loads()
    prefill = [load for name, load in loads.items() if name.startswith("prefill")]
    decode = [load for name, load in loads.items() if name.startswith("decode")]
    assert all(load["decode_steps"] == 0 for load in prefill)
    if not any(load["preemptions"] for load in decode):
        assert all(load["computed_context_tokens"] == 0 for load in decode)
    sent, received = sum(x["kv_bytes_sent"] for x in prefill), sum(x["kv_bytes_received"] for x in decode)
    assert sent == received > 0
    for prompt, reply in zip(prompts, replies, strict=True):
        record = running.get(f"/requests/{reply.request_id}")
        tokens, attempt = record["tokens"], record["attempts"][-1]
        assert attempt["prefill"].startswith("prefill-")
        assert attempt["decode"].startswith("decode-")
        assert tokens["prompt"] == len(prompt.token_ids) == reply.usage["prompt_tokens"]
        assert tokens["cached_prefill"] + tokens["pulled"] + tokens["computed_prefill"] == tokens["prompt"]
        assert tokens["cached_decode"] + tokens["received"] + tokens["computed_decode"] == tokens["prompt"]
        assert tokens["cached_prefill"] == reply.cached_tokens
        assert tokens["emitted"] == len(reply.token_ids) == reply.usage["completion_tokens"]


def planned_bytes(running: Fleet, replies: Sequence[Reply]) -> int:
    """What the plan says for these requests: the blocks of the received tokens, over all layers."""
    received = [running.get(f"/requests/{reply.request_id}")["tokens"]["received"] for reply in replies]
    return sum(-(-tokens // BLOCK) * BLOCK_BYTES for tokens in received)


def check_same_tokens(oracle: Oracle, count: int, longest: int, max_tokens: int, chunk: int, pool_bytes: int) -> None:
    sets = [f"prefill.chunk_tokens={chunk}", f"engine.pool_bytes={pool_bytes}"]
    prompts = [Prompt(random_text_ids(i, n), max_tokens) for i, n in enumerate(lengths(count, longest, chunk))]
    with fleet(decode=1, mode="colocated", threads=2, sets=sets) as running:
        colocated = ask_all(running, prompts, concurrency=16)
        running.settled()
    ties = check_against(oracle, prompts, colocated)
    print(f"\ntransformers = colocated: {count} prompts, {count * max_tokens} tokens, near ties: {ties or 'none'}")  # noqa: T201
    together = salted(prompts, "together")
    with fleet(sets=sets) as running:
        before = running.loads()["decode-0"]["kv_bytes_received"]
        alone = ask_all(running, salted(prompts, "alone"), concurrency=1, streaming=True)
        cold = ask_all(running, together, concurrency=16)
        assert all(reply.cached_tokens == 0 for reply in (*alone, *cold))
        moved = running.loads()["decode-0"]["kv_bytes_received"] - before
        assert moved == planned_bytes(running, [*alone, *cold])
        check_split(running, [*prompts, *prompts], [*alone, *cold])
        warm = ask_all(running, together, concurrency=16)
        for prompt, reply in zip(prompts, warm, strict=True):
            assert reply.cached_tokens == (len(prompt.token_ids) - 1) // BLOCK * BLOCK
        running.settled()
    check_equal("split alone", oracle, prompts, colocated, alone)
    check_equal("split together", oracle, prompts, colocated, cold)
    check_equal("split with prefix hits", oracle, prompts, colocated, warm)


def check_preempted(oracle: Oracle, count: int, max_tokens: int) -> None:
    """A pool that holds a fourth of what all need at the end."""
    prompts = [Prompt(random_text_ids(i, 20 + i), max_tokens) for i in range(count)]
    blocks = count * -(-(20 + count + max_tokens) // BLOCK) // 4
    with fleet(sets=[f"engine.pool_bytes={blocks * BLOCK_BYTES}"]) as running:
        replies = ask_all(running, prompts, concurrency=count)
        preemptions = running.loads()["decode-0"]["preemptions"]
        assert preemptions > 0
        running.settled()
    ties = check_against(oracle, prompts, replies)
    print(f"\ntransformers = split with {preemptions} preemptions: near ties: {ties or 'none'}")  # noqa: T201


def test_same_tokens_on_a_few_prompts(oracle: Oracle) -> None:
    check_same_tokens(oracle, count=14, longest=300, max_tokens=12, chunk=128, pool_bytes=800 << 20)


def test_same_tokens_with_preemption(oracle: Oracle) -> None:
    check_preempted(oracle, count=8, max_tokens=60)


@pytest.mark.slow
def test_same_tokens_on_64_prompts_of_up_to_3000_tokens(oracle: Oracle) -> None:
    check_same_tokens(oracle, count=64, longest=3000, max_tokens=64, chunk=512, pool_bytes=5 << 30)


@pytest.mark.slow
def test_same_tokens_of_64_prompts_with_preemption(oracle: Oracle) -> None:
    check_preempted(oracle, count=64, max_tokens=64)


def sampled(prompt: Prompt, seed: int) -> Prompt:
    styles: list[tuple[tuple[str, Any], ...]] = [
        (("temperature", 0.0),),
        (("temperature", 1.0), ("seed", seed)),
        (("temperature", 0.8), ("seed", seed), ("top_k", 40)),
        (("temperature", 1.2), ("seed", seed), ("top_p", 0.9)),
        (("temperature", 0.7), ("seed", seed), ("top_k", 100), ("top_p", 0.95)),
    ]
    return replace(prompt, parameters=styles[seed % len(styles)])


def check_bitwise(count: int, longest: int, max_tokens: int, chunk: int) -> None:
    """No near ties here: every token is equal, greedy and sampled, whatever the neighbours and chunks."""
    sets = ["engine.batch_invariant=true", "engine.pool_bytes=3000000000"]
    prompts = [
        sampled(Prompt(random_text_ids(i, n), max_tokens), i) for i, n in enumerate(lengths(count, longest, chunk))
    ]
    with fleet(decode=1, mode="colocated", threads=2, sets=sets) as running:
        colocated = [reply.token_ids for reply in ask_all(running, prompts, concurrency=16)]
    with fleet(sets=[*sets, f"prefill.chunk_tokens={chunk}"]) as running:
        cold = [reply.token_ids for reply in ask_all(running, prompts, concurrency=16)]
        warm = [reply.token_ids for reply in ask_all(running, prompts, concurrency=3, streaming=True)]
        running.settled()
    assert cold == colocated
    assert warm == colocated


def test_batch_invariant_mode_is_bitwise_equal_with_sampling() -> None:
    check_bitwise(count=14, longest=400, max_tokens=16, chunk=160)


@pytest.mark.slow
def test_batch_invariant_mode_is_bitwise_equal_on_64_prompts() -> None:
    check_bitwise(count=64, longest=1500, max_tokens=32, chunk=256)
