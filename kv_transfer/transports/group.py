"""`torch.distributed` point to point, in a group of two that lives as long as its channel: gloo, or NCCL.

A group is known to nobody but its two ends: it is not registered, is no default, shares no socket and no
thread with another. When an operation fails or takes longer than `OPERATION_S` the whole group is dropped, by
the thread that used it, and the staging area it may still write to is kept until then; the next handoff makes
a new one (`joining.py`).

A group's members tell each other through a store where they listen, and, with NCCL, the secret that lets
them in. PyTorch's own is a TCP server that believes everybody; `CarriedStore` has no port: what one end sets
travels over the authenticated carrier to the other.

With NCCL the two staging areas are in device memory, and `GroupMover` copies between them and the host's, which
is what pools read and write. A pool on a device could hand out device memory here and save those copies.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from torch import distributed

from common.errors import WorkerLostError
from kv_transfer.channel import Connector
from kv_transfer.transports.joining import JOIN_S, BesideTransport, Entries, Meeting

Backend = Literal["gloo", "nccl"]

OPERATION_S = 10.0
"""How long one piece may take on its way."""


class Group(BesideTransport):
    """The Transport. gloo listens at the host of ``address``. ``device``: for NCCL, None for the current one."""

    def __init__(
        self,
        backend: Backend,
        address: str,
        connector: Connector,
        capacity_bytes: int,
        operation_s: float = OPERATION_S,
        device: int | None = None,
    ) -> None:
        make = partial(GroupMover, backend, operation_s=operation_s, device=device)
        super().__init__(backend, address, connector, capacity_bytes, partial(_versions, backend), make)


class GroupMover:
    """A Mover over a new group: rank 0 sends from the staging area, rank 1 receives into it."""

    def __init__(
        self, backend: Backend, meeting: Meeting, operation_s: float = OPERATION_S, device: int | None = None
    ) -> None:
        self._peer = 1 - meeting.rank
        self._is_sender = meeting.is_sender
        self._timeout = timedelta(seconds=operation_s)
        self._host = torch.from_numpy(meeting.staging)
        self._device: torch.Tensor | None = None
        store = CarriedStore(meeting.entries, JOIN_S)
        self._group: Any
        if backend == "nccl":
            if device is not None:
                torch.cuda.set_device(device)  # of this thread
            self._device = torch.empty(len(meeting.staging), dtype=torch.uint8, device="cuda")
            self._group = distributed.ProcessGroupNCCL(store, meeting.rank, 2, timedelta(seconds=JOIN_S))
        else:
            self._group = _gloo(store, meeting.rank, meeting.own_host())
        self._greet(meeting.epoch)

    def post(self, offset: int, num_bytes: int) -> tuple[Any, slice]:
        place = slice(offset, offset + num_bytes)
        if self._device is None:
            return self._move(self._host[place]), place
        if self._is_sender:
            self._device[place].copy_(self._host[place])
        return self._move(self._device[place]), place

    def wait(self, operation: tuple[Any, slice]) -> None:
        work, place = operation
        if not work.wait(self._timeout):
            raise WorkerLostError(f"a piece did not get through within {self._timeout.total_seconds()} s")
        if self._device is not None and not self._is_sender:
            self._host[place].copy_(self._device[place])

    def interrupt(self) -> None:
        """gloo has no way: an operation ends with the peer's connection, or its time. NCCL's must not be tried."""

    def close(self) -> None:
        if self._device is not None:
            self._group.abort()
        self._group = None  # gloo closes its connection with the last reference

    def _move(self, tensor: torch.Tensor) -> Any:
        move = self._group.send if self._is_sender else self._group.recv
        return move([tensor], self._peer, 0)

    def _greet(self, epoch: bytes) -> None:
        """Shows that the group works, and that at its other end is who is at the carrier's."""
        token = torch.frombuffer(bytearray(epoch), dtype=torch.uint8)
        said = token if self._is_sender else torch.zeros_like(token)
        if self._device is not None:
            said = said.to(self._device.device)
        if not self._move(said).wait(timedelta(seconds=JOIN_S)):
            raise WorkerLostError(f"a new group did not work within {JOIN_S} s")
        if not torch.equal(said.cpu(), token):
            raise WorkerLostError("a stranger is at the other end of a new group")


class CarriedStore(distributed.Store):
    """The store of a group, as its threads call it, over what travels on the carrier."""

    def __init__(self, entries: Entries, timeout_s: float) -> None:
        super().__init__()
        self._entries = entries
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        self._entries.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._entries.get(key, self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._entries.get(key, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        return all(key in self._entries for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()


def is_available(backend: Backend) -> bool:
    if backend == "nccl":
        return distributed.is_available() and distributed.is_nccl_available() and torch.cuda.is_available()
    return distributed.is_available() and distributed.is_gloo_available()


def _gloo(store: distributed.Store, rank: int, host: str) -> Any:
    """Returns when the other rank has come."""
    options: Any = distributed.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=JOIN_S)
    options._threads = 1  # for collectives, of which there are none
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    return distributed.ProcessGroupGloo(store, rank, 2, options)


def _versions(backend: Backend) -> str:
    """A release's groups understand each other, whatever they were built for."""
    versions = f"torch {'.'.join(torch.__version__.split('+')[0].split('.')[:2])}"
    if backend == "nccl":
        versions += f", nccl {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return versions
