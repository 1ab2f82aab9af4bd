"""Random workload under random faults: whatever happens, each request gets the right tokens or a clean error.

A seed fixes everything: fleet, pools, requests, faults and their moments. While requests run, workers are
killed and started again, vanish without a word, or are drained; links are cut or slowed down and healed,
token streams break (and the worker may notice late), the router cannot reach a worker, engines stall,
clients leave. Afterwards all is healed, and every law must hold.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from common.config import load_config
from sim.clients import KEEPALIVE_S
from sim.cluster import Outcome, SimCluster, SimConfig
from sim.device import expected_tokens
from sim.loop import run
from tests.virtual.scenario import assert_right, request

CLEAN = frozenset({"unavailable", "worker_lost", "peer_lost", "draining", "deadline_exceeded", "handoff", "ticket"})
"""What clients may hear when the cluster is broken; anything else is a fault of Baton's own."""

REQUESTS, FAULTS, SPAN_S = 40, 8, 12.0
LEASE_S, STEP_TIMEOUT_S, STALLS_S, CUTS_S = 1.5, 1.0, (0.2, 0.9, 6.0), (0.01, 1.0, 4.0)
FORGOTTEN_S = LEASE_S + max(STALLS_S) + max(CUTS_S) + KEEPALIVE_S + 1.0
"""By then nothing of a request that has ended is held anywhere, whatever happened."""


