"""The bare links that transports are measured against move what they are given, every time."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from bench.transfer.raw_nixl import RawNixl
from kv_transfer.raw_group import Meeting, RawGroup
from kv_transfer.transports.group import is_available
from kv_transfer.transports.nixl import nixl_is_available

SOURCES = [np.random.default_rng(seed).integers(0, 256, 300_001, dtype=np.uint8) for seed in (1, 2)]


@pytest.mark.skipif(not is_available("gloo"), reason="this PyTorch has no gloo")
def test_gloo() -> None:
    meeting = Meeting("127.0.0.1")
    targets = [np.zeros_like(source) for source in SOURCES]

    def receive() -> None:
        end = RawGroup(Meeting("127.0.0.1", meeting.port), 1)
        for target in targets:
            end.receive(target)

    receiving = threading.Thread(target=receive)
    receiving.start()
    end = RawGroup(meeting, 0)
    for source in SOURCES:
        end.send(source)
    receiving.join(10)
    for source, target in zip(SOURCES, targets, strict=True):
        assert np.array_equal(source, target)


@pytest.mark.skipif(not nixl_is_available(), reason="nixl is not installed: make nixl")
def test_nixl() -> None:
    """The same arrays again, another source into the same target, the same source into another target."""
    targets = [np.zeros_like(SOURCES[0]) for _ in range(2)]
    order = [(0, 0), (0, 0), (1, 0), (1, 1)]
    near, far = socket.socketpair()
    arrived: list[np.ndarray] = []

    def receive() -> None:
        end = RawNixl(far)
        for _, to in order:
            targets[to][:] = 0
            end.receive(targets[to])
            arrived.append(targets[to].copy())
        end.close()

    receiving = threading.Thread(target=receive)
    receiving.start()
    end = RawNixl(near)
    for number, _ in order:
        end.send(SOURCES[number])
    receiving.join(10)
    end.close()
    near.close()
    far.close()
    for (number, _), data in zip(order, arrived, strict=True):
        assert np.array_equal(SOURCES[number], data)
