"""A decode worker that is gone at every state of a handoff, over each way that KV takes between processes: the request
goes on when it is back, with the tokens of the reference, and nobody holds a block.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.asking import Reply, Visit, ask_all, check_record, outcomes
from tests.e2e.fleet import Fleet, fleet
from tests.e2e.test_handoff_faults import equip, prompts, salted, tokens
from tests.tiny_model import build_tiny_llama

LEASE_S = 1.0
MARGIN_S = 5.0
HANGS_S = 0.2
"""After its blocks are reserved a handoff has reached the failpoint that holds it."""

OWN_STATES = ("reserve", "receive", "join", "receipt")
"""Where the decode worker crashes by itself, one after the other."""
PEERS_STATES = [("open", "push", "commit"), ("piece",)]
"""Where the prefill worker hangs, one after the other, while the decode worker is killed. Who hangs at `piece` comes to
`commit` as well."""

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
        "router.max_attempts=6",
    ]
    with fleet(sets=sets) as running:
        running.model = "tiny"
        yield running


def wait_until_dead(running: Fleet) -> None:
    deadline = time.monotonic() + 30.0
    while running.decode[0].alive:
        assert time.monotonic() < deadline, "it never died"
        time.sleep(0.01)


def assert_all_well(running: Fleet, ends: list[object], expected: list[tuple[int, ...]], deaths: int) -> None:
    """Every answer is the reference's, at least one was tried again after every death, and all blocks are back."""
    replies = [end for end in ends if isinstance(end, Reply)]
    assert len(replies) == len(ends), ends
    assert tokens(replies) == expected
    records = [check_record(running, reply) for reply in replies]
    assert max(len(record["attempts"]) for record in records) > deaths, records
    running.quiet(LEASE_S + MARGIN_S)


def test_a_decode_worker_that_crashes_at_each_of_its_states(tiny: Fleet) -> None:
    asked = prompts(11, 3, 150)
    expected = tokens(ask_all(tiny, asked, concurrency=1))
    first, *others = OWN_STATES
    equip(tiny, tiny.decode[0], f"failpoints.{first}=1*crash")

    def come_back() -> None:
        for state in others:
            wait_until_dead(tiny)
            equip(tiny, tiny.decode[0], f"failpoints.{state}=1*crash", awaited=False)
        wait_until_dead(tiny)
        equip(tiny, tiny.decode[0])

    visits = [Visit(prompt, streaming=number % 2 == 0) for number, prompt in enumerate(salted(asked, "crash"))]
    assert_all_well(tiny, list(outcomes(tiny, visits, come_back)), expected, len(OWN_STATES))


@pytest.mark.parametrize("states", PEERS_STATES, ids=" ".join)
def test_a_decode_worker_that_is_killed_at_each_state_of_its_peer(tiny: Fleet, states: tuple[str, ...]) -> None:
    (asked,) = prompts(12, 1, 150)
    expected = tokens(ask_all(tiny, [asked], concurrency=1))
    equip(tiny, tiny.prefill[0], *(f"failpoints.{state}=1*hang" for state in states))

    def kill_and_come_back() -> None:
        for _ in states:
            deadline = time.monotonic() + 30.0
            while not any(w["reserved"] for w in tiny.get("/ledger")["workers"] if w["id"] == "decode-0"):
                assert time.monotonic() < deadline, "nothing was reserved"
                time.sleep(0.01)
            time.sleep(HANGS_S)
            tiny.decode[0].kill()
            tiny.restart(tiny.decode[0], awaited=False)

    (cold,) = salted([asked], " ".join(states))
    visits = [Visit(cold, streaming=True)]
    assert_all_well(tiny, list(outcomes(tiny, visits, kill_and_come_back)), expected, len(states))
