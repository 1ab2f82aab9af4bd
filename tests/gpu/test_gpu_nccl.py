"""Pairwise NCCL groups: the cases of gloo's, on two devices of one machine. `python tests/gpu/nccl_check.py` runs them
in one go where there are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kv_transfer.channel import Connector
from kv_transfer.transport import Transport
from kv_transfer.transports.group import Group, is_available
from tests.kv_transfer.beside_cases import BesideCases, Make, ProcessCases

NUM_DEVICES = torch.cuda.device_count() if is_available("nccl") else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_DEVICES < 2, reason=f"an NCCL group needs two CUDA devices, here are {NUM_DEVICES}"),
]


class TestNccl(BesideCases):
    @pytest.fixture
    def make(self) -> Make:
        """The receiver is made first, and has device 0; senders have the other."""
        devices = itertools.count()

        def make(address: str, connector: Connector, capacity_bytes: int) -> Transport:
            return Group("nccl", address, connector, capacity_bytes, device=min(next(devices), 1))

        return make

    async def test_a_cut_carrier_ends_the_channel_and_no_more(self, make_rig: Any) -> None:
        pytest.skip("needs a device for each of three ends")


@pytest.mark.e2e
class TestNcclProcesses(ProcessCases):
    name = "nccl"
    devices = tuple(map(str, range(NUM_DEVICES))) or ("",)

    @pytest.mark.skipif(NUM_DEVICES < 4, reason="a device for each of four processes")
    async def test_one_dies_one_hangs_the_others_go_on(self, start: Any) -> None:
        await super().test_one_dies_one_hangs_the_others_go_on(start)

    @pytest.mark.skipif(NUM_DEVICES < 6, reason="a device for each of six processes")
    async def test_ranks(self, start: Any) -> None:
        await super().test_ranks(start)
