"""Modelled links: the sending and receiving side of a handoff without bytes.

A link carries ``bytes_per_s``, one piece after the other in the order of asking; a piece arrives when the
link has carried it, plus ``latency_s``. What arrives is the state in `sim.device`'s memory, so a piece that
is pushed before it is complete arrives as it was, and shows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import BatonError, LayoutMismatchError, TicketError, WorkerLostError
from common.handoff import HandoffCommit, HandoffReceipt, Ticket, TransferCounters, TransportOffer
from engine.ports import HandoffListener, KVPush
from sim.device import DeviceMemory


@dataclass(slots=True, eq=False)
class Parcel:
    """Something that a link carries; ``arrive`` is called at the other end, unless it was given up."""

    num_bytes: int
    arrive: Callable[[], None]
    given_up: bool = False


class Link:
    """One direction between two hosts. Its speed may change at any time, also to nothing and back: what is
    on the way while ``up`` is False is lost."""

    def __init__(self, bytes_per_s: float = 50e9, latency_s: float = 50e-6) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.up = True
        self._waiting: deque[Parcel] = deque()
        self._busy = False

    def send(self, num_bytes: int, arrive: Callable[[], None]) -> Parcel:
        parcel = Parcel(num_bytes, arrive)
        self._waiting.append(parcel)
        if not self._busy:
            self._carry_next()
        return parcel

    def _carry_next(self) -> None:
        """Takes the next parcel that is still wanted; carrying it takes the time of its bytes."""
        while self._waiting and self._waiting[0].given_up:
            self._waiting.popleft()
        self._busy = bool(self._waiting)
        if self._busy:
            parcel = self._waiting.popleft()
            asyncio.get_running_loop().call_later(parcel.num_bytes / self.bytes_per_s, self._carried, parcel)

    def _carried(self, parcel: Parcel) -> None:
        asyncio.get_running_loop().call_later(self.latency_s, self._arrived, parcel)
        self._carry_next()

    def _arrived(self, parcel: Parcel) -> None:
        if not parcel.given_up:
            parcel.arrive()


@dataclass(slots=True)
class _Expected:
    ticket: Ticket
    listener: HandoffListener
    pieces: dict[tuple[int, int], None] = field(default_factory=dict)
    num_bytes: int = 0


class SimReceiver:
    """An `engine.ports.KVReceiver`."""

    def __init__(self, worker_id: str, memory: DeviceMemory) -> None:
        self.worker_id = worker_id
        self.memory = memory
        self.alive = True
        self.counters = TransferCounters()
        self._expected: dict[str, _Expected] = {}

    @property
    def offers(self) -> tuple[TransportOffer, ...]:
        return (TransportOffer("local", self.worker_id),)

    def expect(self, ticket: Ticket, listener: HandoffListener) -> None:
        self._expected[ticket.ticket_id] = _Expected(ticket, listener)

    async def forget(self, ticket_id: str) -> None:
        self._expected.pop(ticket_id, None)

    async def close(self) -> None:
        self.alive = False
        self._expected.clear()

    def lost(self) -> WorkerLostError:
        return WorkerLostError(f"worker {self.worker_id} is gone")

    def arrive(
        self, ticket: Ticket, layer: int, first: int, count: int, source: DeviceMemory, blocks: Sequence[int]
    ) -> None:
        """Pieces of one layer. The state is that of the whole token, so the last layer brings it."""
        expected = self._expected.get(ticket.ticket_id)
        if expected is None or not self.alive:
            return
        if layer == self.memory.layout.num_layers - 1:
            self.memory.copy_from(source, blocks[first : first + count], ticket.block_ids[first : first + count])
        for piece in range(first, first + count):
            expected.pieces[layer, piece] = None
        num_bytes = count * self.memory.layout.block_layer_bytes
        expected.num_bytes += num_bytes
        expected.listener.progressed(ticket.ticket_id, num_bytes)

    def commit(self, commit: HandoffCommit) -> HandoffReceipt:
        expected = self._expected.get(commit.ticket_id)
        if not self.alive:
            raise self.lost()
        if expected is None:
            raise TicketError(f"ticket {commit.ticket_id} is not live on {self.worker_id}")
        wanted = len(expected.ticket.block_ids) * self.memory.layout.num_layers
        if len(expected.pieces) != wanted or commit.num_pieces != wanted:
            raise TicketError(
                f"ticket {commit.ticket_id} wants {wanted} pieces, {len(expected.pieces)} of {commit.num_pieces} came"
            )
        expected.listener.committed(commit)
        return HandoffReceipt(commit.ticket_id, wanted, expected.num_bytes)

    def fail(self, ticket_id: str, error: BatonError) -> None:
        expected = self._expected.get(ticket_id)
        if expected is not None:
            expected.listener.failed(ticket_id, error)


class _SimPush:
    transport = "local"

    def __init__(
        self, ticket: Ticket, blocks: Sequence[int], source: DeviceMemory, link: Link, target: SimReceiver
    ) -> None:
        self._ticket = ticket
        self._blocks = list(blocks)
        self._source = source
        self._link = link
        self._target = target
        self._parcels: dict[int, Parcel] = {}
        self._next_parcel = 0
        self._all_arrived = asyncio.Event()
        self._all_arrived.set()
        self._over = False

    def push(self, layer: int, first: int, count: int) -> None:
        number = self._next_parcel
        self._next_parcel += 1
        self._all_arrived.clear()
        self._parcels[number] = self._link.send(
            count * self._source.layout.block_layer_bytes, lambda: self._arrive(number, layer, first, count)
        )

    async def commit(self, commit: HandoffCommit) -> HandoffReceipt:
        await self._all_arrived.wait()
        await asyncio.sleep(self._link.latency_s)
        if not self._link.up:
            await asyncio.sleep(self._ticket.lease_s)
            raise WorkerLostError(f"no answer from {self._target.worker_id}")
        try:
            receipt = self._target.commit(commit)
        except BatonError:
            if not self._target.alive:
                raise self._target.lost() from None
            raise
        self._over = True
        await asyncio.sleep(self._link.latency_s)
        return receipt

    async def abort(self, reason: str) -> None:
        for parcel in self._parcels.values():
            parcel.given_up = True
        if not self._over and self._link.up:
            self._over = True
            asyncio.get_running_loop().call_later(
                self._link.latency_s, self._target.fail, self._ticket.ticket_id, WorkerLostError(reason)
            )

    def _arrive(self, number: int, layer: int, first: int, count: int) -> None:
        del self._parcels[number]
        if not self._parcels:
            self._all_arrived.set()
        if self._link.up:
            self._target.arrive(self._ticket, layer, first, count, self._source, self._blocks)


class SimSender:
    """An `engine.ports.KVSender`. ``receivers`` by worker id, ``link_to`` gives the link to one."""

    def __init__(
        self, memory: DeviceMemory, receivers: Mapping[str, SimReceiver], link_to: Callable[[str], Link]
    ) -> None:
        self._memory = memory
        self._receivers = receivers
        self._link_to = link_to
        self.counters = TransferCounters()

    async def open(self, ticket: Ticket, block_ids: Sequence[int]) -> KVPush:
        link = self._link_to(ticket.worker_id)
        await asyncio.sleep(2 * link.latency_s)
        target = self._receivers[ticket.worker_id]
        if not link.up or not target.alive:
            raise WorkerLostError(f"worker {ticket.worker_id} cannot be reached")
        if target.memory.layout != self._memory.layout:
            raise LayoutMismatchError(f"sender has {self._memory.layout}, receiver has {target.memory.layout}")
        return _SimPush(ticket, block_ids, self._memory, link, target)

    async def close(self) -> None:
        return None
