"""A bare gloo group of two processes and nothing on top: the measure for `transports/group.py`.

They meet through PyTorch's own store, which believes everybody: for measurements on one machine.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from kv_transfer.channel import Bytes

TIMEOUT = timedelta(seconds=20)
"""Of each operation. A send that crosses the peer's death waits so long: gloo does not tell it."""


class Meeting:
    """Where the two find each other. The one that begins takes a free ``port`` of ``host``."""

    def __init__(self, host: str, port: int = 0) -> None:
        self.host = host
        self._store = distributed.TCPStore(host, port, 2, port == 0, TIMEOUT, wait_for_workers=False)
        self.port: int = self._store.port

    def group(self, rank: int) -> Any:
        """Returns when the other one has come."""
        options: Any = distributed.ProcessGroupGloo._Options()
        options._timeout = TIMEOUT
        options._threads = 1
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=self.host)]
        return distributed.ProcessGroupGloo(self._store, rank, 2, options)


class RawGroup:
    """One end: rank 0 sends, rank 1 receives. Blocking calls, for a thread."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._group = meeting.group(rank)
        self._peer = 1 - rank
        self._done = torch.zeros(1, dtype=torch.uint8)

    def send(self, source: Bytes) -> None:
        """All of ``source``, uint8 [bytes], in one operation (several are no faster); returns when the other end has
        it."""
        heard = self._group.recv([self._done], self._peer, 1)
        self._group.send([torch.from_numpy(source)], self._peer, 0).wait(TIMEOUT)
        heard.wait(TIMEOUT)

    def receive(self, target: Bytes) -> None:
        self._group.recv([torch.from_numpy(target)], self._peer, 0).wait(TIMEOUT)
        self._group.send([self._done], self._peer, 1).wait(TIMEOUT)
