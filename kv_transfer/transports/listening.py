"""Accepts connections on a socket of a transport's own, and serves the channels that come of them.

Who may come in is the transport's decision (its ``welcome``); knows neither frames nor secrets.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from common.errors import HandoffError, WorkerLostError
from common.lifecycle import Tasks
from kv_transfer.channel import FrameChannel
from kv_transfer.transport import Serve

log = logging.getLogger(__name__)

_ACCEPT_PAUSE_S = 0.2

BACKLOG = 1024
"""A whole fleet may come at once, after a restart say. Whom the kernel has no place for tries again a second later
over TCP, and is not let in at all over a Unix socket."""

Welcome = Callable[[socket.socket], Awaitable[FrameChannel]]
"""The channel over a new connection. Raises OSError, WorkerLostError or HandoffError for one that is refused."""


class SocketListener:
    """``sock`` is bound and does not block; ``name`` is the transport's."""

    def __init__(self, name: str, sock: socket.socket, welcome: Welcome, serve: Serve) -> None:
        self._name = name
        self._socket = sock
        self._welcome = welcome
        self._serve = serve
        self._tasks = Tasks()
        self._accepted: dict[int, socket.socket] = {}
        """Connections whose task has not begun; one cancelled before that cannot close its own."""
        self._socket.listen(BACKLOG)

    def start(self) -> None:
        self._tasks.spawn(self._accept(), f"kv {self._name} accept")

    async def close(self) -> None:
        await self._tasks.close()
        for sock in (*self._accepted.values(), self._socket):
            sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # out of descriptors, say: others have to end first
                log.warning("cannot accept a %s connection: %s", self._name, error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            self._accepted[sock.fileno()] = sock
            self._tasks.spawn(self._admit(sock), f"kv {self._name} channel")

    async def _admit(self, sock: socket.socket) -> None:
        del self._accepted[sock.fileno()]
        try:
            channel = await self._welcome(sock)
        except (OSError, WorkerLostError, HandoffError) as error:  # TimeoutError included
            log.warning("refused a %s connection: %s", self._name, error)
            sock.close()
            return
        except BaseException:
            sock.close()
            raise
        try:
            await self._serve(channel)
        finally:
            await channel.close()
