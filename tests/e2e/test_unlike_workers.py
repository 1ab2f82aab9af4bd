"""Prefill and decode workers whose pools lie differently, as processes with the real model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.e2e.asking import Prompt, ask, ask_all, check_record, random_text_ids
from tests.e2e.fleet import fleet

pytestmark = pytest.mark.e2e

SETS = ["engine.batch_invariant=true", "prefill.chunk_tokens=64"]
LENGTHS = (1, 7, 8, 9, 31, 32, 33, 64, 65, 150)
TOKENS = 8
LAYERS, TOKEN_BYTES = 30, 2 * 3 * 64 * 4


def prompts(seed: int) -> list[Prompt]:
    return [Prompt(random_text_ids(seed + length, length), TOKENS) for length in LENGTHS]


@pytest.fixture(scope="module")
def reference() -> list[tuple[int, ...]]:
    """One process."""
    with fleet(mode="colocated", sets=SETS) as running:
        return [reply.token_ids for reply in ask_all(running, [*prompts(0), *halves()], concurrency=4)]


def halves() -> list[Prompt]:
    """A prompt, and one that begins with its first half and goes on differently."""
    first = random_text_ids(77, 120)
    return [Prompt(first, TOKENS), Prompt((*first[:70], *random_text_ids(78, 50)), TOKENS)]


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(32, 8), pytest.param(8, 32, marks=pytest.mark.slow)])
def test_block_sizes_differ(reference: Sequence[tuple[int, ...]], prefill_size: int, decode_size: int) -> None:
    """R22, R24: equal to one process bitwise; a half-warm decode worker gets the other half only."""
    decode_sets = [f"engine.block_size={decode_size}"]
    with fleet(sets=[*SETS, f"engine.block_size={prefill_size}"], decode_sets=decode_sets) as running:
        cold = ask_all(running, prompts(0), concurrency=4)
        assert [reply.token_ids for reply in cold] == reference[: len(LENGTHS)]
        for reply in cold:
            check_record(running, reply)
        before = running.loads()["decode-0"]["kv_bytes_received"]
        first, second = (ask(running, prompt) for prompt in halves())
        assert [first.token_ids, second.token_ids] == reference[len(LENGTHS) :]
        held = 70 // decode_size * decode_size
        assert check_record(running, second)["tokens"]["cached_decode"] == held
        blocks = -(-120 // decode_size) + -(-(120 - held) // decode_size)
        moved = running.loads()["decode-0"]["kv_bytes_received"] - before
        assert moved == blocks * decode_size * LAYERS * TOKEN_BYTES
        running.quiet()


@pytest.mark.slow
def test_a_rounded_wire_format_is_a_choice_of_both_sides(reference: Sequence[tuple[int, ...]]) -> None:
    """bfloat16 on the wire halves the bytes; what differs is the text after a while, and nothing else."""
    with fleet(sets=[*SETS, "transfer.wire_formats=[bfloat16, native]"]) as running:
        before = running.loads()["decode-0"]["kv_bytes_received"]
        replies = ask_all(running, prompts(0), concurrency=4)
        same = sum(reply.token_ids == other for reply, other in zip(replies, reference, strict=False))
        assert same >= len(LENGTHS) // 2
        blocks = sum(-(-length // 16) for length in LENGTHS)
        moved = running.loads()["decode-0"]["kv_bytes_received"] - before
        assert moved == blocks * 16 * LAYERS * TOKEN_BYTES // 2
        running.quiet()
