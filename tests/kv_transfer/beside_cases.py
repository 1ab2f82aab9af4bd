"""What every transport with payloads beside its carrier has to do; `test_kv_group.py` and others run it for theirs.

Both ends are in this process, joined by carriers in memory (`BesideCases`), or each in a process (`ProcessCases`).
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config import TransferConfig
from common.errors import BatonError, HandoffError, IntegrityError, WorkerLostError
from common.failpoints import Failpoints
from common.handoff import HandoffCommit, HandoffReceipt, KVLayout, Ticket
from kv_transfer.channel import ByteChannel, Connector
from kv_transfer.frames import INLINE, Piece
from kv_transfer.plan import sending_heads
from kv_transfer.pool import NumpyPool
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transport import Transport
from kv_transfer.transports import beside
from kv_transfer.transports.memory import MemoryChannel, channel_pair
from tests.kv_transfer.beside_peer import LAYOUT as LAYOUT_OF_PEERS
from tests.kv_transfer.beside_peer import LEASE_S, NUM_BLOCKS, as_argument, block_numbers, digest, numbers
from tests.kv_transfer.groups import fill, rank_layout

LAYOUT = KVLayout(model="tiny", num_layers=3, num_kv_heads=2, head_dim=32, block_size=16, dtype="float32")
"""A block of a layer has 8 KiB."""

Make = Callable[[str, Connector, int], Transport]
"""Of address, connector and capacity."""


def footprint() -> tuple[int, int, int]:
    """(open descriptors, threads, resident KiB) of this process."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = int(status.split("VmRSS:")[1].split()[0])
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident


def mover_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("kv-gloo", "kv-nccl", "kv-nixl"))]


class Heard:
    """A listener that counts."""

    def __init__(self) -> None:
        self.committed_tokens: list[int] = []
        self.errors: list[BatonError] = []
        self.failure = asyncio.Event()

    def progressed(self, ticket_id: str, num_bytes: int) -> None: ...

    def committed(self, commit: HandoffCommit) -> None:
        self.committed_tokens.append(commit.token)

    def failed(self, ticket_id: str, error: BatonError) -> None:
        self.errors.append(error)
        self.failure.set()


class Rig:
    """One sender, and receivers at addresses of their own."""

    def __init__(self, make: Make, num_receivers: int = 1, failpoints: Failpoints | None = None, **config: Any) -> None:
        self.config = TransferConfig(**({"staging_bytes": 1 << 18, "lease_s": 10.0} | config))
        self.carriers: list[MemoryChannel] = []
        self.served: list[asyncio.Task[None]] = []
        self.source = NumpyPool(LAYOUT, 64)
        self.source.data[:] = np.random.default_rng(3).integers(0, 256, self.source.data.shape, dtype=np.uint8)
        self.targets = [NumpyPool(LAYOUT, 64) for _ in range(num_receivers)]
        capacity = self.config.staging_bytes
        self.receivers = [
            Receiver(pool, self.config, "host", [make(f"127.0.0.1:{number}", self.connect, capacity)])
            for number, pool in enumerate(self.targets)
        ]
        transport = make("127.0.0.1:9", self.connect, capacity)
        self.sender = Sender(self.source, self.config, [transport], failpoints=failpoints)
        self._num_tickets = 0

    async def start(self) -> None:
        for receiver in self.receivers:
            await receiver.start()

    async def connect(self, address: str) -> ByteChannel:
        near, far = channel_pair()
        self.carriers.append(near)
        self.served.append(asyncio.ensure_future(self.receivers[int(address.split(":")[1])].serve(far)))
        return near

    def expect(self, blocks: Sequence[int], to: int = 0) -> tuple[Ticket, Heard]:
        self._num_tickets += 1
        name, offers, heard = f"t{self._num_tickets}", self.receivers[to].offers, Heard()
        ticket = Ticket(
            name, "r", 0, "d", 1, len(blocks) * 16, 0, tuple(blocks), LAYOUT, offers, b"secret", self.config.lease_s
        )
        self.receivers[to].expect(ticket, heard)
        return ticket, heard

    async def hand_off(self, ticket: Ticket, blocks: Sequence[int]) -> HandoffReceipt:
        push = await self.sender.open(ticket, blocks)
        for layer in range(LAYOUT.num_layers):
            push.push(layer, 0, len(blocks))
        return await push.commit(HandoffCommit(ticket.ticket_id, 42, 0, LAYOUT.num_layers * len(blocks)))

    async def round_trip(self, blocks: Sequence[int], into: Sequence[int], to: int = 0) -> None:
        ticket, heard = self.expect(into, to)
        await self.hand_off(ticket, blocks)
        assert heard.committed_tokens == [42]
        self.assert_moved(blocks, into, to)
        await self.receivers[to].forget(ticket.ticket_id)

    def assert_moved(self, blocks: Sequence[int], into: Sequence[int], to: int = 0) -> None:
        assert np.array_equal(self.source.data[:, list(blocks)], self.targets[to].data[:, list(into)])

    async def close(self) -> None:
        await self.sender.close()
        for receiver in self.receivers:
            await receiver.close()
        for task in self.served:
            task.cancel()
        await asyncio.gather(*self.served, return_exceptions=True)


