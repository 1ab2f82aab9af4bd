"""The other process of `test_kv_shm.py`: ``shm_peer.py receive`` or ``shm_peer.py send ADDRESS``.

Handles ticket t1 to the end, leaves t2 half-way, and then waits to be killed.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys

import numpy as np

from common.config import TransferConfig
from common.errors import BatonError
from common.handoff import HandoffCommit, KVLayout, Ticket, TransportOffer
from kv_transfer.host import host_id
from kv_transfer.pool import NumpyPool
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transports.shm import Shm

LAYOUT = KVLayout(model="tiny", num_layers=4, num_kv_heads=4, head_dim=32, block_size=16, dtype="float32")
NUM_BLOCKS = 64
CONFIG = TransferConfig(transports=("shm",), staging_bytes=1 << 20)


def make_pool(seed: int) -> NumpyPool:
    pool = NumpyPool(LAYOUT, NUM_BLOCKS)
    pool.data[:] = np.random.default_rng(seed).integers(0, 256, pool.data.shape, dtype=np.uint8)
    return pool


def digest(pool: NumpyPool) -> str:
    return hashlib.sha256(pool.data.tobytes()).hexdigest()


def make_ticket(ticket_id: str, address: str) -> Ticket:
    blocks = tuple(reversed(range(NUM_BLOCKS)))
    offers = (TransportOffer("shm", address, host_id()),)
    return Ticket(ticket_id, "r", 0, "decode-0", 1, NUM_BLOCKS * 16, 0, blocks, LAYOUT, offers, b"secret", 30.0)


async def push_everything(sender: Sender, ticket: Ticket) -> None:
    push = await sender.open(ticket, ticket.block_ids)
    for layer in range(LAYOUT.num_layers):
        push.push(layer, 0, NUM_BLOCKS)
    await push.commit(HandoffCommit(ticket.ticket_id, 1, 0, LAYOUT.num_layers * NUM_BLOCKS))


class Announcer:
    def __init__(self, pool: NumpyPool) -> None:
        self._pool = pool

    def progressed(self, ticket_id: str, num_bytes: int) -> None:
        pass

    def committed(self, commit: HandoffCommit) -> None:
        say(f"{commit.ticket_id} {digest(self._pool)}")

    def failed(self, ticket_id: str, error: BatonError) -> None:
        say(f"{ticket_id} failed: {error}")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def receive() -> None:
    pool = NumpyPool(LAYOUT, NUM_BLOCKS)
    receiver = Receiver(pool, CONFIG, host_id(), [Shm(host_id(), CONFIG.staging_bytes)])
    await receiver.start()
    address = receiver.offers[0].address
    for ticket_id in ("t1", "t2"):
        receiver.expect(make_ticket(ticket_id, address), Announcer(pool))
    say(address)
    await asyncio.Event().wait()


async def send(address: str) -> None:
    sender = Sender(make_pool(5), CONFIG, [Shm(host_id(), CONFIG.staging_bytes)])
    await push_everything(sender, make_ticket("t1", address))
    second = make_ticket("t2", address)
    push = await sender.open(second, second.block_ids)
    push.push(0, 0, NUM_BLOCKS)
    say("half-way")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(receive() if sys.argv[1] == "receive" else send(sys.argv[2]))
