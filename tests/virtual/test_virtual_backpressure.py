"""Links that are slower than computing, as the whole cluster lives with them: prefill computes as much as gets away,
and backlog waits in the router.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.config import load_config
from sim.cluster import SimCluster, SimConfig
from tests.virtual.scenario import assert_right, request, scenario

CHUNK = 64
LENGTH = 128
NEVER = 1_000_000
"""Chunks of a bound that is never met."""


def config(undelivered_chunks: int = 4, **changes: Any) -> SimConfig:
    overrides = [
        f"prefill.chunk_tokens={CHUNK}",
        f"prefill.undelivered_chunks={undelivered_chunks}",
        "transfer.lease_s=600",
    ]
    return SimConfig(**{"num_blocks": 2048, "base": load_config(None, overrides), **changes})


async def ask_all(cluster: SimCluster, settings: SimConfig, names: list[str]) -> None:
    outcomes = await asyncio.gather(*(cluster.ask(request(name, LENGTH, 4)) for name in names))
    for outcome in outcomes:
        assert_right(outcome, settings)


@pytest.mark.parametrize("undelivered_chunks", [0, 4, NEVER])
def test_what_is_computed_and_not_delivered_is_bounded(undelivered_chunks: int) -> None:
    """A link that hardly moves, then one that does: every answer is right, and none was tried twice."""
    settings = config(undelivered_chunks)
    names = [f"r{number}" for number in range(40)]

    async def story(cluster: SimCluster) -> int:
        link = cluster.links["prefill-0", "decode-0"]
        fast, link.bytes_per_s = link.bytes_per_s, 1e5
        asking = asyncio.ensure_future(ask_all(cluster, settings, names))
        most = 0
        for _ in range(2000):
            await asyncio.sleep(0.002)
            (prefill,) = (ledger for ledger in await cluster.ledgers() if ledger.worker_id == "prefill-0")
            most = max(most, prefill.in_transfer * settings.block_size)
        assert cluster.service.records.num_live == 40
        link.bytes_per_s = fast
        await asking
        records = [cluster.service.records.find(name) for name in names]
        assert all(record is not None and len(record.attempts) == 1 for record in records)
        return most

    most = scenario(settings, story)
    if undelivered_chunks == NEVER:
        assert most == 40 * LENGTH  # the link is slow enough to show
    else:
        # Not beyond the bound, the latest prompt and the one that was computed meanwhile.
        assert 2 * LENGTH <= most <= undelivered_chunks * CHUNK + 2 * LENGTH


@pytest.mark.parametrize("length", [20, 128, 1500])
def test_a_link_that_keeps_up_changes_nothing(length: int) -> None:
    """Not one step, not one moment."""

    def log(undelivered_chunks: int) -> list[str]:
        settings = config(undelivered_chunks, decode=2)

        async def story(cluster: SimCluster) -> list[str]:
            asking = [cluster.ask(request(f"r{number}", length + number, 6)) for number in range(40)]
            for outcome in await asyncio.gather(*asking):
                assert_right(outcome, settings)
            return cluster.log.lines

        return scenario(settings, story)

    assert log(4) == log(NEVER)


def test_a_stalled_way_does_not_hold_up_the_others() -> None:
    """One prefill worker, two decode workers, and the link to one of them stands still."""
    settings = config(4, decode=2)
    names = [f"r{number}" for number in range(40)]

    async def story(cluster: SimCluster) -> int:
        link = cluster.links["prefill-0", "decode-0"]
        fast, link.bytes_per_s = link.bytes_per_s, 1e4
        asking = asyncio.ensure_future(ask_all(cluster, settings, names))
        await asyncio.sleep(5)
        num_stuck = cluster.service.records.num_live
        link.bytes_per_s = fast
        await asking
        return num_stuck

    # Those that were on their way to the stalled one before it was known: a bound's worth, and two more.
    num_stuck = scenario(settings, story)
    assert 0 < num_stuck <= 4 * CHUNK // LENGTH + 2 + 2 * CHUNK // LENGTH
