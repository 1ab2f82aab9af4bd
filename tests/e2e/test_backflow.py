"""Backflow, delta and local prefill with real processes: what one worker has computed no other computes again, and
the answers are those of one process, bit for bit (batch-invariant mode)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.e2e.asking import Prompt, Reply, ask, check_record, random_text_ids
from tests.e2e.conftest import CHUNK, CONTEXT_LIMIT, PULL_TOKENS
from tests.e2e.fleet import Fleet, fleet

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

BLOCK = 16
BLOCK_BYTES = 30 * 2 * BLOCK * 3 * 64 * 4  # layers × (K, V) × tokens × heads × dim × float32
SETS = (
    "engine.batch_invariant=true",
    f"prefill.chunk_tokens={CHUNK}",
    f"model.max_model_len={CONTEXT_LIMIT}",
    f"router.pull_fixed_tokens={PULL_TOKENS}",
)
LOCAL_TOKENS = 48
ANSWER = 40
"""Long enough for a pull to pay: it takes the time of 16 tokens, and of a tenth of those pulled."""

TURNS = (
    ("Tell me a long story about a lighthouse, a storm and a cat.", ANSWER),
    ("How does it go on?", 6),
    ("Now tell it again as the cat saw it: the wind, the waves, the light that went round and round, " * 3, 6),
)
"""What the user says, and how long the answer may be. The second turn is short, the third one long."""


@pytest.fixture(scope="module")
def adaptive() -> Iterator[Fleet]:
    """Over gRPC, where the shared fleet uses shared memory. The first pull from the decode worker hangs."""
    sets = [*SETS, f"router.local_prefill_tokens={LOCAL_TOKENS}", "transfer.transports=[grpc]"]
    with fleet(mode="adaptive", sets=sets, decode_sets=["failpoints.pull=1*hang"]) as running:
        yield running


@pytest.fixture(scope="module")
def one_process() -> Iterator[Fleet]:
    with fleet(mode="colocated", sets=SETS) as running:
        yield running


@pytest.fixture(scope="module")
def reference(one_process: Fleet) -> list[Reply]:
    return chat(one_process, TURNS)


def say(running: Fleet, messages: Sequence[dict[str, str]], max_tokens: int) -> tuple[Reply, str]:
    """One turn of a chat: the reply, and its text."""
    body = {
        "model": running.model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
        "cache_salt": "backflow",
    }
    response = running.client.post(f"{running.url}/v1/chat/completions", json=body, timeout=120.0)
    response.raise_for_status()
    answer = response.json()
    (choice,) = answer["choices"]
    ids = tuple(choice["token_ids"]), tuple(choice["prompt_token_ids"])
    reply = Reply(answer["id"], ids[0], answer["usage"], choice["finish_reason"], ids[1])
    return reply, choice["message"]["content"]


def chat(running: Fleet, turns: Sequence[tuple[str, int]]) -> list[Reply]:
    """A conversation. The workers have told the router what they hold before the next turn."""
    messages: list[dict[str, str]] = []
    replies = []
    for text, max_tokens in turns:
        messages.append({"role": "user", "content": text})
        reply, answer = say(running, messages, max_tokens)
        messages.append({"role": "assistant", "content": answer})
        replies.append(reply)
        running.loads()
    return replies


def full_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK * BLOCK


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def held_after(turn: Reply, following: Reply) -> tuple[int, int]:
    """(P, D): tokens of the following prompt whose KV each has, in full blocks. P computed the prompt; D has that
    and the answer, but for its last token, which was never put into the model."""
    prompt, answer = turn.prompt_token_ids, turn.token_ids
    at_d = (*prompt, *answer[:-1])
    return tuple(full_blocks(common_prefix(held, following.prompt_token_ids)) for held in (prompt, at_d))  # type: ignore[return-value]


def received_bytes(running: Fleet) -> dict[str, Any]:
    """By worker; what one has received the other one has sent."""
    loads = running.loads()
    prefill, decode = loads["prefill-0"], loads["decode-0"]
    assert prefill["kv_bytes_sent"] == decode["kv_bytes_received"]
    assert decode["kv_bytes_sent"] == prefill["kv_bytes_received"]
    return {name: load["kv_bytes_received"] for name, load in loads.items()}


def test_the_second_turn_computes_only_what_is_new(shared_fleet: Fleet, reference: list[Reply]) -> None:
    before = received_bytes(shared_fleet)
    first, second = chat(shared_fleet, TURNS[:2])
    at_p, at_d = held_after(first, second)
    # The story that the user sends back is, token for token, the one that was told.
    assert at_d >= full_blocks(len(first.prompt_token_ids) + ANSWER - 2)
    tokens = check_record(shared_fleet, second)["tokens"]
    assert (tokens["cached_prefill"], tokens["pulled"]) == (at_p, at_d - at_p)
    # What is new, and what of the old was not in a full block.
    assert tokens["computed_prefill"] == len(second.prompt_token_ids) - at_d
    assert (tokens["cached_decode"], tokens["received"]) == (at_d, tokens["computed_prefill"])
    grown = {name: after - before[name] for name, after in received_bytes(shared_fleet).items()}
    rest = -(-tokens["received"] // BLOCK)
    first_blocks = -(-len(first.prompt_token_ids) // BLOCK)
    pulled_blocks = (at_d - at_p) // BLOCK
    assert grown == {"prefill-0": pulled_blocks * BLOCK_BYTES, "decode-0": (first_blocks + rest) * BLOCK_BYTES}
    assert [reply.token_ids for reply in (first, second)] == [reply.token_ids for reply in reference[:2]]


def test_a_holder_that_hangs_costs_two_seconds_and_no_block(adaptive: Fleet, one_process: Fleet) -> None:
    first = Prompt(random_text_ids(1, 60), ANSWER)
    told = ask(adaptive, first)
    adaptive.loads()
    turn = Prompt((*first.token_ids, *told.token_ids, *random_text_ids(2, 60)), 4)
    reply = ask(adaptive, turn)
    record = check_record(adaptive, reply)
    assert record["decision"]["prefill"]["pull"] == {"from": "decode-0", "tokens": 48, "cost_tokens": PULL_TOKENS + 5}
    assert (record["tokens"]["pulled"], record["tokens"]["computed_prefill"]) == (0, 160 - 48)
    assert record["phases_s"]["prefill"] > 2.0  # transfer.pull_patience_s
    # The holder was told: it has let go of the prefix, although it would hang for ever.
    adaptive.settled(timeout_s=2.0)
    assert reply.token_ids == ask(one_process, turn).token_ids


def test_adaptive_short_turns_stay_on_the_decode_worker(adaptive: Fleet, reference: list[Reply]) -> None:
    first, short, long = replies = chat(adaptive, TURNS)
    record = check_record(adaptive, short)
    _, at_d = held_after(first, short)
    new = len(short.prompt_token_ids) - at_d
    assert new <= LOCAL_TOKENS
    assert record["attempts"] == [
        {"prefill": None, "decode": "decode-0", "reason": "new", "outcome": record["finish_reason"]}
    ]
    tokens = record["tokens"]
    assert (tokens["cached_decode"], tokens["received"], tokens["computed_decode"]) == (at_d, 0, new)
    # The prefill worker has not seen the second turn; the third one is long: it pulls what was said.
    record = check_record(adaptive, long)
    assert record["attempts"][0]["prefill"] == "prefill-0"
    _, at_d = held_after(short, long)
    tokens = record["tokens"]
    assert tokens["cached_prefill"] + tokens["pulled"] == at_d
    assert tokens["pulled"] > 0
    assert (tokens["cached_decode"], tokens["received"]) == (at_d, len(long.prompt_token_ids) - at_d)
    assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in reference]


def test_r24_a_decode_worker_with_half_of_the_prompt_gets_only_the_rest(
    shared_fleet: Fleet, one_process: Fleet
) -> None:
    half, whole = random_text_ids(24, 170), random_text_ids(24, 341)
    assert whole[:170] == half
    ask(shared_fleet, Prompt(half, 1))
    before = received_bytes(shared_fleet)["decode-0"]
    prompt = Prompt(whole, 8)
    reply = ask(shared_fleet, prompt)
    tokens = check_record(shared_fleet, reply)["tokens"]
    assert (tokens["cached_decode"], tokens["received"]) == (160, 181)
    assert received_bytes(shared_fleet)["decode-0"] - before == 12 * BLOCK_BYTES
    assert reply.token_ids == ask(one_process, prompt).token_ids
