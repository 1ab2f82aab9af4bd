"""One case within this process: what arrives is looked at, and what is not what was sent ends the benchmark."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest

from bench.transfer.cases import KIB, Case
from bench.transfer.ends import ReceivingEnd, pool_digest
from bench.transfer.measure import SendingEnd, checksum_share, measure, random_bytes
from bench.transfer.remote import Within
from common.errors import IntegrityError
from engine.kv_cache import host_cache

CASE = Case("local", 64 * KIB, 16)


@pytest.fixture
async def receiving() -> AsyncIterator[ReceivingEnd]:
    end = ReceivingEnd()
    await end.start()
    yield end
    await end.stop()


class Altered(Within):
    """One bit of one block is another before anyone looks."""

    def __init__(self, end: ReceivingEnd) -> None:
        super().__init__(end)
        self.end = end

    async def digests(self) -> tuple[str, str]:
        pool = self.end._pool
        assert pool is not None
        block = np.empty((1, pool.layout.block_layer_bytes), dtype=np.uint8)
        pool.read_blocks(2, [5], block)
        block[0, 7] ^= 1
        pool.write_blocks(2, [5], block)
        return await super().digests()


class AlteredRaw(Within):
    def __init__(self, end: ReceivingEnd) -> None:
        super().__init__(end)
        self.end = end

    async def digests(self) -> tuple[str, str]:
        self.end.target[1000] ^= 1
        return await super().digests()


async def test_a_case_is_measured_over_its_raw_link(receiving: ReceivingEnd) -> None:
    figures = await measure(CASE, random_bytes(CASE.num_bytes), Within(receiving), 3)
    assert (figures["transport"], figures["size"], figures["bytes"], figures["blocks"]) == ("local", 65536, 65536, 16)
    assert (figures["layers"], figures["rounds"]) == (4, 3)
    assert figures["ratio"] == figures["gib_s"] / figures["raw_gib_s"] > 0


async def test_the_cost_of_checksums_is_a_part_of_the_time(receiving: ReceivingEnd) -> None:
    share = await checksum_share(CASE, random_bytes(CASE.num_bytes), Within(receiving), 3)
    assert share < 1


@pytest.mark.parametrize(("peer", "place"), [(Altered, "the pool"), (AlteredRaw, "the raw link's target")])
async def test_altered_bytes_end_it(receiving: ReceivingEnd, peer: type[Altered | AlteredRaw], place: str) -> None:
    with pytest.raises(IntegrityError, match=f"65536 bytes in 16 blocks: {place} has other bytes"):
        await measure(CASE, random_bytes(CASE.num_bytes), peer(receiving), 1)


async def test_a_pool_that_lost_a_byte_before_it_left_is_not_what_was_sent(
    receiving: ReceivingEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = SendingEnd.sender

    def sender_of_a_damaged_pool(self: SendingEnd, *, verify: bool = True) -> object:
        self.pool.write_blocks(0, [0], np.zeros((1, CASE.piece_bytes), dtype=np.uint8))
        return whole(self, verify=verify)

    monkeypatch.setattr(SendingEnd, "sender", sender_of_a_damaged_pool)
    with pytest.raises(IntegrityError, match="the pool has other bytes"):
        await measure(CASE, random_bytes(CASE.num_bytes), Within(receiving), 1)


def test_blocks_in_another_order_are_another_content() -> None:
    pool = host_cache(CASE.layout, CASE.blocks)
    pool.write_blocks(1, [3], np.full((1, CASE.piece_bytes), 9, dtype=np.uint8))
    in_order = np.arange(CASE.blocks)
    assert pool_digest(pool, in_order) != pool_digest(pool, in_order[::-1])
