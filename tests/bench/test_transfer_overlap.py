"""How overlap is measured: figures by hand, the slow link, and real workers whose KV leaves before prefill ends."""

from __future__ import annotations

import asyncio
import random
import time
from itertools import pairwise

import pytest

from bench.transfer.overlap import Round, overlap_figures, random_prompt, round_of, slow_way
from bench.transfer.pair import HandoffTimes, worker_pair
from bench.transfer.slow_link import BUFFER_BYTES, SlowLink

RATE = 4_000_000
CHUNK, NUM_CHUNKS, NUM_LAYERS = 128, 4, 30
SERIAL_S = 0.4


def test_exposed_is_from_prefills_end_to_the_second_token_less_a_step() -> None:
    times = HandoffTimes(8.0, 100.0, (100.5, 100.9, 101.1, 101.3, 101.9), 1000, "tcp")
    measured = round_of(times, 4.0)
    assert measured.step_s == pytest.approx(0.2)
    assert measured.exposed_s == pytest.approx(0.7)
    assert overlap_figures("tcp", [measured])["share"] == pytest.approx(0.7 / 8.0)
    shaped = overlap_figures("tcp", [measured], bytes_per_s=2**30)
    assert shaped["share"] == pytest.approx(0.7 / 4.0)
    assert (shaped["shaped"], shaped["link_gib_s"], shaped["bytes"]) == (True, 1.0, 1000)


def test_figures_are_medians_over_the_rounds() -> None:
    rounds = [Round(10.0, exposed, 0.1, 5.0, 1000) for exposed in (3.0, 1.0, 2.0)]
    assert overlap_figures("shm", rounds)["exposed_s"] == 2.0


async def test_a_slow_link_passes_everything_at_its_rate_and_holds_the_sender_back() -> None:
    data = random.Random(1).randbytes(1_600_000)
    arrived = bytearray()
    over = asyncio.Event()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while more := await reader.read(1 << 16):
            arrived.extend(more)
        over.set()
        writer.close()

    server = await asyncio.start_server(receive, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, SlowLink(f"127.0.0.1:{port}", RATE) as link:
        host, _, relay = link.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(relay))
        started = time.monotonic()
        writer.write(data)
        await asyncio.sleep(0.1)
        assert 0 < link.num_bytes <= 0.1 * RATE * 1.5 + BUFFER_BYTES
        await writer.drain()
        writer.close()
        await over.wait()
        taken_s = time.monotonic() - started
    assert arrived == data
    assert link.num_bytes == len(data)
    assert taken_s > 0.9 * len(data) / RATE


@pytest.mark.e2e
async def test_kv_leaves_layer_by_layer_while_the_prompt_is_computed() -> None:
    """Sent chunk by chunk it would leave at 4 moments, sent at the end at one. The same once more, by itself and over
    a slow link, takes as long as that link makes it."""
    prompt = random_prompt(CHUNK * NUM_CHUNKS)
    async with worker_pair("engine.pool_bytes=400000000", f"prefill.chunk_tokens={CHUNK}") as pair:
        offer = (await pair.offers())["tcp"]
        async with slow_way(offer) as (way, link):
            seen = [0]
            prefilled = asyncio.Event()
            handing_over = asyncio.ensure_future(pair.hand_over(prompt, way, prefilled.set))
            while not (prefilled.is_set() or handing_over.done()):
                seen.append(link.num_bytes)
                await asyncio.sleep(0.005)
            times = await handing_over
            assert link.num_bytes >= times.num_bytes
        moments = sum(after > before for before, after in pairwise(seen))
        assert moments > NUM_LAYERS, f"the KV of {NUM_CHUNKS} chunks left at {moments} moments"
        share_left = 1 - seen[-1] / times.num_bytes
        assert share_left < 0.5 / NUM_CHUNKS, f"{share_left:.1%} of the KV was still here at prefill's end"
        async with slow_way(offer, times.num_bytes / SERIAL_S) as (way, _):
            assert await pair.send_again(prompt, way) > 0.95 * SERIAL_S