class Chaos:
    """One seed's story."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        base = load_config(
            None,
            [
                "prefill.chunk_tokens=64",
                "decode.chunk_tokens=32",
                f"transfer.lease_s={LEASE_S}",
                "transfer.pull_patience_s=0.5",
                "router.pull_fixed_tokens=0",  # whatever another one has is pulled
                "router.local_prefill_tokens=32",
                "worker.suspect_after_s=1",
                "worker.heartbeat_s=0.3",
                "worker.drain_timeout_s=3",
                f"engine.step_timeout_s={STEP_TIMEOUT_S}",
            ],
        )
        self.settings = SimConfig(
            prefill=self.rng.randint(1, 3),
            decode=self.rng.randint(1, 3),
            mode=self.rng.choice(["split", "split", "adaptive", "colocated"]),
            num_blocks=self.rng.choice([32, 48, 256]),
            num_layers=2,
            jitter_s=self.rng.choice([0.0, 0.001, 0.05]),
            seed=seed,
            base=base,
            heartbeats=True,
        )
        self.cluster = SimCluster(self.settings)
        self.outcomes: list[Outcome] = []
        self.num_cancelled = 0
        self.faults: list[str] = []

    async def play(self) -> None:
        await self.cluster.start()
        clients = [asyncio.ensure_future(self._client(number)) for number in range(REQUESTS)]
        faults = [asyncio.ensure_future(self._fault(number)) for number in range(FAULTS)]
        watching = asyncio.ensure_future(self._watch())
        await asyncio.gather(*clients, *faults)
        watching.cancel()
        await asyncio.wait([watching])
        if not watching.cancelled():
            watching.result()
        await self._check()
        await self.cluster.close()

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self.settings.seed} {number}")
        await asyncio.sleep(rng.random() * SPAN_S)
        asked = request(
            f"r{number}",
            rng.choice([1, 15, 16, 17, 63, 64, 65, 100, 200]),
            rng.choice([1, 2, 20, 60, 200 if self.settings.num_blocks < 256 else 1000]),
            seed=number,
            shared=rng.choice([0, 16, 48, 160]),
            timeout_s=rng.choice([4.0, 30.0, 30.0]),
        )
        asking = asyncio.ensure_future(self.cluster.ask(asked))
        if rng.random() < 0.2:
            await asyncio.sleep(rng.choice([0.0, 0.0003, 0.001, 0.05, 0.5]))
            asking.cancel()
            await asyncio.wait([asking])
            self.num_cancelled += 1
        else:
            self.outcomes.append(await asking)

    async def _fault(self, number: int) -> None:
        rng = random.Random(f"{self.settings.seed} fault {number}")
        await asyncio.sleep(rng.random() * SPAN_S)
        kinds = [self._kill, self._vanish, self._drain, self._break_streams, self._stall, self._part]
        if self.cluster.links:
            kinds += [self._cut, self._slow]
        kind = rng.choice(kinds)
        self.faults.append(kind.__name__)
        await kind(rng)

    async def _kill(self, rng: random.Random) -> None:
        name = rng.choice(list(self.cluster.workers))
        if not self.cluster.hosts[name].alive:
            return
        await self.cluster.kill(name)
        await asyncio.sleep(rng.random() * 3)
        self.cluster.restart(name)

    async def _vanish(self, rng: random.Random) -> None:
        """As with the power: no connection says that it has ended."""
        name = rng.choice(list(self.cluster.workers))
        host = self.cluster.hosts[name]
        if not host.alive:
            return
        host.cut()
        links = [link for ends, link in self.cluster.links.items() if name in ends]
        for link in links:
            link.up = False
        await self.cluster.kill(name)
        await asyncio.sleep(rng.random() * 3)
        self.cluster.restart(name)
        for link in links:
            link.up = True
        await asyncio.sleep(KEEPALIVE_S)
        host.heal()  # what the old process left behind in the network ends

    async def _part(self, rng: random.Random) -> None:
        """The router and a worker cannot reach each other for a while."""
        host = self.cluster.hosts[rng.choice(list(self.cluster.workers))]
        host.cut()
        await asyncio.sleep(rng.choice(CUTS_S))
        host.heal()

    async def _drain(self, rng: random.Random) -> None:
        name = rng.choice(list(self.cluster.workers))
        host, worker = self.cluster.hosts[name], self.cluster.workers[name]
        await worker.drain()
        await worker.drained()
        if host.alive and self.cluster.hosts[name] is host:
            await self.cluster.kill(name)
            self.cluster.restart(name)

    async def _break_streams(self, rng: random.Random) -> None:
        name = rng.choice(list(self.cluster.workers))
        self.cluster.hosts[name].break_streams(rng.choice([0.0, 0.01, 5.0]))

    async def _stall(self, rng: random.Random) -> None:
        """The engine stands still for a while, the process does not."""
        device = self.cluster.devices[rng.choice(list(self.cluster.workers))]
        device.stall()
        await asyncio.sleep(rng.choice(STALLS_S))
        device.resume()

    async def _cut(self, rng: random.Random) -> None:
        link = rng.choice(list(self.cluster.links.values()))
        link.up = False
        await asyncio.sleep(rng.choice(CUTS_S))
        link.up = True

    async def _slow(self, rng: random.Random) -> None:
        link = rng.choice(list(self.cluster.links.values()))
        link.bytes_per_s = rng.choice([1e5, 1e6, 1e7])
        await asyncio.sleep(rng.random() * 5)
        link.bytes_per_s = self.settings.link_bytes_per_s

    # ── laws ──────────────────────────────────────────────────────────────────────────────────────

    async def _watch(self) -> None:
        """Law 3 at every moment, and law 5 soon after each end: what a request held is given back."""
        records, loop = self.cluster.service.records, asyncio.get_running_loop()
        while True:
            for ledger in await self.cluster.ledgers():
                assert ledger.balanced, ledger
                for holder in ledger.holders:
                    record = records.find(holder.request.split("#")[0])
                    assert record is not None, holder
                    held_s = 0.0 if record.ended_at is None else loop.time() - record.ended_at
                    assert held_s < FORGOTTEN_S, (ledger.worker_id, holder, held_s)
            await asyncio.sleep(0.1)

    async def _check(self) -> None:
        service = self.cluster.service
        ledgers = await self.cluster.settled()
        assert len(ledgers) == len(self.cluster.workers)
        for ledger in ledgers:
            assert ledger.free + ledger.cached == ledger.total, ledger
        assert len(self.outcomes) + self.num_cancelled == REQUESTS
        for outcome in self.outcomes:
            self._check_outcome(outcome)
        # Every request ended exactly once, and the books of the router are closed.
        assert _ended(self.cluster) == REQUESTS
        assert service.metrics.requests_running._value.get() == 0
        assert service.num_queued == 0
        for worker in service.registry.workers:
            assert not worker.attempts
            assert not len(worker.outstanding)
        for worker in self.cluster.workers.values():
            load = worker.load()
            assert (load.num_running, load.num_waiting, load.waiting_tokens, load.running_tokens) == (0, 0, 0, 0)
        # And it serves again.
        await asyncio.sleep(10.0)
        assert_right(await self.cluster.ask(request("afterwards", 100, 20)), self.settings)
        await self.cluster.settled()

    def _check_outcome(self, outcome: Outcome) -> None:
        asked = outcome.request
        expected = expected_tokens(asked.prompt, asked.sampling, self.settings.vocab_size)
        if outcome.error is None:
            assert outcome.tokens == expected, asked.request_id
            assert outcome.finish == "length"
        else:
            assert outcome.error.code in CLEAN, outcome.error
            assert outcome.tokens == expected[: len(outcome.tokens)], asked.request_id
            assert not outcome.finish
        record = self.cluster.service.records.find(asked.request_id).to_json(0.0)
        tokens = record["tokens"]
        assert tokens["emitted"] == len(outcome.tokens)
        if outcome.error is None and record["attempts"][-1]["outcome"] == outcome.finish:
            prompt = len(asked.prompt)
            assert tokens["cached_prefill"] + tokens["pulled"] + tokens["computed_prefill"] == prompt, record
            assert tokens["cached_prefill"] == outcome.cached_tokens
            decode_side = tokens["cached_decode"] + tokens["received"] + tokens["computed_decode"]
            # Where the prefill worker's token was the last one, the answer did not wait for the handoff.
            assert decode_side == prompt or (tokens["emitted"] == tokens["resumed_at"] + 1 and not decode_side), record


def _ended(cluster: SimCluster) -> int:
    samples = cluster.service.metrics.requests.collect()[0].samples
    return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))


@pytest.mark.parametrize("seed", range(15))
def test_random_faults_break_no_law(seed: int) -> None:
    async def main() -> Chaos:
        chaos = Chaos(seed)
        await chaos.play()
        return chaos

    chaos = run(main(), horizon_s=1000.0)
    # Not by serving nobody: where each worker has a colleague, most requests get through.
    settings = chaos.settings
    if settings.decode > 1 and (settings.prefill > 1 or settings.mode == "colocated"):
        assert sum(outcome.error is None for outcome in chaos.outcomes) > len(chaos.outcomes) * 0.6


def test_the_same_seed_gives_the_same_events_faults_and_all() -> None:
    async def digest(seed: int) -> str:
        chaos = Chaos(seed)
        await chaos.play()
        return chaos.cluster.log.digest

    first, again, other = (run(digest(seed), horizon_s=1000.0) for seed in (5, 5, 6))
    assert first == again != other
