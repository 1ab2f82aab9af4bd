"""NIXL without Baton: one READ of all of the sender's array, straight into the receiver's.

    sender                                                receiver
      "new": its array is registered, and lies … ─ socket ─▶ registers its own, prepares the READ (once an array)
      "go" ───────────────────────────────────── socket ─▶ READ
      ◀───────────────────────────────────── notification    done

Both ends ask without a pause, as NIXL's own examples do. Blocking calls, for a thread.
"""

from __future__ import annotations

import importlib
import os
import secrets
import socket
import struct
from typing import Any

from bench.transfer.raw import Bytes

_NEW, _GO, _DONE_NOTE = b"n", b"g", b"done"
_PLACE = struct.Struct("<QI")
"""Where the array begins, and how long the agent's metadata is that follows."""


class RawNixl:
    """One end of a link between two agents that introduce each other over ``sock``, which blocks."""

    def __init__(self, sock: socket.socket) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        nixl = importlib.import_module("nixl")
        settings = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = nixl.nixl_agent(secrets.token_hex(8), settings)
        self._socket = sock
        self._array: Bytes | None = None
        self._registered: Any = None
        self._peer = ""
        self._peer_start = 0
        self._reading: Any = None

    def send(self, source: Bytes) -> None:
        """Returns when the other end has all of ``source``, uint8 [bytes]."""
        if source is not self._array:
            self._register(source)
            told = self._agent.get_agent_metadata()
            self._socket.sendall(_NEW + _PLACE.pack(source.ctypes.data, len(told)) + told)
        self._socket.sendall(_GO)
        while not self._agent.get_new_notifs():
            pass

    def receive(self, target: Bytes) -> None:
        order = self._exactly(1)
        if order == _NEW or target is not self._array:
            self._release()
        if target is not self._array:
            self._register(target)
        if order == _NEW:
            if self._peer:
                self._agent.remove_remote_agent(self._peer)
            self._peer_start, length = _PLACE.unpack(self._exactly(_PLACE.size))
            self._peer = self._agent.add_remote_agent(self._exactly(length))
            order = self._exactly(1)
        if self._reading is None:
            here, there = (self._place(start, len(target)) for start in (target.ctypes.data, self._peer_start))
            self._reading = self._agent.initialize_xfer("READ", here, there, self._peer, _DONE_NOTE)
        state = self._agent.transfer(self._reading)
        while state != "DONE":
            if state == "ERR":
                raise ConnectionError("NIXL cannot read from the peer")
            state = self._agent.check_xfer_state(self._reading)

    def close(self) -> None:
        self._release()
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
        self._agent = None

    def _register(self, array: Bytes) -> None:
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
        region = self._agent.get_reg_descs([(array.ctypes.data, len(array), 0, "")], "DRAM")
        self._registered, self._array = self._agent.register_memory(region), array

    def _release(self) -> None:
        if self._reading is not None:
            self._agent.release_xfer_handle(self._reading)
            self._reading = None

    def _place(self, start: int, num_bytes: int) -> Any:
        return self._agent.get_xfer_descs([(start, num_bytes, 0)], "DRAM")

    def _exactly(self, num_bytes: int) -> bytes:
        got = b""
        while len(got) < num_bytes:
            more = self._socket.recv(num_bytes - len(got))
            if not more:
                raise ConnectionResetError("the raw link ended")
            got += more
        return got
