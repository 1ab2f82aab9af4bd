"""A connected socket that does not block, read by one task and written by one, on asyncio or uvloop.

Nothing waits that need not: as long as the socket takes or gives, the loop is not asked, so that a frame
costs two system calls and no more. To let others have their turn is the caller's business. Closed by
either side, it wakes both tasks.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from common.errors import BatonError, WorkerLostError

Part = TypeVar("Part", bytes, memoryview, bytes | memoryview)

LINGER_S = 0.5
"""How long a closed end waits for the other one to have read what was sent last."""


class ClosedHereError(WorkerLostError):
    """`close` was called on this side."""


class Connection:
    """``what`` names it in errors: "a TCP channel", say."""

    def __init__(self, sock: socket.socket, what: str) -> None:
        self.socket = sock
        self._what = what
        self._loop = asyncio.get_running_loop()
        self._over: BatonError | None = None
        self._waiting: dict[str, asyncio.Future[None]] = {}

    @property
    def closed_here(self) -> bool:
        return isinstance(self._over, ClosedHereError)

    async def write(self, parts: Sequence[memoryview | bytes], room: memoryview | None = None) -> None:
        """Sends all of ``parts``, in one message where the socket keeps borders.

        ``room``: as long as all parts but the first together. Those are then not read any more once this waits:
        what is left of them is copied there. Cancelled half-way it ends the connection: nothing could follow half a
        message.
        """
        rest = [part for part in parts if len(part)]
        while rest:
            self.check()
            try:
                sent = self.socket.sendmsg(rest)
            except BlockingIOError:
                if room is not None:
                    rest, room = _moved(rest, room), None
                try:
                    await self._wait("write", self._loop.add_writer, self._loop.remove_writer)
                except asyncio.CancelledError:
                    self.end(WorkerLostError(f"sending on {self._what} was broken off"))
                    raise
                continue
            except OSError as error:
                raise self._lose(error) from error
            rest = _after(rest, sent)

    async def fill(self, parts: Sequence[memoryview], live: Callable[[], bool] | None = None) -> int:
        """Receives into all of ``parts``. Returns how many bytes are left, when ``live`` says no meanwhile: it is
        asked before each write. Raises WorkerLostError when the connection ends before.
        """
        rest = [part for part in parts if len(part)]
        while rest:
            if live is not None and not live():
                return sum(map(len, rest))
            count = self.read_now(rest)
            if count is None:
                await self.readable()
            elif count == 0:
                raise WorkerLostError(f"{self._what} ended in the middle of a frame")
            else:
                rest = _after(rest, count)
        return 0

    def read_now(self, parts: Sequence[memoryview]) -> int | None:
        """How many bytes were received into ``parts``, 0 at the end; None when there are none right now."""
        self.check()
        try:
            return self.socket.recv_into(parts[0]) if len(parts) == 1 else self.socket.recvmsg_into(parts)[0]
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._lose(error) from error

    async def readable(self) -> None:
        """Returns when `read_now` will have something to say. Raises what the connection ended with."""
        await self._wait("read", self._loop.add_reader, self._loop.remove_reader)

    def check(self) -> None:
        """Raises what the connection ended with."""
        if self._over is not None:
            raise self._over

    def end(self, error: BatonError) -> None:
        """Both tasks hear ``error``. Nothing happens when it is over already."""
        if self._over is None:
            self._stop(error)
            self.socket.close()

    async def close(self, *, linger: bool = False) -> None:
        """``linger``: what was sent last must still reach the peer (TCP forgets it when something unread is left)."""
        if self._over is not None:
            return
        self._stop(ClosedHereError(f"{self._what} is closed"))
        try:
            if linger:
                with suppress(OSError):  # TimeoutError included
                    self.socket.shutdown(socket.SHUT_WR)
                    async with asyncio.timeout(LINGER_S):
                        while await self._loop.sock_recv(self.socket, 1 << 20):
                            pass
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        finally:
            self.socket.close()

    def _stop(self, error: BatonError) -> None:
        self._over = error.with_traceback(None)
        self._loop.remove_reader(self.socket)
        self._loop.remove_writer(self.socket)
        for future in self._waiting.values():
            _wake(future)

    async def _wait(self, what: str, add: Callable[..., Any], remove: Callable[..., Any]) -> None:
        self.check()
        future = self._waiting[what] = self._loop.create_future()
        add(self.socket, _wake, future)
        try:
            await future
        finally:
            del self._waiting[what]
            if self._over is None:
                remove(self.socket)
        self.check()

    def _lose(self, error: OSError) -> BatonError:
        lost = WorkerLostError(f"the peer of {self._what} is gone: {error.strerror or error}")
        self.end(lost)
        return lost


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _after(parts: Sequence[Part], count: int) -> list[Part]:
    """What is left of ``parts`` behind their first ``count`` bytes."""
    done = 0
    while done < len(parts) and count >= len(parts[done]):
        count -= len(parts[done])
        done += 1
    rest = list(parts[done:])
    if count:
        rest[0] = rest[0][count:]
    return rest


def _moved(parts: list[memoryview | bytes], room: memoryview) -> list[memoryview | bytes]:
    """``parts`` with all that `write` must not read any more copied to ``room``."""
    head = parts[:1] if sum(map(len, parts)) > len(room) else []
    start = end = len(room) - sum(map(len, parts[len(head) :]))
    for part in parts[len(head) :]:
        room[end : end + len(part)] = part
        end += len(part)
    return [*head, room[start:]]
