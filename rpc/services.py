"""What a worker offers over the wire, as the wire sees it. The other end of `router/clients.py`.

A service raises a BatonError to refuse; its generators are closed as soon as the client cancels, is
gone, or the server stops.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from common.handoff import PrefixReply, PrefixRequest, Ticket
from common.messages import GenerationRequest, PrefillEvent, TokenBatch
from common.workers import WorkerEvent, WorkerInfo, WorkerLedger


class WorkerService(Protocol):
    """Workers of every role."""

    async def describe(self) -> WorkerInfo: ...

    def watch(self) -> AsyncGenerator[WorkerEvent, None]:
        """Load and prefix cache events, a snapshot first; ends for a reader that lags too far behind."""
        ...

    async def ledger(self) -> WorkerLedger: ...

    async def drain(self) -> None:
        """Takes nothing new from now on; returns without waiting for what is under way."""
        ...

    async def send_prefix(self, request: PrefixRequest) -> PrefixReply:
        """Pushes a cached prefix into another worker's blocks, or says how much of it there is."""
        ...


class PrefillService(Protocol):
    def prefill(self, request: GenerationRequest, ticket: Ticket) -> AsyncGenerator[PrefillEvent, None]:
        """One FirstToken, one HandoffDone."""
        ...


class DecodeService(Protocol):
    def tokens(self, router_id: str) -> AsyncGenerator[TokenBatch, None]:
        """All tokens for one router. What runs before its first wait is done before the router hears
        that the stream is open; when it is closed the router's attempts end.
        """
        ...

    async def reserve(self, router_id: str, request: GenerationRequest) -> Ticket: ...

    async def submit(self, router_id: str, request: GenerationRequest) -> None: ...

    async def cancel(self, request_id: str, attempt: int) -> None:
        """One that is not there yet is refused when it comes."""
        ...
