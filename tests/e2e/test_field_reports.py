"""What users of such systems report, each as a test of its kind, with real processes and the real model.

Three clusters serve all of them: one with a wide decode worker, one that decodes a single sequence in a
tiny pool and moves KV over gRPC, and one with two workers of each role, which get killed and stopped. All
are batch-invariant, so that answers can be compared token for token.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.e2e.asking import (
    Chat,
    Failure,
    Leave,
    Prompt,
    Reply,
    Visit,
    ask,
    ask_all,
    check_record,
    outcomes,
    random_text_ids,
    receive,
)
from tests.e2e.conftest import CHUNK as WIDE_CHUNK
from tests.e2e.conftest import CONTEXT_LIMIT
from tests.e2e.fleet import Fleet, Process, fleet

BLOCK = 16
BLOCK_BYTES = 30 * 2 * BLOCK * 3 * 64 * 4  # layers × (K, V) × tokens × heads × dim × float32
INVARIANT = "engine.batch_invariant=true"

NARROW_CHUNK = 32
PREFILL_POOL_TOKENS = 15 * BLOCK
DECODE_POOL_TOKENS = 16 * BLOCK

PATIENCE_S = 1.0
SUSPECT_S = 1.0
LOST_S = 3 * SUSPECT_S
MARGIN_S = 5.0
"""What a busy machine may add to a time that is otherwise known."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def wide(shared_fleet: Fleet) -> Fleet:
    return shared_fleet


@pytest.fixture(scope="module")
def narrow() -> Iterator[Fleet]:
    """One sequence at a time, pools that are smaller than the model's context, and gRPC between workers."""

    def pool(num_tokens: int) -> str:
        return f"engine.pool_bytes={num_tokens // BLOCK * BLOCK_BYTES}"

    sets = [
        INVARIANT,
        f"prefill.chunk_tokens={NARROW_CHUNK}",
        "decode.max_sequences=1",
        "transfer.transports=[grpc]",
        pool(PREFILL_POOL_TOKENS),
    ]
    with fleet(sets=sets, decode_sets=[pool(DECODE_POOL_TOKENS)]) as running:
        yield running


@pytest.fixture(scope="module")
def two_of_each() -> Iterator[Fleet]:
    sets = [
        INVARIANT,
        f"prefill.chunk_tokens={WIDE_CHUNK}",
        f"router.worker_patience_s={PATIENCE_S}",
        f"worker.suspect_after_s={SUSPECT_S}",
    ]
    with fleet(prefill=2, decode=2, sets=sets) as running:
        yield running


@pytest.fixture
def pairs(two_of_each: Fleet) -> Iterator[Fleet]:
    """Two workers of each role; those that the last test killed or stopped are back for this one."""
    workers = [*two_of_each.prefill, *two_of_each.decode]
    two_of_each.restart(*(process for process in workers if not process.alive))
    for process in workers:
        two_of_each.wait_for_state(process.name, "ready")
    yield two_of_each
    for process in workers:
        if process.paused:
            process.resume()
            two_of_each.wait_for_state(process.name, "ready")
    two_of_each.quiet()


def prompts(seed: int, count: int, length: int, max_tokens: int = 4) -> list[Prompt]:
    return [Prompt(random_text_ids(1000 * seed + number, length), max_tokens) for number in range(count)]


def uncached(prompt: Prompt, salt: str) -> Prompt:
    """The same where no cached prefix helps."""
    return replace(prompt, parameters=(*prompt.parameters, ("cache_salt", salt)))


def alone(running: Fleet, prompt: Prompt) -> Reply:
    """The answer to expect: computed with no company and no cached prefix."""
    return ask(running, uncached(prompt, "alone"))


def first_token_s(running: Fleet, prompt: Prompt) -> float:
    return ask(running, prompt, streaming=True).first_token_s


# ── aborts and leaks ──────────────────────────────────────────────────────────────────────────────


