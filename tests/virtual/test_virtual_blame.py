"""Who is to blame when one worker of a pair dies: the dead one, not the one that says so."""

from __future__ import annotations

import asyncio

import pytest

from common.config import load_config
from sim.cluster import SimCluster, SimConfig
from tests.virtual.scenario import assert_right, request, scenario

NOTICED_S = 1.0
"""The router hears of a death this much later than the peer does."""


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("moment_s", [0.005, 0.02, 0.04])
def test_a_death_that_the_peer_tells_first_costs_one_attempt(victim: str, moment_s: float) -> None:
    """A handoff under way breaks; its other end says so long before the router's own connection to the
    victim does. The next attempt is on other workers, not on the victim once more.
    """
    settings = SimConfig(
        prefill=2, decode=2, num_blocks=512, block_size=16, base=load_config(None, ["prefill.chunk_tokens=64"])
    )
    role = victim.split("-")[0]

    async def story(cluster: SimCluster) -> None:
        asking = asyncio.ensure_future(cluster.ask(request("r", 500, 20)))
        await asyncio.sleep(moment_s)
        record = cluster.service.records.find("r")
        assert record is not None
        assert (record.state, getattr(record.attempts[0], role)) == ("prefill", victim)
        cluster.hosts[victim].latency_s = NOTICED_S
        await cluster.kill(victim)
        assert_right(await asking, settings)
        attempts = [(attempt.prefill, attempt.decode) for attempt in record.attempts]
        assert len(attempts) == 2
        assert victim not in attempts[1]

    scenario(settings, story)
