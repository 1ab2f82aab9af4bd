"""The seam that a transport fills in: how a pair of workers gets a channel for its handoffs.

    receiver                                         sender
      listen(serve) -> address, put into offers
                                                       reaches(offer)?
                                                       connect(offer.address) -> its end of a channel
      serve(other end of the channel)

What then goes over the channel is the session's business and the same for all (`session.py`).
Transports that ride on a byte channel which the worker's server accepts (`transports/carried.py`)
have `accept` instead of a listener of their own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from common.handoff import TransportOffer
from kv_transfer.channel import ByteChannel, FrameChannel

Serve = Callable[[FrameChannel], Awaitable[None]]
"""Serves a channel until it ends, and closes it."""


class Transport(Protocol):
    """One worker's end of one way to move KV. Made by the composition roots (`transports/available.py`)."""

    @property
    def name(self) -> str:
        """As in ``transfer.transports``."""
        ...

    def reaches(self, offer: TransportOffer) -> bool:
        """Whether `connect` may work for an offer of this name; no more is known without trying."""
        ...

    async def listen(self, serve: Serve) -> str | None:
        """Lets senders in from now on. Returns the address for offers, None where this worker cannot."""
        ...

    async def connect(self, address: str) -> FrameChannel:
        """A channel to the address of an offer. Raises WorkerLostError when nobody answers there or this
        transport does not work between the two (the next one is tried), other BatonErrors when the peer
        refuses (none is).
        """
        ...

    async def close(self) -> None:
        """Ends `listen`; called by the receiver that began it. Channels are closed by those who have them."""
        ...


@runtime_checkable
class CarriedTransport(Transport, Protocol):
    """A transport whose channels begin as byte channels that somebody else accepts."""

    async def accept(self, carrier: ByteChannel) -> FrameChannel:
        """The receiver's end over a carrier whose hello has been read (`transports/carried.py`).

        Raises WorkerLostError or HandoffError.
        """
        ...
