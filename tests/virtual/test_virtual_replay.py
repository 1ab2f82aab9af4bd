"""The conversation trace through the whole cluster: fast, right, and the same again under any hash seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest


def _replay(limit: int, hash_seed: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.virtual.replay_conversation", str(limit)],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_the_same_seed_gives_the_same_events_under_any_hash_seed() -> None:
    first, second = _replay(200, 0), _replay(200, 12345)
    assert first["wrong"] == first["errors"] == []
    assert first["events_hash"] == second["events_hash"]


@pytest.mark.e2e
def test_two_thousand_requests_of_the_conversation_trace_take_less_than_ten_seconds() -> None:
    first, second = _replay(2000, 1), _replay(2000, 2)
    for result in (first, second):
        assert (result["requests"], result["wrong"], result["errors"]) == (2000, [], [])
    assert first["events_hash"] == second["events_hash"]
    assert min(first["cpu_s"], second["cpu_s"]) < 10.0, (first, second)
