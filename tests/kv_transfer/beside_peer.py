"""A worker rank as a process of its own, with KV and nothing else: gRPC as carrier, any transport beside it.

    beside_peer.py TRANSPORT receive|send LAYOUT [DEVICE]        LAYOUT: a KVLayout as JSON

It says where it listens (a sender: "ready"), then takes one order a line, and answers in lines:

    receive ID BLOCKS          expects a ticket        → "expecting ID", then "ID committed" or "ID failed CODE"
    sum BLOCKS                                         → SHA-256 of what lies there
    send ID BLOCKS TARGET ADDRESS                      → "ID sent" or "ID failed CODE"
    begin ID BLOCKS TARGET ADDRESS                     → "ID half-way" when the first layer is on its way

BLOCKS: "0,5,7", in the pool of who gets the order; of a ticket's blocks a sender takes those of the same
numbers. TARGET: the receiver's layout. Pools hold the numbers of `numbers`, or zeros.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import sys
from functools import partial

import torch

from common.config import TransferConfig
from common.errors import BatonError
from common.handoff import HandoffCommit, KVLayout, Ticket, TransportOffer
from kv_transfer.pool import NumpyPool
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transports.available import make_transports
from rpc import kv_channel
from rpc.servers import WorkerServer
from tests.kv_transfer.groups import fill

LAYOUT = KVLayout("tiny", num_layers=4, num_kv_heads=4, head_dim=32, block_size=16, dtype="float32", total_kv_heads=4)
NUM_BLOCKS = 64
LEASE_S = 2.0


def numbers(layout: KVLayout) -> torch.Tensor:
    """What a sender's pool holds, float32 [layers, halves, tokens, heads of the whole model, head_dim]."""
    tokens = NUM_BLOCKS * layout.block_size
    shape = (layout.num_layers, layout.halves, tokens, layout.total_kv_heads, layout.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def make_ticket(ticket_id: str, blocks: tuple[int, ...], target: KVLayout, name: str, address: str) -> Ticket:
    offers = (TransportOffer(name, address, "host"),)
    context = len(blocks) * target.block_size
    return Ticket(ticket_id, "r", 0, "decode-0", 1, context, 0, blocks, target, offers, b"secret", LEASE_S)


def digest(pool: NumpyPool, blocks: tuple[int, ...]) -> str:
    return hashlib.sha256(pool.data[:, list(blocks)].tobytes()).hexdigest()


def block_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Announcer:
    def progressed(self, ticket_id: str, num_bytes: int) -> None: ...

    def committed(self, commit: HandoffCommit) -> None:
        say(f"{commit.ticket_id} committed")

    def failed(self, ticket_id: str, error: BatonError) -> None:
        say(f"{ticket_id} failed {error.code}")


class Peer:
    """``transport``: its name in the configuration."""

    def __init__(self, transport: str, layout: KVLayout, server: WorkerServer) -> None:
        self._name = transport
        self._config = TransferConfig(transports=(transport,), staging_bytes=1 << 20)
        self._server = server
        self._pool = NumpyPool(layout, NUM_BLOCKS)
        self._layout = layout
        address = server.bind("127.0.0.1", 0)
        transports = make_transports(self._config, "host", address, kv_channel.connect)
        self._receiver = Receiver(self._pool, self._config, "host", transports)
        self._sender = Sender(self._pool, self._config, transports)
        self._sending: list[asyncio.Task[None]] = []

    async def start(self, role: str) -> None:
        await self._receiver.start()
        await self._server.start(self, kv=self._receiver)  # type: ignore[arg-type]
        if role == "send":
            fill(self._pool, range(NUM_BLOCKS), numbers(self._layout), 0)
        say(self._server.address if role == "receive" else "ready")

    def obey(self, order: str, *rest: str) -> None:
        match order, rest:
            case "receive", (ticket_id, blocks):
                ticket = make_ticket(ticket_id, block_numbers(blocks), self._layout, self._name, "")
                self._receiver.expect(ticket, Announcer())
                say(f"expecting {ticket_id}")
            case "sum", (blocks,):
                say(digest(self._pool, block_numbers(blocks)))
            case "send" | "begin", (ticket_id, blocks, target, address):
                layout = KVLayout(**json.loads(target))
                ticket = make_ticket(ticket_id, block_numbers(blocks), layout, self._name, address)
                self._sending.append(asyncio.ensure_future(self._send(ticket, whole=order == "send")))
            case _:
                raise ValueError(f"no such order: {order} {rest}")

    async def _send(self, ticket: Ticket, *, whole: bool) -> None:
        per_block = ticket.layout.block_size / self._layout.block_size
        blocks = range(int(len(ticket.block_ids) * per_block)) if per_block != 1 else ticket.block_ids
        try:
            push = await self._sender.open(ticket, list(blocks))
            for layer in range(self._layout.num_layers if whole else 1):
                push.push(layer, 0, len(blocks))
            if whole:
                await push.commit(HandoffCommit(ticket.ticket_id, 7, 0, 0))
            say(f"{ticket.ticket_id} {'sent' if whole else 'half-way'}")
        except BatonError as error:
            say(f"{ticket.ticket_id} failed {error.code}")


async def main(transport: str, role: str, layout: str, device: str = "") -> None:
    if device:
        torch.cuda.set_device(int(device))
    torch.set_num_threads(1)
    peer = Peer(transport, KVLayout(**json.loads(layout)), WorkerServer())
    await peer.start(role)
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(partial(asyncio.StreamReaderProtocol, orders), sys.stdin)
    while line := (await orders.readline()).decode().split():
        peer.obey(*line)


def as_argument(layout: KVLayout) -> str:
    return json.dumps(dataclasses.asdict(layout), separators=(",", ":"))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
