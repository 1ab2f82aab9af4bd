"""The handoff between real processes under faults: damage, hangs at every state, workers that die and come back, and
pairs that do not go together. One cluster of a tiny random model serves all; its workers are started again with the
failpoints that a test needs.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.asking import (
    Failure,
    Leave,
    Prompt,
    Reply,
    Visit,
    ask,
    ask_all,
    check_record,
    outcome,
    outcomes,
    receive,
)
from tests.e2e.fleet import Fleet, Process, fleet
from tests.tiny_model import build_tiny_llama

LEASE_S = 1.0
CHUNK = 64
PATIENCE_S = 8.0
"""Longer than a worker takes to come back."""
MARGIN_S = 5.0
"""What a busy machine may add to a time that is otherwise known."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Fleet]:
    with tiny_fleet(folder) as running:
        yield running


@contextmanager
def tiny_fleet(folder: Path, prefill: int = 1) -> Iterator[Fleet]:
    sets = [
        f"model.name={folder}",
        "model.served_name=tiny",
        "engine.batch_invariant=true",
        "engine.pool_bytes=4000000",
        f"prefill.chunk_tokens={CHUNK}",
        f"transfer.lease_s={LEASE_S}",
        f"router.worker_patience_s={PATIENCE_S:g}",
        "router.max_attempts=6",
    ]
    with fleet(prefill=prefill, sets=sets) as running:
        running.model = "tiny"
        yield running


def equip(running: Fleet, process: Process, *settings: str, awaited: bool = True) -> None:
    """``process`` runs with these settings beside its usual ones: it is killed and started again if it does not.
    ``awaited``: returns when the router has it."""
    usual = tuple(item for item in process.sets if not item.startswith("failpoints."))
    if process.alive and process.sets == (*usual, *settings):
        return
    if process.alive:
        process.kill()
        running.wait_for_state(process.name, "dead")
    process.sets = (*usual, *settings)
    running.restart(process, awaited=awaited)


def prompts(seed: int, count: int, length: int, max_tokens: int = 6) -> list[Prompt]:
    """Each of them cold: none shares its first block with another one."""
    return [
        Prompt(tuple((seed * 31 + number * 7 + index * index) % 250 for index in range(length)), max_tokens)
        for number in range(count)
    ]


def salted(asked: Sequence[Prompt], salt: str) -> list[Prompt]:
    """The same where no cached prefix helps."""
    return [Prompt(p.token_ids, p.max_tokens, (*p.parameters, ("cache_salt", salt))) for p in asked]


def tokens(replies: Sequence[Reply]) -> list[tuple[int, ...]]:
    return [reply.token_ids for reply in replies]


def counted(running: Fleet, worker_id: str, side: str) -> dict[str, int]:
    """What /cluster says of a worker's transfers, ``side`` of them (sending, receiving)."""
    return running.loads()[worker_id][side]  # type: ignore[no-any-return]


def test_damage_between_workers_is_made_good_or_computed_again(tiny: Fleet) -> None:
    """First so much of it that one handoff fails for good, then a share of everything, then none."""
    asked = prompts(1, 60, 200)
    equip(tiny, tiny.prefill[0])
    expected = tokens(ask_all(tiny, asked, concurrency=8))
    before = counted(tiny, "decode-0", "receiving")
    share = " | ".join(f"4%{kind}" for kind in ("corrupt", "drop", "duplicate", "reorder"))
    equip(tiny, tiny.prefill[0], f"failpoints.piece=14*corrupt | {share}")
    (first,) = ask_all(tiny, salted(asked[:1], "first"), concurrency=1)
    assert first.token_ids == expected[0]
    attempts = check_record(tiny, first)["attempts"]
    assert len(attempts) > 1
    assert attempts[0]["outcome"] == "integrity"
    replies = ask_all(tiny, salted(asked, "damaged"), concurrency=8, streaming=True)
    assert tokens(replies) == expected
    for reply in replies:
        check_record(tiny, reply)
    tiny.quiet()
    sent, received = counted(tiny, "prefill-0", "sending"), counted(tiny, "decode-0", "receiving")
    seen = {name: received[name] - before[name] for name in received}
    assert seen["corrupt"] > 14
    assert seen["duplicates"] > 0
    assert sent["resent"] >= seen["corrupt"] - len(attempts) * 26  # what failed for good was not asked for again
    assert sent["failures"] == seen["failures"] >= 1
    assert sent["handoffs"] == seen["handoffs"]


def test_hangs_at_every_state_of_a_handoff_leave_nothing(tiny: Fleet) -> None:
    """Clients that leave while their handoff hangs, and one that stays: its lease ends as often as it has to."""
    asked = prompts(2, 5, 100)
    equip(tiny, tiny.prefill[0])
    equip(tiny, tiny.decode[0])
    expected = tokens(ask_all(tiny, asked, concurrency=1))
    points = {name: f"failpoints.{name}=1*hang" for name in ("open", "push", "piece", "commit", "receive", "receipt")}
    tiny.decode[0].kill()
    tiny.decode[0].sets = (*tiny.decode[0].sets, points["receive"], points["receipt"])
    tiny.prefill[0].kill()
    tiny.prefill[0].sets = (*tiny.prefill[0].sets, *(points[name] for name in ("open", "push", "piece", "commit")))
    tiny.restart(tiny.decode[0], tiny.prefill[0])
    for prompt in asked[:3]:  # they meet `open`, `push` and `piece`
        receive(tiny, [Visit(prompt, leaving=Leave(after_s=0.3))])
        tiny.settled(LEASE_S + MARGIN_S)
    started = time.monotonic()
    reply = ask(tiny, asked[3])  # this one meets the others
    assert reply.token_ids == expected[3]
    assert len(check_record(tiny, reply)["attempts"]) > 2
    assert time.monotonic() - started < 6 * LEASE_S + MARGIN_S
    tiny.quiet(LEASE_S + MARGIN_S)
    assert tokens(ask_all(tiny, asked, concurrency=len(asked))) == expected
    tiny.quiet()


