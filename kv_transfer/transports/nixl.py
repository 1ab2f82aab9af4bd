"""NIXL: whatever it finds between two machines (RDMA, …) moves the payloads. Optional: `pip install baton[nixl]`.

    sender                                              receiver
      its staging area registered                         its staging area registered
      entry "agent": how to reach and read it ──────────▶
      header of a piece ───────── carrier ──────────────▶ posts a READ of the same place
      ◀══════════════════ bytes ═══════════════════════   polls until it is complete
      polls for it ◀════════ notification ═════════════

The receiver reads: so it alone knows when bytes are there, with no message needed, and nobody writes into its
memory. The sender has no part in that but to keep NIXL going while pieces are under way (over TCP, reads are
answered by the other end's polling), which its thread does until the notification comes.

Each channel has an agent of its own: what happens to one is no other's business, and agents need no locks.
NIXL's progress thread stays off, it would spin; polling here backs off to `LONGEST_PAUSE_S`, and stops when
nothing is under way.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from common.errors import HandoffError, WorkerLostError
from kv_transfer.channel import Connector
from kv_transfer.transports.joining import JOIN_S, BesideTransport, Meeting

OPERATION_S = 10.0
"""How long one piece may take on its way."""
CLOSE_S = 0.3
MAX_LEFT_BEHIND = 8
"""UCX aborts the process when an agent is destroyed whose peer went away in the middle of a read. Such agents are
kept; when there are so many, this process uses other transports."""
SHORTEST_PAUSE_S = 2e-5
LONGEST_PAUSE_S = 1e-3

_AGENT = "agent"
_ADDRESS = struct.Struct("<Q")
_READ = b"read"


log = logging.getLogger(__name__)

_left_behind: list[object] = []


def nixl_is_available() -> bool:
    """Whether the package is there; it is loaded when the first channel is made."""
    return importlib.util.find_spec("nixl") is not None


class Nixl(BesideTransport):
    """The Transport."""

    def __init__(
        self, address: str, connector: Connector, capacity_bytes: int, operation_s: float = OPERATION_S
    ) -> None:
        def make(meeting: Meeting) -> NixlReader | NixlServer:
            if len(_left_behind) >= MAX_LEFT_BEHIND:
                raise WorkerLostError(f"{MAX_LEFT_BEHIND} broken NIXL agents are held already: no more are made")
            return (NixlServer if meeting.is_sender else NixlReader)(meeting, operation_s)

        super().__init__("nixl", address, connector, capacity_bytes, _versions, make)


class _Agent:
    """An agent and its registered staging area."""

    def __init__(self, meeting: Meeting) -> None:
        # It writes to standard output otherwise, which in a worker's process belongs to others.
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        nixl = importlib.import_module("nixl")
        self._interrupted = False
        self._staging = meeting.staging
        self._start: int = meeting.staging.ctypes.data
        settings = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self.agent: Any = nixl.nixl_agent(f"{meeting.epoch.hex()}-{meeting.rank}", settings)
        region = self.agent.get_reg_descs([(self._start, len(meeting.staging), 0, "")], "DRAM")
        self._registered: Any = self.agent.register_memory(region)

    def place(self, start: int, offset: int, num_bytes: int) -> Any:
        return self.agent.get_xfer_descs([(start + offset, num_bytes, 0)], "DRAM")

    def poll(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Asks until it is so, with pauses. Raises WorkerLostError when that takes longer than ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        pause_s = SHORTEST_PAUSE_S
        while not is_done():
            if self._interrupted:
                raise WorkerLostError("this NIXL channel is closed")
            if time.monotonic() > deadline:
                raise WorkerLostError(f"NIXL did not move a piece within {timeout_s} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def interrupt(self) -> None:
        self._interrupted = True

    def close(self) -> None:
        self.agent.deregister_memory(self._registered)
        self.agent = None


class NixlServer(_Agent):
    """The sender's Mover: it lets the staging area be read. Operations are the reads' numbers."""

    def __init__(self, meeting: Meeting, operation_s: float) -> None:
        super().__init__(meeting)
        self._operation_s = operation_s
        self._posted = 0
        self._read = 0
        token = np.frombuffer(meeting.epoch, dtype=np.uint8)
        meeting.staging[: len(token)] = token
        meeting.entries.set(_AGENT, _ADDRESS.pack(self._start) + self.agent.get_agent_metadata())
        self._await_read(1, JOIN_S)
        self._read = 0

    def post(self, offset: int, num_bytes: int) -> int:
        del offset, num_bytes  # the receiver hears them
        self._posted += 1
        return self._posted

    def wait(self, operation: int) -> None:
        self._await_read(operation, self._operation_s)

    def close(self) -> None:
        """Lets the peer end what it has begun to read."""
        self._interrupted = False
        try:
            self._await_read(self._posted, CLOSE_S)
        except WorkerLostError:
            pass  # it will not, or never heard of it
        super().close()

    def _await_read(self, number: int, timeout_s: float) -> None:
        def has_been_read() -> bool:
            if self._read < number:
                self._read += sum(map(len, self.agent.get_new_notifs().values()))
            return self._read >= number

        self.poll(has_been_read, timeout_s)


class NixlReader(_Agent):
    """The receiver's Mover: it reads the sender's staging area into its own."""

    def __init__(self, meeting: Meeting, operation_s: float) -> None:
        super().__init__(meeting)
        self._operation_s = operation_s
        self._under_way: list[Any] = []
        told = meeting.entries.get(_AGENT, JOIN_S)
        if len(told) <= _ADDRESS.size:
            raise HandoffError(f"an agent is told in more than {_ADDRESS.size} bytes, got {len(told)}")
        (self._peer_start,) = _ADDRESS.unpack_from(told)
        self._peer: str = self.agent.add_remote_agent(told[_ADDRESS.size :])
        self.wait(self.post(0, len(meeting.epoch)))
        if meeting.staging[: len(meeting.epoch)].tobytes() != meeting.epoch:
            raise WorkerLostError("a stranger is at the other end of a new NIXL channel")

    def post(self, offset: int, num_bytes: int) -> Any:
        here, there = self.place(self._start, offset, num_bytes), self.place(self._peer_start, offset, num_bytes)
        reading = self.agent.initialize_xfer("READ", here, there, self._peer, _READ)
        self._under_way.append(reading)
        self._check(self.agent.transfer(reading))
        return reading

    def wait(self, operation: Any) -> None:
        self.poll(lambda: self._check(self.agent.check_xfer_state(operation)), self._operation_s)
        self._under_way.remove(operation)
        self.agent.release_xfer_handle(operation)

    def close(self) -> None:
        """An agent must not go while it reads: it waits for what is under way, and stays when that does not end."""
        self._interrupted = False
        try:
            while self._under_way:
                self.poll(lambda: self._check(self.agent.check_xfer_state(self._under_way[0])), CLOSE_S)
                self.agent.release_xfer_handle(self._under_way.pop(0))
        except Exception as error:  # a library's: whatever it says of a lost peer
            log.warning("a NIXL agent is left behind, with its staging area: %r", error)
            _left_behind.append(self)
            return
        self.agent.remove_remote_agent(self._peer)
        super().close()

    def _check(self, state: str) -> bool:
        if state == "ERR":
            raise WorkerLostError("NIXL cannot read from the peer")
        return state == "DONE"


def _versions() -> str:
    return f"nixl {'.'.join(importlib.metadata.version('nixl').split('.')[:2])}"