class BesideCases:
    """For each transport a subclass with a fixture ``make``."""

    @pytest.fixture
    def make(self) -> Make:
        raise NotImplementedError

    @pytest.fixture
    async def make_rig(self, make: Make) -> AsyncIterator[Callable[..., Any]]:
        rigs: list[Rig] = []

        async def new(*args: Any, **settings: Any) -> Rig:
            rig = Rig(make, *args, **settings)
            await rig.start()
            rigs.append(rig)
            return rig

        yield new
        for rig in rigs:
            await rig.close()

    async def test_bytes_arrive(self, make_rig: Any) -> None:
        """Through a staging area that holds a sixth of the payload, so each place is used several times."""
        rig = await make_rig(staging_bytes=1 << 18)
        blocks = list(range(63, -1, -1))
        await rig.round_trip(blocks, range(64))
        rig.targets[0].data[:] = 0
        await rig.round_trip([5], [7])
        assert rig.sender.counters.num_bytes == 65 * 3 * LAYOUT.block_layer_bytes == rig.receivers[0].counters.num_bytes
        assert len(rig.carriers) == 1

    async def test_handoffs_share_a_channel(self, make_rig: Any) -> None:
        rig = await make_rig()
        rng = np.random.default_rng(1)
        sources, targets = rng.permutation(64).reshape(16, 4), rng.permutation(64).reshape(16, 4)
        await asyncio.gather(*(rig.round_trip(s.tolist(), t.tolist()) for s, t in zip(sources, targets, strict=True)))
        assert len(rig.carriers) == 1

    async def test_an_abort_halfway_leaves_the_others(self, make_rig: Any) -> None:
        rig = await make_rig()
        ticket, heard = rig.expect(range(32))
        push = await rig.sender.open(ticket, range(32))
        push.push(0, 0, 32)
        other = asyncio.ensure_future(rig.round_trip(range(32, 40), range(40, 48)))
        await asyncio.sleep(0)
        await push.abort("no longer wanted")
        await other
        async with asyncio.timeout(5):
            await heard.failure.wait()
        assert "no longer wanted" in str(heard.errors[0])
        await rig.receivers[0].forget(ticket.ticket_id)
        rig.targets[0].data[:] = 9
        await rig.round_trip(range(8), range(50, 58))
        assert (rig.targets[0].data[:, :40] == 9).all()
        assert len(rig.carriers) == 1

    async def test_a_withdrawn_ticket_is_written_no_more(self, make_rig: Any) -> None:
        rig = await make_rig()
        ticket, _ = rig.expect(range(64))
        push = await rig.sender.open(ticket, range(64))
        push.push(0, 0, 64)
        await rig.receivers[0].forget(ticket.ticket_id)
        rig.targets[0].data[:] = 9
        for layer in (1, 2):
            push.push(layer, 0, 64)
        with pytest.raises(HandoffError, match="withdrawn"):
            await push.commit(HandoffCommit(ticket.ticket_id, 42, 0, 192))
        await rig.round_trip([1], [63])
        assert (rig.targets[0].data[:, :63] == 9).all()

    @pytest.mark.parametrize("damage", ["corrupt", "drop", "duplicate", "reorder"])
    async def test_damage_is_found_and_mended(self, make_rig: Any, damage: str) -> None:
        faults = Failpoints({"piece": f"40%{damage}"})
        rig = await make_rig(failpoints=faults, retries=20)
        for number in range(4):
            await rig.round_trip(range(number, 64), range(64 - number))
        num_damaged = faults.happened["piece", damage]
        counters = rig.receivers[0].counters
        assert num_damaged > 0
        assert (counters.corrupt > 0) == (damage == "corrupt")
        if damage != "reorder":  # a commit that overtook the last piece has it sent again
            assert (counters.duplicates > 0) == (damage == "duplicate")
            assert (rig.sender.counters.resent > 0) == (damage in ("corrupt", "drop"))
        assert len(rig.carriers) == 1

    async def test_what_never_verifies_is_not_served(self, make_rig: Any) -> None:
        rig = await make_rig(failpoints=Failpoints({"piece": "corrupt"}), retries=2)
        ticket, heard = rig.expect([1])
        with pytest.raises(IntegrityError):
            await rig.hand_off(ticket, [2])
        assert heard.committed_tokens == []
        assert len(heard.errors) == 1

    @pytest.mark.parametrize("offset", [INLINE, -2, (1 << 18) - 255, 1 << 40])
    async def test_pieces_outside_the_staging_area(
        self, make_rig: Any, offset: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = await make_rig()
        ticket, heard = rig.expect([1])
        push = await rig.sender.open(ticket, [2])
        pack = beside._pack

        def pack_misplaced(frames: list[Any]) -> bytes:
            return pack([(replace(f, offset=offset) if isinstance(f, Piece) else f, size) for f, size in frames])

        monkeypatch.setattr(beside, "_pack", pack_misplaced)
        push.push(0, 0, 1)
        async with asyncio.timeout(5):
            await heard.failure.wait()
        assert "staging area" in str(heard.errors[0]) or "beside the carrier" in str(heard.errors[0])
        with pytest.raises(BatonError):
            await push.commit(HandoffCommit(ticket.ticket_id, 42, 0, 3))

    async def test_a_cut_carrier_ends_the_channel_and_no_more(self, make_rig: Any) -> None:
        rig = await make_rig(2)
        await rig.round_trip([0], [0], to=1)
        ticket, heard = rig.expect(range(64))
        push = await rig.sender.open(ticket, range(64))
        push.push(0, 0, 64)
        rig.carriers[1].cut()
        for layer in (1, 2):
            push.push(layer, 0, 64)
        with pytest.raises(WorkerLostError):
            await push.commit(HandoffCommit(ticket.ticket_id, 42, 0, 192))
        async with asyncio.timeout(5):
            await heard.failure.wait()
        assert isinstance(heard.errors[0], WorkerLostError)
        await rig.round_trip(range(64), range(64), to=1)  # over the channel that there was
        await rig.receivers[0].forget(ticket.ticket_id)
        await rig.round_trip(range(64), range(64), to=0)  # over a new one
        assert len(rig.carriers) == 3

    async def test_nothing_is_left_of_fifty_channels(self, make_rig: Any) -> None:
        """All to one address; every other one is cut with a handoff half-way."""
        rig = await make_rig()
        before = (0, 0, 0)
        for number in range(50):
            if number == 10:  # libraries keep some things for good
                before = footprint()
            await rig.round_trip(range(32), range(32))
            if number % 2:
                ticket, heard = rig.expect(range(32))
                push = await rig.sender.open(ticket, range(32))
                push.push(0, 0, 32)
                rig.carriers[-1].cut()
                async with asyncio.timeout(5):
                    await heard.failure.wait()
                await rig.receivers[0].forget(ticket.ticket_id)
            else:
                await rig.sender.close()
                rig.sender = Sender(rig.source, rig.config, rig.sender._transports)
            async with asyncio.timeout(5):
                await rig.served[-1]
        assert len(rig.carriers) == 50
        await until(
            lambda: (
                not any(thread.name.startswith(("kv-gloo", "kv-nccl", "kv-nixl")) for thread in threading.enumerate())
            )
        )
        after = footprint()
        assert after[0] <= before[0]
        assert after[1] <= before[1]
        assert after[2] - before[2] < 8 << 10


class Process:
    """`beside_peer.py`, given orders and asked for its answers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._unheard: list[str] = []

    @classmethod
    async def start(cls, transport: str, role: str, layout: KVLayout, device: str = "") -> Process:
        arguments = [transport, role, as_argument(layout), *([device] if device else [])]
        program = "tests.kv_transfer.beside_peer"
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", program, *arguments, stdin=pipe, stdout=pipe, cwd=Path(__file__).parents[2]
            )
        )

    def tell(self, *order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write((" ".join(order) + "\n").encode())

    async def hear(self, start: str = "", within_s: float = 60.0) -> str:
        """The next line that begins with ``start``; those before it are kept."""
        assert self._process.stdout is not None
        async with asyncio.timeout(within_s):
            while True:
                for line in self._unheard:
                    if line.startswith(start):
                        self._unheard.remove(line)
                        return line
                line = (await self._process.stdout.readline()).decode()
                assert line, f"the peer ended without {start!r}"
                self._unheard.append(line.strip())

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class ProcessCases:
    """Real processes. For each transport a subclass with its ``name`` and a ``device`` for each process, or ""."""

    name = ""
    devices: tuple[str, ...] = ("", "", "")

    @pytest.fixture
    async def start(self) -> AsyncIterator[Callable[..., Any]]:
        processes: list[Process] = []

        async def new(*roles: str, layouts: Sequence[KVLayout] = ()) -> list[Process]:
            for number, role in enumerate(roles):
                layout = layouts[number] if layouts else LAYOUT_OF_PEERS
                device = self.devices[number % len(self.devices)]
                processes.append(await Process.start(self.name, role, layout, device))
            return processes

        yield new
        for process in processes:
            await process.end()

    async def test_one_dies_one_hangs_the_others_go_on(self, start: Any) -> None:
        """Three senders and one receiver: the first sender is killed half-way and the second stopped, while the
        third hands over; then the receiver is killed while the third is at it."""
        receiver, killed, stopped, steady = await start("receive", "send", "send", "send")
        address = await receiver.hear()
        target, everything = as_argument(LAYOUT_OF_PEERS), ",".join(map(str, range(NUM_BLOCKS)))
        expected = NumpyPool(LAYOUT_OF_PEERS, NUM_BLOCKS)
        fill(expected, range(NUM_BLOCKS), numbers(LAYOUT_OF_PEERS), 0)

        async def hand_over(ticket_id: str) -> None:
            receiver.tell("receive", ticket_id, everything)
            await receiver.hear(f"expecting {ticket_id}")
            steady.tell("send", ticket_id, everything, target, address)
            assert await steady.hear(ticket_id) == f"{ticket_id} sent"
            assert await receiver.hear(ticket_id) == f"{ticket_id} committed"

        for ticket_id, sender in (("dies", killed), ("hangs", stopped)):
            await sender.hear("ready")
            receiver.tell("receive", ticket_id, everything)
            await receiver.hear(f"expecting {ticket_id}")
            sender.tell("begin", ticket_id, everything, target, address)
            await sender.hear(f"{ticket_id} half-way")
        await steady.hear("ready")
        stopped.send_signal(signal.SIGSTOP)
        going_on = asyncio.ensure_future(hand_over("first"))
        killed.send_signal(signal.SIGKILL)
        await going_on
        assert await receiver.hear("dies", within_s=5) == "dies failed worker_lost"
        await hand_over("second")
        receiver.tell("sum", everything)
        assert await receiver.hear() == digest(expected, block_numbers(everything))
        stopped.send_signal(signal.SIGCONT)

        receiver.tell("receive", "last", everything)
        await receiver.hear("expecting last")
        steady.tell("begin", "last", everything, target, address)
        await steady.hear("last half-way")
        receiver.send_signal(signal.SIGKILL)
        steady.tell("send", "after", everything, target, address)
        assert await steady.hear("after", within_s=10) == "after failed worker_lost"

    async def test_a_stopped_receiver_costs_its_lease(self, start: Any) -> None:
        receiver, sender = await start("receive", "send")
        address = await receiver.hear()
        await sender.hear("ready")
        target, everything = as_argument(LAYOUT_OF_PEERS), ",".join(map(str, range(NUM_BLOCKS)))
        for ticket_id in ("before", "during"):
            receiver.tell("receive", ticket_id, everything)
            await receiver.hear(f"expecting {ticket_id}")
        sender.tell("send", "before", everything, target, address)
        assert await sender.hear("before") == "before sent"
        receiver.send_signal(signal.SIGSTOP)
        sender.tell("send", "during", everything, target, address)
        assert await sender.hear("during", within_s=2 * LEASE_S) == "during failed worker_lost"
        receiver.send_signal(signal.SIGCONT)
        assert await receiver.hear("during") == "during failed worker_lost"

    async def test_ranks(self, start: Any) -> None:
        """Each rank of two prefill and two decode workers a process, tensor parallel sizes 1 and 2; block sizes
        differ, too."""
        sources = [rank_layout(LAYOUT_OF_PEERS, size, rank, 16, "float32") for size in (1, 2) for rank in range(size)]
        targets = [rank_layout(LAYOUT_OF_PEERS, size, rank, 32, "float32") for size in (1, 2) for rank in range(size)]
        roles = ["receive"] * len(targets) + ["send"] * len(sources)
        processes = await start(*roles, layouts=[*targets, *sources])
        receivers, senders = processes[: len(targets)], processes[len(targets) :]
        addresses = [await receiver.hear() for receiver in receivers]
        for sender in senders:
            await sender.hear("ready")
        for size in (1, 2):
            blocks = tuple(range(20 * size, 20 * size - 20, -1))
            text = ",".join(map(str, blocks))
            for number, (receiver, target) in enumerate(zip(receivers, targets, strict=True)):
                ticket_id = f"from-{size}-to-{number}"
                receiver.tell("receive", ticket_id, text)
                await receiver.hear(f"expecting {ticket_id}")
                of_size = [place for place, source in enumerate(sources) if source.tp_size == size]
                for rank in sending_heads(sources[of_size[0]], target):
                    senders[of_size[rank]].tell("send", ticket_id, text, as_argument(target), addresses[number])
                assert await receiver.hear(ticket_id) == f"{ticket_id} committed"
                receiver.tell("sum", text)
                expected = NumpyPool(target, NUM_BLOCKS)
                fill(expected, blocks, numbers(LAYOUT_OF_PEERS), 0)
                assert await receiver.hear() == digest(expected, blocks)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  # threads set no events
            await asyncio.sleep(0.01)
