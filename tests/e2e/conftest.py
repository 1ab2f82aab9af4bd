"""The cluster that tests share when they leave it as they found it: starting one takes a while."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.fleet import Fleet, fleet

CHUNK = 64
CONTEXT_LIMIT = 512
PULL_TOKENS = 16


@pytest.fixture(scope="session")
def shared_fleet() -> Iterator[Fleet]:
    """One prefill and one decode worker, batch-invariant, with small chunks and a small context; pulls pay soon."""
    sets = [
        "engine.batch_invariant=true",
        f"prefill.chunk_tokens={CHUNK}",
        f"model.max_model_len={CONTEXT_LIMIT}",
        f"router.pull_fixed_tokens={PULL_TOKENS}",
    ]
    with fleet(sets=sets) as running:
        yield running
