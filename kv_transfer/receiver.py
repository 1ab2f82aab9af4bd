"""The receiving side of the handoff seam (KVReceiver): lets senders write into reserved blocks.

    receiver = Receiver(pool, config.transfer, host_id(), transports)
    await receiver.start()                          # senders may come, `offers` says how
    await receiver.serve(channel)                   # the worker's server does, for each byte channel that comes in
    receiver.expect(ticket, listener)

One coroutine serves one channel and takes its frames in order; tickets are shared by all channels.
What is wrong with one ticket ends that ticket's stream, what is wrong with the frames themselves ends
the channel. Knows nothing of why blocks were reserved.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from common.config import TransferConfig
from common.errors import BatonError, HandoffError, TicketError, WorkerLostError
from common.failpoints import Failpoints
from common.handoff import HandoffReceipt, Ticket, TransferCounters, TransportOffer
from common.lifecycle import Tasks
from kv_transfer.arrival import CORRUPT, Arrival, ArrivalListener, Opening, check_ticket
from kv_transfer.blocking import CopyThread, RunBlocking
from kv_transfer.channel import ByteChannel, DirectFrames, FrameChannel
from kv_transfer.frames import Abort, Commit, Error, Frame, Missing, Open, OpenAck, Piece, PieceAck, Receipt
from kv_transfer.pool import BlockPool
from kv_transfer.transport import CarriedTransport, Transport
from kv_transfer.transports.carried import read_hello

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0


class Receiver:
    """A KVReceiver. ``transports`` in order of preference. ``run_blocking`` runs the copies into the pool
    (default: a thread of its own). ``failpoints``: of the worker; `receive` and `receipt` are passed here.
    """

    def __init__(
        self,
        pool: BlockPool,
        config: TransferConfig,
        host_id: str,
        transports: Sequence[Transport],
        run_blocking: RunBlocking | None = None,
        failpoints: Failpoints | None = None,
    ) -> None:
        self.counters = TransferCounters()
        self._pool = pool
        self._config = config
        self._host_id = host_id
        self._thread = CopyThread("kv-receive")
        self._run_blocking: RunBlocking = run_blocking or self._thread
        self.failpoints = failpoints or Failpoints()
        self._arrivals: dict[str, Arrival] = {}
        self._transports = tuple(transports)
        self._offers: list[TransportOffer] = []
        self._tasks = Tasks()

    async def start(self) -> None:
        """Lets senders in over each transport that works here."""
        for transport in self._transports:
            address = await transport.listen(self.serve_frames)
            if address is not None:
                self._offers.append(TransportOffer(transport.name, address, self._host_id))

    @property
    def offers(self) -> tuple[TransportOffer, ...]:
        """The ways in, in order of preference."""
        return tuple(self._offers)

    def expect(self, ticket: Ticket, listener: ArrivalListener) -> None:
        """Accepts writes under ``ticket`` from now on. Raises LayoutMismatchError or TicketError."""
        if ticket.ticket_id in self._arrivals:
            raise TicketError(f"ticket {ticket.ticket_id} is expected already")
        check_ticket(ticket, self._pool.layout)
        self._arrivals[ticket.ticket_id] = Arrival(ticket, listener, self._config.wire_formats, self._config.retries)

    async def forget(self, ticket_id: str) -> None:
        """Refuses the ticket from now on; its sender is told. Returns when no write touches the pool
        any more. Harmless for unknown tickets.
        """
        arrival = self._arrivals.pop(ticket_id, None)
        if arrival is None:
            return
        for opening in arrival.withdraw():
            error = TicketError(f"ticket {ticket_id} was withdrawn by the receiver")
            self._tasks.spawn(opening.line.refuse(opening, error), "kv refuse")
        await arrival.settled()

    async def serve(self, channel: ByteChannel) -> None:
        """Serves one incoming byte channel until it ends, and closes it. Raises HandoffError when it is
        for no transport of this worker.
        """
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                name = await read_hello(channel)
                if not name:
                    return
                frames = await self._carried(name).accept(channel)
        except TimeoutError:
            raise HandoffError(f"a KV channel has to say what it is for within {HELLO_TIMEOUT_S} s") from None
        except BaseException:
            await channel.close()
            raise
        await self.serve_frames(frames)

    async def serve_frames(self, channel: FrameChannel) -> None:
        """Serves one incoming channel of frames until it ends, and closes it."""
        await _ServedChannel(self, channel).run()

    async def close(self) -> None:
        """Refuses everything from now on; no write touches the pool after it returns."""
        for transport in self._transports:
            await transport.close()
        for ticket_id in list(self._arrivals):
            await self.forget(ticket_id)
        await self._tasks.close()
        self._thread.close()

    def _carried(self, name: str) -> CarriedTransport:
        for transport in self._transports:
            if transport.name == name and isinstance(transport, CarriedTransport):
                return transport
        known = ", ".join(transport.name for transport in self._transports)
        raise HandoffError(f"this worker has no transport {name!r} on a KV channel; it has {known}")

    # for the channels

    def arrival(self, frame: Open) -> Arrival:
        """The ticket that ``frame`` may open. Raises TicketError."""
        arrival = self._arrivals.get(frame.ticket_id)
        if arrival is None:
            raise TicketError(f"ticket {frame.ticket_id} is not known here: it has ended or expired, or never was")
        arrival.check_secret(frame.secret)
        return arrival

    async def write(
        self, arrival: Arrival, opening: Opening, channel: FrameChannel, direct: DirectFrames | None, piece: Piece
    ) -> None:
        """Puts a piece into the pool if its ticket is live and it verifies. ``direct``: the channel, if it can do
        without a copy. Raises HandoffError when it is none of the ticket's.
        """
        num_bytes = arrival.payload_bytes(opening, piece)
        fresh: int | None = None
        views = arrival.views(opening, piece, self._pool) if direct is not None else None
        if direct is not None and views is not None:
            if await direct.receive_parts(piece, views, lambda: arrival.accepts(opening)):
                fresh = arrival.written(opening, piece, views, self._config.verify)
        elif num_bytes is not None:
            payload = await channel.payload(piece, num_bytes)
            fresh = await arrival.write(opening, piece, payload, self._pool, self._config.verify, self._run_blocking)
        if fresh is None:
            self.counters.stale += piece.count
        elif fresh == CORRUPT:
            self.counters.corrupt += piece.count
            log.warning(
                "layer %d, blocks %d to %d of ticket %s do not verify",
                piece.layer,
                piece.first,
                piece.first + piece.count,
                arrival.ticket.ticket_id,
            )
        else:
            self.counters.pieces += fresh
            self.counters.num_bytes += fresh * (num_bytes or 0) // piece.count
            self.counters.duplicates += piece.count - fresh

    @property
    def verifies(self) -> bool:
        return self._config.verify


class _ServedChannel:
    """One incoming channel and the streams that are open on it."""

    def __init__(self, receiver: Receiver, channel: FrameChannel) -> None:
        self._receiver = receiver
        self._counters = receiver.counters
        self._channel = channel
        self._direct = channel if isinstance(channel, DirectFrames) else None
        self._streams: dict[int, tuple[Opening, Arrival]] = {}
        self._sending = asyncio.Lock()

    async def run(self) -> None:
        error: BatonError = WorkerLostError("the sender's channel ended before its commit")
        try:
            while (frame := await self._channel.receive()) is not None:
                await self._handle(frame)
        except WorkerLostError as lost:
            error = lost
        except BatonError as broken:
            error = broken
            log.warning("a transfer channel is closed: %s", broken)
            await self._say_if_possible(Error(0, broken.code, broken.message))
        finally:
            for stream in list(self._streams):
                self._fail(stream, error)
            await self._channel.close()

    async def refuse(self, opening: Opening, error: BatonError) -> None:
        """Tells the sender that ``opening`` is over."""
        self._streams.pop(opening.stream, None)
        await self._say_if_possible(Error(opening.stream, error.code, error.message))

    async def _handle(self, frame: Frame) -> None:
        match frame:
            case Piece():
                await self._take_piece(frame)
            case Open() | Commit() | Abort():
                try:
                    answer = self._answer(frame)
                except BatonError as error:
                    answer = self._refuse(frame.stream, error)
                except Exception as error:  # the top of this handoff: its neighbours go on
                    log.exception("a handoff broke down")
                    answer = self._refuse(frame.stream, HandoffError(f"the receiver broke down: {error!r}"))
                if isinstance(answer, Receipt) and self._receiver.failpoints:
                    await self._receiver.failpoints.reach("receipt")
                if answer is not None:
                    await self._say(answer)
            case _:
                raise HandoffError(f"a sender does not send {type(frame).__name__} frames")

    def _refuse(self, stream: int, error: BatonError) -> Error:
        self._fail(stream, error)
        return Error(stream, error.code, error.message)

    def _answer(self, frame: Open | Commit | Abort) -> Frame | None:
        match frame:
            case Open():
                return self._open(frame)
            case Commit():
                if frame.stream not in self._streams:
                    raise TicketError(f"stream {frame.stream} is over, its commit comes too late")
                opening, arrival = self._streams[frame.stream]
                answer = arrival.commit(opening, frame)
                if not isinstance(answer, HandoffReceipt):
                    return Missing(frame.stream, tuple(answer))
                del self._streams[frame.stream]
                self._counters.handoffs += 1
                return Receipt(frame.stream, answer.num_pieces, answer.num_bytes)
            case Abort():
                self._fail(frame.stream, HandoffError(f"the sender gave up: {frame.reason}"))
                return None

    def _open(self, frame: Open) -> OpenAck:
        if frame.stream == 0 or frame.stream in self._streams:
            raise HandoffError(f"stream {frame.stream} cannot be opened, it is in use on this channel")
        arrival = self._receiver.arrival(frame)
        rank = frame.layout.tp_rank
        opening = Opening(self, frame.stream, rank)
        earlier = [stream for stream, (other, of) in self._streams.items() if of is arrival and other.tp_rank == rank]
        try:
            agreed = arrival.open(opening, frame, replace=bool(earlier))
        except TicketError:
            raise
        except HandoffError as error:  # it has the secret: this handoff will not come about
            arrival.refuse(error)
            raise
        for stream in earlier:
            del self._streams[stream]
        self._streams[frame.stream] = opening, arrival
        return OpenAck(frame.stream, self._receiver.verifies, agreed.wire)

    async def _take_piece(self, piece: Piece) -> None:
        refusal: BatonError | None = None
        if piece.stream in self._streams:
            opening, arrival = self._streams[piece.stream]
            try:
                if self._receiver.failpoints:
                    await self._receiver.failpoints.reach("receive")
                await self._receiver.write(arrival, opening, self._channel, self._direct, piece)
            except BatonError as error:
                refusal = error.with_traceback(None)  # whoever keeps it would keep the staging memory
            except Exception as error:  # the top of this handoff: its neighbours go on
                log.exception("a piece cannot be written into the pool")
                refusal = HandoffError(f"the piece cannot be written into the receiver's pool: {error!r}")
        else:
            self._counters.stale += piece.count
        await self._say(PieceAck(piece.sequence))
        if refusal is not None:
            self._fail(piece.stream, refusal)
            await self._say(Error(piece.stream, refusal.code, refusal.message))

    def _fail(self, stream: int, error: BatonError) -> None:
        """Ends a stream without a commit. Nothing happens when it is over already."""
        if stream in self._streams:
            opening, arrival = self._streams.pop(stream)
            self._counters.failures += 1
            arrival.fail(opening, error)

    async def _say(self, frame: Frame) -> None:
        async with self._sending:
            await self._channel.send(frame)

    async def _say_if_possible(self, frame: Frame) -> None:
        try:
            await self._say(frame)
        except WorkerLostError:
            pass