def test_r10_a_worker_of_another_model_is_refused_with_both_values(
    tiny: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """At once, in words, and nothing is held for it."""
    equip(tiny, tiny.prefill[0])
    other = build_tiny_llama(tmp_path_factory.mktemp("models") / "other", seed=1)
    process = tiny.prefill[0]
    usual = process.sets
    process.kill()
    tiny.wait_for_state(process.name, "dead")
    process.sets = (*usual, f"model.name={other}")
    tiny.restart(process, awaited=False)
    deadline = time.monotonic() + MARGIN_S
    while "another kind" not in ((worker := tiny.worker(process.name))["reason"] or ""):
        assert time.monotonic() < deadline, worker
        time.sleep(0.05)
    assert "prefill-0 has KV of another kind: model is" in worker["reason"], worker
    assert worker["state"] != "ready"
    fingerprints = set(re.findall(r"'([^']+)'", worker["reason"]))
    assert len(fingerprints) == 2, worker
    (end,) = outcomes(tiny, [Visit(Prompt(tuple(range(50)), 2))])
    assert isinstance(end, Failure)
    assert (end.status, end.code) == (503, "unavailable")
    assert all(fingerprint in end.message for fingerprint in fingerprints), end
    assert end.after_s < PATIENCE_S + MARGIN_S
    (ledger,) = tiny.get("/ledger")["workers"]
    assert ledger["holders"] == []
    assert ledger["free"] + ledger["cached"] == ledger["total"]
    process.kill()
    process.sets = usual
    tiny.restart(process)
    tiny.quiet()


def handles(process: Process) -> tuple[int, int, int]:
    """Descriptors, threads, resident bytes."""
    known = psutil.Process(process.popen.pid)
    return known.num_fds(), known.num_threads(), known.memory_info().rss


CRASHES = ("piece", "commit", "push", "open")


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_r14_a_prefill_worker_that_dies_again_and_again_under_load(tiny: Fleet, times: int) -> None:
    """At another state of a handoff each time; it comes back at its address. No answer is wrong, nobody waits for
    ever, and the decode worker has as many handles and as much memory as before."""
    asked = prompts(3, 16, 150)
    equip(tiny, tiny.prefill[0])
    equip(tiny, tiny.decode[0])
    expected = dict(
        zip((prompt.token_ids for prompt in asked), tokens(ask_all(tiny, asked, concurrency=8)), strict=True)
    )
    stop = threading.Event()
    ends: list[Reply | Failure] = []
    seen: list[tuple[int, int, int]] = []

    def die_and_come_back() -> None:
        try:
            for number in range(times):
                state = CRASHES[number % len(CRASHES)]
                equip(tiny, tiny.prefill[0], f"failpoints.{state}=2%crash", awaited=False)
                deadline = time.monotonic() + 60.0
                while tiny.prefill[0].alive:
                    assert time.monotonic() < deadline, f"it never died at {state}"
                    time.sleep(0.02)
                seen.append(handles(tiny.decode[0]))
            equip(tiny, tiny.prefill[0])
        finally:
            stop.set()

    async def client(http: httpx.AsyncClient, number: int) -> None:
        turn = number
        while not stop.is_set():
            (prompt,) = salted([asked[turn % len(asked)]], f"turn {turn}")
            ends.append(await outcome(http, tiny, prompt, streaming=turn % 2 == 0))
            turn += 4

    async def main() -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            await asyncio.gather(asyncio.to_thread(die_and_come_back), *(client(http, number) for number in range(4)))

    asyncio.run(main())
    failures = [end for end in ends if isinstance(end, Failure)]
    replies = [end for end in ends if isinstance(end, Reply)]
    assert len(failures) <= times, failures
    assert len(replies) > 5 * times
    assert all(reply.token_ids == expected[reply.prompt_token_ids] for reply in replies)
    tiny.quiet()
    assert tiny.decode[0].alive
    (fds, threads, _), (fds_after, threads_after, _) = seen[0], handles(tiny.decode[0])
    assert abs(fds_after - fds) <= 8, seen
    assert abs(threads_after - threads) <= 8, seen
    if times > 10:
        quarter = times // 4
        assert seen[-1][2] - seen[quarter][2] < 20 << 20, seen
    print(f"\nR14: {len(replies)} answers, {len(failures)} failures, {times} deaths; fds, threads, bytes: {seen}")  # noqa: T201


def test_r24_a_decode_worker_that_holds_half_a_prompt_gets_the_other_half(tiny: Fleet) -> None:
    equip(tiny, tiny.prefill[0])
    equip(tiny, tiny.decode[0])
    (whole,) = prompts(4, 1, 200)
    expected = ask(tiny, *salted([whole], "cold")).token_ids
    half = Prompt(whole.token_ids[:96], 4)
    ask(tiny, half)
    before = counted(tiny, "decode-0", "receiving")
    reply = ask(tiny, whole)
    assert reply.token_ids == expected
    record = check_record(tiny, reply)
    assert record["tokens"]["cached_decode"] == 96
    after = counted(tiny, "decode-0", "receiving")
    assert after["pieces"] - before["pieces"] == 2 * (13 - 6)  # layers × blocks