def test_r3_aborts_before_joining_the_batch_leave_nothing(narrow: Fleet) -> None:
    """Batch limit 1, five requests, four abort, in many rounds: at moments all over the life of a
    request, so also when the KV is there and the batch is full. Any of the five may be the one that stays.
    """
    rng = random.Random(3)
    stays = Prompt(random_text_ids(3, 70), 4)
    expected = alone(narrow, stays)
    started = time.monotonic()
    ask(narrow, stays)
    life_s = time.monotonic() - started
    # When the others have gone it has the worker for itself.
    stays = replace(stays, parameters=(*stays.parameters, ("timeout_s", 3 * life_s + MARGIN_S)))
    for number in range(5):
        visits = [
            Visit(prompt, rng.random() < 0.5, Leave(after_s=2 * life_s * rng.random()))
            for prompt in prompts(30 + number, 4, 70, max_tokens=150)
        ]
        place = rng.randrange(5)
        visits.insert(place, Visit(stays, streaming=place % 2 == 0))
        reply = receive(narrow, visits)[place]
        assert reply is not None
        assert reply.token_ids == expected.token_ids
        narrow.settled(MARGIN_S)
    narrow.quiet()


def test_r4_work_for_clients_that_left_does_not_delay_others(wide: Fleet) -> None:
    """Ten long prompts, gone after 0.2 s: the next one waits for the chunk under way, not for theirs."""
    idle_s = [first_token_s(wide, prompt) for prompt in prompts(40, 5, 20)]
    num_chunks = 4
    chunk_s = [
        (first_token_s(wide, prompt) - min(idle_s)) / num_chunks for prompt in prompts(41, 2, num_chunks * WIDE_CHUNK)
    ]
    delayed_s = []
    for number in range(3):
        computed = wide.loads()["prefill-0"]["computed_context_tokens"]
        visits = [
            Visit(prompt, index % 2 == 0, Leave(after_s=0.2))
            for index, prompt in enumerate(prompts(42 + number, 10, 480, max_tokens=16))
        ]
        receive(wide, visits)
        (short,) = prompts(45 + number, 1, 20)
        delayed_s.append(first_token_s(wide, short))
        # No clock in this one: most of the work was never done.
        assert wide.loads()["prefill-0"]["computed_context_tokens"] - computed < 10 * 480 / 3
    told = f"idle {idle_s}, a chunk {chunk_s}, after the others left {delayed_s}"
    print(f"\nR4, time to first token in s: {told}")  # noqa: T201
    assert statistics.median(delayed_s) <= max(idle_s) + 2 * max(chunk_s), told
    wide.quiet()


def test_r5_the_request_after_a_cancel_in_prefill_is_served_at_once(wide: Fleet) -> None:
    """At random moments of the prefill; the next one is another prompt, or the very same."""
    rng = random.Random(5)
    started = time.monotonic()
    ask(wide, Prompt(random_text_ids(50, 200), 1))
    prefill_s = time.monotonic() - started
    (other,) = prompts(51, 1, 20)
    expected = alone(wide, other)
    for number, prompt in enumerate(prompts(52, 6, 200)):
        moment = Leave(after_s=1.1 * prefill_s * rng.random())
        receive(wide, [Visit(prompt, number % 2 == 0, moment)])
        started = time.monotonic()
        reply = ask(wide, other, streaming=number % 2 == 0)
        assert time.monotonic() - started < MARGIN_S
        assert reply.token_ids == expected.token_ids
        if number == 3:
            assert ask(wide, prompt).token_ids == alone(wide, prompt).token_ids
    wide.quiet()


# ── limits and borders ────────────────────────────────────────────────────────────────────────────


def chat_of(running: Fleet, num_tokens: int, max_tokens: int) -> Chat:
    """A chat whose prompt has ``num_tokens`` tokens, those of the template included."""

    def count(text: str) -> int:
        messages = [{"role": "user", "content": text}]
        return int(running.client.post(f"{running.url}/tokenize", json={"messages": messages}).json()["count"])

    text = "the" + " the" * (num_tokens - count("the"))
    assert count(text) == num_tokens
    return Chat(text, max_tokens)


def unlimited(prompt: Prompt | Chat) -> Prompt | Chat:
    """The same without ``max_tokens``: the answer may take what the prompt leaves."""
    return replace(prompt, parameters=(*prompt.parameters, ("max_tokens", None)))


def text_of(running: Fleet, num_tokens: int, max_tokens: int) -> Prompt:
    return Prompt(random_text_ids(8, 2 * CONTEXT_LIMIT)[:num_tokens], max_tokens)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("make", [text_of, chat_of])
