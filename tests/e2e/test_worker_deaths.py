"""Either worker gone at every state of a handoff, over each way that KV takes between processes: the request goes on
when it is back, with the tokens of the reference, and nobody holds a block.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.asking import Reply, Visit, ask_all, check_record, outcomes
from tests.e2e.fleet import Fleet, Process, fleet
from tests.e2e.test_handoff_faults import equip, prompts, salted, tokens
from tests.tiny_model import build_tiny_llama

LEASE_S = 1.0
MARGIN_S = 5.0
HANGS_S = 0.2
"""After a request is under way its handoff has reached the failpoint that holds it."""

OWN_STATES = {
    "prefill": ("prefill_start", "open", "push", "piece", "commit"),
    "decode": ("reserve", "receive", "join", "receipt"),
}
"""Where a worker crashes by itself, one after the other."""

PEERS_STATES = {
    "prefill": [("reserve",), ("receive",), ("receipt",)],
    "decode": [("open", "push", "commit"), ("piece",)],
}
"""Where the other worker hangs, one after the other, while this one is killed. A prefill worker that hangs at `piece`
comes to `commit` as well."""

HAS_ALL = "receipt"
"""A decode worker that hangs here goes on without its peer."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(
    scope="module",
    params=["shm", pytest.param("tcp", marks=pytest.mark.slow), pytest.param("grpc", marks=pytest.mark.slow)],
)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder: Path = build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    sets = [
        f"model.name={folder}",
        "model.served_name=tiny",
        "engine.batch_invariant=true",
        "engine.pool_bytes=4000000",
        "prefill.chunk_tokens=64",
        f"transfer.transports=[{request.param}]",
        f"transfer.lease_s={LEASE_S}",
        "router.worker_patience_s=20",
        "router.max_attempts=8",
    ]
    with fleet(sets=sets) as running:
        running.model = "tiny"
        yield running


def pair(running: Fleet, role: str) -> tuple[Process, Process]:
    """The worker of ``role``, and its peer."""
    prefill, decode = running.prefill[0], running.decode[0]
    return (prefill, decode) if role == "prefill" else (decode, prefill)


def wait_until_dead(process: Process) -> None:
    deadline = time.monotonic() + 30.0
    while process.alive:
        assert time.monotonic() < deadline, "it never died"
        time.sleep(0.01)


def wait_until_held(running: Fleet, role: str) -> None:
    """Until the handoff has come to where the peer of the worker of ``role`` hangs."""
    deadline = time.monotonic() + 30.0
    while True:
        ledger = running.get("/ledger")
        reserved = any(worker["reserved"] for worker in ledger["workers"] if worker["id"] == "decode-0")
        if reserved if role == "decode" else ledger["requests"]["open"]:
            break
        assert time.monotonic() < deadline, ledger
        time.sleep(0.01)
    time.sleep(HANGS_S)


def assert_all_well(running: Fleet, ends: list[object], expected: list[tuple[int, ...]], tries: int) -> None:
    """Every answer is the reference's, one of them took at least so many tries, and all blocks are back."""
    replies = [end for end in ends if isinstance(end, Reply)]
    assert len(replies) == len(ends), ends
    assert tokens(replies) == expected
    records = [check_record(running, reply) for reply in replies]
    assert max(len(record["attempts"]) for record in records) >= tries, records
    running.quiet(LEASE_S + MARGIN_S)


@pytest.mark.parametrize("role", OWN_STATES)
def test_a_worker_that_crashes_at_each_of_its_states(tiny: Fleet, role: str) -> None:
    asked = prompts(11, 3, 150)
    worker, peer = pair(tiny, role)
    equip(tiny, worker)
    equip(tiny, peer)
    expected = tokens(ask_all(tiny, asked, concurrency=1))
    first, *others = OWN_STATES[role]
    equip(tiny, worker, f"failpoints.{first}=1*crash")

    def come_back() -> None:
        for state in others:
            wait_until_dead(worker)
            equip(tiny, worker, f"failpoints.{state}=1*crash", awaited=False)
        wait_until_dead(worker)
        equip(tiny, worker)

    asked = salted(asked, f"{role} crashes")
    visits = [Visit(prompt, streaming=number % 2 == 0) for number, prompt in enumerate(asked)]
    assert_all_well(tiny, list(outcomes(tiny, visits, come_back)), expected, len(OWN_STATES[role]) + 1)


@pytest.mark.parametrize(("role", "states"), [(role, each) for role, lists in PEERS_STATES.items() for each in lists])
def test_a_worker_that_is_killed_at_each_state_of_its_peer(tiny: Fleet, role: str, states: tuple[str, ...]) -> None:
    (asked,) = prompts(12, 1, 150)
    worker, peer = pair(tiny, role)
    equip(tiny, worker)
    equip(tiny, peer)
    expected = tokens(ask_all(tiny, [asked], concurrency=1))
    equip(tiny, peer, *(f"failpoints.{state}=1*hang" for state in states))

    def kill_and_come_back() -> None:
        for _ in states:
            wait_until_held(tiny, role)
            worker.kill()
            tiny.restart(worker, awaited=False)

    (cold,) = salted([asked], f"{role} {states}")
    tries = 1 + sum(state != HAS_ALL for state in states)
    ends = list(outcomes(tiny, [Visit(cold, streaming=True)], kill_and_come_back))
    assert_all_well(tiny, ends, expected, tries)
