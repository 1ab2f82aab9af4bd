"""NIXL, over host memory. Skipped where the package is not installed (`make nixl`)."""

from __future__ import annotations

import pytest

from kv_transfer.transports.nixl import Nixl, nixl_is_available
from tests.kv_transfer.beside_cases import BesideCases, Make, ProcessCases

pytestmark = pytest.mark.skipif(not nixl_is_available(), reason="nixl is not installed: make nixl")


class TestNixl(BesideCases):
    @pytest.fixture
    def make(self) -> Make:
        return Nixl


@pytest.mark.e2e
class TestNixlProcesses(ProcessCases):
    name = "nixl"

    @pytest.mark.skip(reason="that is the session's, and gloo shows it")
    async def test_ranks(self, start: object) -> None: ...