def test_r8_prompts_around_the_context_limit(
    wide: Fleet, make: Callable[[Fleet, int, int], Prompt | Chat], streaming: bool
) -> None:
    limit = CONTEXT_LIMIT
    for length, max_tokens in ((limit - 1, 1), (limit - 2, 2), (limit - 2, 1), (limit - 10, 10)):
        reply = ask(wide, make(wide, length, max_tokens), streaming=streaming)
        assert (len(reply.token_ids), reply.finish_reason) == (max_tokens, "length")
        assert check_record(wide, reply)["tokens"]["prompt"] == length
    assert len(ask(wide, unlimited(make(wide, limit - 2, 1)), streaming=streaming).token_ids) == 2
    check_refused(wide, unlimited(make(wide, limit, 1)), streaming, limit, limit)
    for length, max_tokens in ((limit - 1, 2), (limit, 1), (limit + 1, 1), (limit - 10, 11)):
        told = length if length >= limit else length + max_tokens
        check_refused(wide, make(wide, length, max_tokens), streaming, limit, told)


@pytest.mark.parametrize("streaming", [False, True])
def test_r8_prompts_around_the_limits_of_the_pools(narrow: Fleet, streaming: bool) -> None:
    """The smaller pool's limit is known before anything is sent, whichever side has it."""
    longest, most = PREFILL_POOL_TOKENS, DECODE_POOL_TOKENS
    for length, max_tokens in ((longest, most - longest), (longest - 1, most - longest + 1), (longest, 1)):
        reply = ask(narrow, text_of(narrow, length, max_tokens), streaming=streaming)
        assert (len(reply.token_ids), reply.finish_reason) == (max_tokens, "length")
        assert check_record(narrow, reply)["handoff"]["preemptions"] == 0
    check_refused(narrow, text_of(narrow, longest + 1, 1), streaming, longest, longest + 1)
    check_refused(narrow, text_of(narrow, longest, most - longest + 1), streaming, most, most + 1)
    check_refused(narrow, text_of(narrow, most, 1), streaming, most, most)
    check_refused(narrow, text_of(narrow, 1, most), streaming, most, most + 1)


def check_refused(running: Fleet, prompt: Prompt | Chat, streaming: bool, limit: int, given: int) -> None:
    """A 400 at once that names the limit and the value; no worker hears of it."""
    attempts = running.metric("baton_attempts_total")
    (end,) = outcomes(running, [Visit(prompt, streaming)])
    assert isinstance(end, Failure), end
    assert (end.status, end.code) == (400, "context_length_exceeded")
    assert f" {limit} " in end.message, end
    assert f" {given} " in end.message.replace(":", " "), end
    assert end.after_s < MARGIN_S
    assert running.metric("baton_attempts_total") == attempts
    running.settled(MARGIN_S)


def test_r13_prompts_just_beyond_a_chunk(wide: Fleet, narrow: Fleet) -> None:
    """Lengths around the borders of both clusters' chunks; what is one chunk here is several there, and
    the way of the KV is another one. The tokens are the same."""
    lengths = {
        length for chunk in (NARROW_CHUNK, WIDE_CHUNK) for length in (chunk - 1, chunk, chunk + 1, 2 * chunk + 1)
    }
    asked = [uncached(Prompt(random_text_ids(130 + length, length), 3), "r13") for length in sorted(lengths)]
    in_small_chunks = ask_all(narrow, asked, concurrency=len(asked))
    in_large_chunks = ask_all(wide, asked, concurrency=1, streaming=True)
    for small, large in zip(in_small_chunks, in_large_chunks, strict=True):
        assert small.token_ids == large.token_ids, f"prompt of {len(small.prompt_token_ids)} tokens"
        for running, reply, transport in ((narrow, small, "grpc"), (wide, large, "shm")):
            record = check_record(running, reply)
            assert record["tokens"]["computed_prefill"] == len(reply.prompt_token_ids)
            assert record["handoff"]["transport"] == transport
    narrow.quiet()


