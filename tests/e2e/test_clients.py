"""Clients of all kinds, a fifth of whom go away: everybody who stays gets the right answer, and of those
who left nothing remains (laws 1, 3, 4 and 5), over shared memory and over gRPC.

The workers are batch-invariant, so an answer must be bitwise the one that the same request gets alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.e2e.asking import (
    Chat,
    Leave,
    Prompt,
    Reply,
    Visit,
    ask_all,
    check_record,
    outcomes,
    random_text_ids,
    receive,
)
from tests.e2e.fleet import Fleet, fleet

LINK_FILES = 6
"""Of a worker for one peer: a gRPC connection each way, and a socket and shared memory for KV each way."""
CONCURRENCY = 24
GONE_SHARE = 0.2
LONGEST = 300
MARGIN_S = 5.0
"""What a busy machine may add to a time that is otherwise known."""
WORDS = ("the", "river", "stone", "of", "and", "light", "was", "not", "seen", "before", "they", "came", "home", "again")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def visits(count: int, seed: int) -> list[Visit]:
    """Mixed requests of 1 to ``LONGEST`` prompt tokens; the first n are the same for every ``count`` >= n."""
    rng = random.Random(seed)
    return [_visit(rng, number) for number in range(count)]


def _visit(rng: random.Random, number: int) -> Visit:
    max_tokens = _length(rng, 16)
    parameters = _parameters(rng, number)
    prompt: Prompt | Chat
    if number % 3 == 0:
        prompt = Chat(_text(rng), max_tokens, parameters)
    else:
        length = _length(rng, LONGEST)
        shared = random_text_ids(rng.randrange(4), length)[: rng.choice([0, length // 2, length - 1])]
        prompt = Prompt(shared + random_text_ids(1000 + number, length - len(shared)), max_tokens, parameters)
    streaming = rng.random() < 0.5
    return Visit(prompt, streaming, _leaving(rng, streaming) if rng.random() < GONE_SHARE else None)


def _text(rng: random.Random) -> str:
    length = _length(rng, LONGEST - 60)
    shared = (WORDS * LONGEST)[: rng.choice([0, length // 2, length - 1])]
    return " ".join([*shared, *rng.choices(WORDS, k=length - len(shared))])


def _length(rng: random.Random, longest: int) -> int:
    """1 to ``longest``, as many of one order of magnitude as of another."""
    return min(longest, int((longest + 1) ** rng.random()))


def _parameters(rng: random.Random, seed: int) -> tuple[tuple[str, Any], ...]:
    styles: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": seed},
        {"temperature": 0.8, "seed": seed, "top_k": 40},
        {"temperature": 1.2, "seed": seed, "top_p": 0.9},
    ]
    return tuple(rng.choice(styles).items())


def _leaving(rng: random.Random, streaming: bool) -> Leave:
    """At once, while sending, before the first token, or in the middle of the answer."""
    if rng.random() < 0.1:
        return Leave(after_s=0.0, sent=rng.random())
    if streaming and rng.random() < 0.4:
        return Leave(after_events=rng.randint(1, 8))
    return Leave(after_s=rng.choice([0.0, 0.01, 0.1, 0.5, 1.0, 2.0]) * rng.random())


def asked_alone(prompt: Prompt | Chat) -> Prompt | Chat:
    """The same request where no cached prefix helps."""
    return replace(prompt, parameters=(*prompt.parameters, ("cache_salt", "alone")))


@pytest.fixture(scope="module")
def over_shm() -> Iterator[Fleet]:
    sets = ["engine.batch_invariant=true", "prefill.chunk_tokens=64", "transfer.transports=[shm]"]
    with fleet(prefill=2, decode=2, sets=sets) as running:
        yield running


@pytest.fixture(scope="module")
def answers(over_shm: Fleet) -> list[tuple[Visit, Reply | None]]:
    """What 300 clients got; everything is quiet again."""
    guests = visits(300, seed=20)
    before = over_shm.open_files()
    replies = receive(over_shm, guests, concurrency=CONCURRENCY)
    over_shm.quiet()
    peers = len(over_shm.prefill) + len(over_shm.decode) - 1
    for name, count in over_shm.open_files().items():
        # Links are made when first needed and kept. Far fewer than clients came, or left.
        assert count <= before[name] + LINK_FILES * peers + 1, f"{name} keeps {count - before[name]} descriptors"
    return list(zip(guests, replies, strict=True))


def test_300_clients_of_whom_a_fifth_leaves(over_shm: Fleet, answers: list[tuple[Visit, Reply | None]]) -> None:
    stayed = [(visit.prompt, reply) for visit, reply in answers if reply is not None]
    assert 30 <= len(answers) - len(stayed) <= 90
    workers = set()
    for prompt, reply in stayed:
        assert (len(reply.token_ids), reply.finish_reason) == (prompt.max_tokens, "length")
        record = check_record(over_shm, reply)
        assert record["handoff"]["transport"] == "shm"
        assert record["handoff"]["preemptions"] == 0
        workers |= {record["attempts"][-1]["prefill"], record["attempts"][-1]["decode"]}
    assert workers == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    # Nobody was turned away, and the router's own count agrees with the clients'.
    assert over_shm.metric("baton_requests_total", reason="length") >= len(stayed)
    cancelled = over_shm.metric("baton_requests_total", reason="cancelled")
    assert 0 < cancelled <= len(answers) - len(stayed)
    ends = over_shm.metric("baton_requests_total")
    assert ends == cancelled + over_shm.metric("baton_requests_total", reason="length")


def test_those_who_stayed_got_what_they_get_alone(over_shm: Fleet, answers: list[tuple[Visit, Reply | None]]) -> None:
    stayed = [(visit.prompt, reply) for visit, reply in answers if reply is not None][::24]
    alone = ask_all(over_shm, [asked_alone(prompt) for prompt, _ in stayed], concurrency=2)
    assert [reply.token_ids for _, reply in stayed] == [reply.token_ids for reply in alone]
    over_shm.quiet()


def test_a_request_of_several_prompts_leaves_whole(over_shm: Fleet) -> None:
    """One connection, many answers under way: all of them end with it."""
    batch = [Prompt(random_text_ids(2000 + number, 100), 100).token_ids for number in range(6)]
    several = Prompt((), 100, (("prompt", batch),))
    cancelled = over_shm.metric("baton_requests_total", reason="cancelled")
    moments = (Leave(after_s=0.3), Leave(after_events=1), Leave(after_events=20))
    receive(over_shm, [Visit(several, moment.after_events < 100, moment) for moment in moments])
    over_shm.quiet(MARGIN_S)
    assert over_shm.metric("baton_requests_total", reason="cancelled") == cancelled + len(moments) * len(batch)


def test_a_killed_router_leaves_nothing_on_the_workers(over_shm: Fleet) -> None:
    """kill -9 while every worker has work. The next router meets workers that are free."""
    asked = [Prompt(random_text_ids(3000 + number, 100), 8) for number in range(16)]
    router = over_shm.process("router-0")

    def kill() -> None:
        while not all(worker["holders"] for worker in over_shm.get("/ledger")["workers"]):
            pass
        router.kill()

    with pytest.raises(httpx.TransportError):
        outcomes(over_shm, [Visit(prompt, number % 2 == 0) for number, prompt in enumerate(asked)], kill)
    over_shm.restart(router)
    over_shm.quiet(MARGIN_S)
    assert all(len(reply.token_ids) == 8 for reply in ask_all(over_shm, asked[:4], concurrency=4))


@pytest.mark.slow
def test_the_same_clients_over_grpc(answers: list[tuple[Visit, Reply | None]]) -> None:
    """The first of them again, on workers that have gRPC only: the same tokens, and the record says gRPC."""
    sets = ["engine.batch_invariant=true", "prefill.chunk_tokens=64", "transfer.transports=[grpc]"]
    with fleet(sets=sets) as over_grpc:
        guests = visits(60, seed=20)
        replies = receive(over_grpc, guests, concurrency=CONCURRENCY)
        over_grpc.quiet()
        for (visit, before), guest, reply in zip(answers, guests, replies, strict=False):
            assert visit == guest
            if before is None or reply is None:
                assert before is reply is None
                continue
            assert reply.token_ids == before.token_ids, visit
            assert check_record(over_grpc, reply)["handoff"]["transport"] == "grpc"
