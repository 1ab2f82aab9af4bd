"""The links without Baton: the bytes of one array of this process into one array of the peer.

``tcp``: `sendall` and `recv_into` on a plain socket. ``shm``: two `memcpy`, through a ring of shared memory
that both ends work at. ``local``: one `memcpy`. gRPC's is in `rpc/raw_stream.py`, gloo's in
`kv_transfer/raw_group.py`, NIXL's in `raw_nixl.py`. A round ends when the receiver has said that all is there.
Blocking calls, for a thread.
"""

from __future__ import annotations

import mmap
import os
import socket
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

DONE = b"!"
SLOT_BYTES = 1 << 20
NUM_SLOTS = 8


def send_tcp(sock: socket.socket, source: Bytes) -> None:
    sock.sendall(source.data)
    _hear(sock)


def receive_tcp(sock: socket.socket, target: Bytes) -> None:
    view, got = target.data, 0
    while got < len(view):
        count = sock.recv_into(view[got:])
        if count == 0:
            raise ConnectionResetError("the raw link ended")
        got += count
    sock.sendall(DONE)


class SharedRing:
    """`NUM_SLOTS` slots of a memory file, and a socket on which each end says how many more it has filled or freed."""

    def __init__(self, descriptor: int, sock: socket.socket) -> None:
        os.ftruncate(descriptor, SLOT_BYTES * NUM_SLOTS)
        self._memory: Bytes = np.frombuffer(mmap.mmap(descriptor, SLOT_BYTES * NUM_SLOTS), dtype=np.uint8)
        self._socket = sock

    def send(self, source: Bytes) -> None:
        free = NUM_SLOTS
        for number, start in enumerate(range(0, len(source), SLOT_BYTES)):
            if free == 0:
                free += self._hear()
            part = source[start : start + SLOT_BYTES]
            np.copyto(self._slot(number, len(part)), part)
            free -= 1
            self._socket.sendall(DONE)
        while free < NUM_SLOTS:
            free += self._hear()

    def receive(self, target: Bytes) -> None:
        filled = 0
        for number, start in enumerate(range(0, len(target), SLOT_BYTES)):
            if filled == 0:
                filled += self._hear()
            part = target[start : start + SLOT_BYTES]
            np.copyto(part, self._slot(number, len(part)))
            filled -= 1
            self._socket.sendall(DONE)

    def _slot(self, number: int, num_bytes: int) -> Bytes:
        start = number % NUM_SLOTS * SLOT_BYTES
        return self._memory[start : start + num_bytes]

    def _hear(self) -> int:
        said = self._socket.recv(NUM_SLOTS)
        if not said:
            raise ConnectionResetError("the raw link ended")
        return len(said)


def _hear(sock: socket.socket) -> None:
    if sock.recv(1) != DONE:
        raise ConnectionResetError("the raw link ended")