# ── what is reported ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("length", [1, BLOCK + 1, 8 * BLOCK])
def test_r36_r37_cached_tokens_are_the_prefill_workers_and_at_most_the_prompt(wide: Fleet, length: int) -> None:
    """Cold, repeated, and as the next turn of a conversation, of which the decode worker holds more."""
    prompt = Prompt(random_text_ids(360 + length, length), BLOCK + 1)
    cold, warm = ask(wide, prompt), ask(wide, prompt, streaming=True)
    assert cold.cached_tokens == 0
    # The last token is computed in any case.
    assert warm.cached_tokens == (length - 1) // BLOCK * BLOCK
    assert warm.token_ids == cold.token_ids
    next_turn = Prompt(prompt.token_ids + cold.token_ids + random_text_ids(361 + length, 5), 2)
    reply = ask(wide, next_turn)
    assert reply.cached_tokens == length // BLOCK * BLOCK
    tokens = check_record(wide, reply)["tokens"]
    assert tokens["cached_decode"] == (length + BLOCK) // BLOCK * BLOCK > reply.cached_tokens


def test_r38_a_busy_cluster_is_ready(wide: Fleet) -> None:
    """Long prompts keep every step full for seconds, and /ready says 200 all the while."""
    answers: list[tuple[int, object]] = []

    def watch() -> None:
        while any(worker["holders"] for worker in wide.get("/ledger")["workers"]) or not answers:
            answers.append(wide.readiness())

    ends = outcomes(wide, [Visit(prompt) for prompt in prompts(380, 2, 400)], watch)
    assert all(isinstance(end, Reply) for end in ends)
    assert {status for status, _ in answers} == {200}, answers
    wide.quiet()


# ── workers that die or hang ──────────────────────────────────────────────────────────────────────


def test_r7_when_prefill_dies_under_load_requests_end_and_slots_are_free(pairs: Fleet) -> None:
    """kill -9 of every prefill worker in the middle of prefills: what is not with a decode worker yet
    fails with a reason as soon as the patience with a missing role is over."""
    visits = [Visit(prompt, number % 2 == 0) for number, prompt in enumerate(prompts(70, 16, 160))]
    started = time.monotonic()
    killed_s = 0.0

    def kill() -> None:
        nonlocal killed_s
        wait_for_work(pairs, pairs.prefill)
        for process in pairs.prefill:
            process.kill()
        killed_s = time.monotonic() - started

    ends = outcomes(pairs, visits, kill)
    failures = [end for end in ends if isinstance(end, Failure)]
    assert failures
    for end in failures:
        assert end.status in (200, 503), end  # 200: its stream had begun; the error is an event of it
        assert end.after_s < killed_s + PATIENCE_S + MARGIN_S, end
        assert "no prefill worker is ready" in end.message, end
        # Each death cost it one attempt at most.
        tried = [attempt["prefill"] for attempt in pairs.record(end.request_id)["attempts"]]
        assert len(tried) == len(set(tried)), tried
    assert all(len(end.token_ids) == 4 for end in ends if isinstance(end, Reply))
    pairs.quiet(MARGIN_S)
    (prompt,) = prompts(71, 1, 20)
    (end,) = outcomes(pairs, [Visit(prompt)])
    assert isinstance(end, Failure)
    assert (end.status, end.code) == (503, "unavailable")
    assert "no prefill worker is ready" in end.message
    assert end.after_s < 2.0
    status, body = pairs.readiness()
    assert status == 503
    assert "no prefill worker is ready" in body["reasons"][0]
    pairs.restart(pairs.prefill[0])
    assert ask(pairs, prompt).token_ids == alone(pairs, prompt).token_ids


def test_r7_one_worker_of_each_role_dies_under_load_and_nobody_notices(pairs: Fleet) -> None:
    """kill -9: what was there goes on with the others, no token twice, none missing."""
    asked = prompts(72, 8, 40, max_tokens=8)
    expected = [reply.token_ids for reply in ask_all(pairs, asked, concurrency=len(asked))]
    victims = [pairs.prefill[0], pairs.decode[0]]

    def kill() -> None:
        wait_for_work(pairs, victims)
        for victim in victims:
            victim.kill()

    visits = [Visit(uncached(prompt, "killed"), number % 2 == 0) for number, prompt in enumerate(asked)]
    ends = outcomes(pairs, visits, kill)
    assert [end.token_ids if isinstance(end, Reply) else end for end in ends] == expected
    attempts = [check_record(pairs, end)["attempts"] for end in ends if isinstance(end, Reply)]
    assert any(len(tried) > 1 for tried in attempts)
    for tried in attempts:
        assert sum(attempt["outcome"] != "length" for attempt in tried) <= len(victims), tried
    pairs.quiet()


def test_r11_stuck_workers_do_not_keep_others_from_answering(pairs: Fleet) -> None:
    """SIGSTOP of one worker of each role under load: what was there goes on elsewhere, all that come get
    the right answer, and what they held is free when they come back."""
    asked = prompts(110, 8, 40, max_tokens=8)
    expected = [reply.token_ids for reply in ask_all(pairs, asked, concurrency=len(asked))]
    visits = [Visit(uncached(prompt, "stuck"), number % 2 == 0) for number, prompt in enumerate(asked)]
    stuck = [pairs.prefill[1], pairs.decode[1]]
    attempts = pairs.metric("baton_attempts_total", reason="worker_lost")

    def stop() -> None:
        wait_for_work(pairs, stuck)
        for process in stuck:
            process.pause()
        for process in stuck:
            pairs.wait_for_state(process.name, "suspect", SUSPECT_S + MARGIN_S)
        # One of two: the cluster serves, and says that it is not whole.
        status, body = pairs.readiness()
        assert status == 200
        assert [remark.split()[0] for remark in body["degraded"]] == [process.name for process in stuck], body
        for process in stuck:
            pairs.wait_for_state(process.name, "dead", LOST_S + MARGIN_S)

    ends = outcomes(pairs, visits, stop)
    assert [end.token_ids if isinstance(end, Reply) else end for end in ends] == expected
    assert pairs.metric("baton_attempts_total", reason="worker_lost") > attempts
    pairs.quiet()
    # Nobody waits for them now.
    started = time.monotonic()
    assert [reply.token_ids for reply in ask_all(pairs, asked[:4], concurrency=4)] == expected[:4]
    assert time.monotonic() - started < MARGIN_S
    for process in stuck:
        process.resume()
    for process in stuck:
        pairs.wait_for_state(process.name, "ready")
    pairs.quiet()
    assert pairs.readiness() == (200, {"status": "ready"})
    served = ask_all(pairs, asked, concurrency=len(asked))
    assert [reply.token_ids for reply in served] == expected
    placed = [check_record(pairs, reply)["attempts"][-1] for reply in served]
    assert {process.name for process in stuck} <= {
        attempt[role] for attempt in placed for role in ("prefill", "decode")
    }


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_r38_a_cluster_with_a_hung_role_is_not_ready(pairs: Fleet, role: str) -> None:
    stuck = pairs.prefill if role == "prefill" else pairs.decode
    for process in stuck:
        process.pause()
    pairs.wait_ready(503, SUSPECT_S + MARGIN_S)
    assert f"no {role} worker is ready" in pairs.readiness()[1]["reasons"][0]
    (end,) = outcomes(pairs, [Visit(Prompt(random_text_ids(381, 20), 2))])
    assert isinstance(end, Failure)
    assert (end.status, end.code) == (503, "unavailable")
    assert end.after_s < PATIENCE_S + MARGIN_S
    for process in stuck:
        process.resume()
    pairs.wait_ready()


def test_r16_a_hot_prefix_on_dead_workers_attracts_nobody(pairs: Fleet) -> None:
    prompt = Prompt(random_text_ids(160, 200), 4)
    first, again = ask(pairs, prompt), ask(pairs, prompt)
    holders, hit = (check_record(pairs, reply)["attempts"][-1] for reply in (first, again))
    assert [hit[role] for role in ("prefill", "decode")] == [holders[role] for role in ("prefill", "decode")]
    assert again.cached_tokens == 192
    for role in ("prefill", "decode"):
        pairs.process(holders[role]).kill()
    started = time.monotonic()
    reply = ask(pairs, prompt)
    assert time.monotonic() - started < MARGIN_S
    assert reply.token_ids == first.token_ids
    placed = check_record(pairs, reply)["attempts"][-1]
    assert all(placed[role] != holders[role] for role in ("prefill", "decode"))
    pairs.quiet()


def wait_for_work(running: Fleet, processes: list[Process]) -> None:
    """Until each of them holds blocks for somebody."""
    names = {process.name for process in processes}
    deadline = time.monotonic() + 30.0
    while not all(worker["holders"] for worker in running.get("/ledger")["workers"] if worker["id"] in names):
        assert time.monotonic() < deadline, f"no work came to {names}"
