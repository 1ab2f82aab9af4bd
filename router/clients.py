"""What a router asks of workers: the seam behind which gRPC (`rpc/clients.py`) and the simulation's
in-process workers (`sim/clients.py`) are alike.

Every method raises a `common.errors.BatonError`: WorkerLostError when the worker cannot be reached or
went away in the middle, otherwise what the worker itself raised.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from common.handoff import Ticket
from common.messages import GenerationRequest, PrefillEvent, TokenBatch
from common.workers import WorkerEvent, WorkerInfo, WorkerLedger


class WorkerClient(Protocol):
    """What workers of every role answer."""

    address: str

    async def describe(self) -> WorkerInfo:
        """The worker's side of the handshake; refuses another protocol version."""
        ...

    def watch(self) -> AsyncGenerator[WorkerEvent, None]:
        """The worker's events, a snapshot first. Ends with WorkerLostError, when closed, or when this side
        has lagged too far behind: then it is to be watched anew.
        """
        ...

    async def ledger(self) -> WorkerLedger:
        """Every block of the worker, between two steps."""
        ...

    async def drain(self) -> None:
        """Asks the worker to take nothing new, finish, and leave."""
        ...

    async def close(self) -> None: ...


class PrefillClient(WorkerClient, Protocol):
    def prefill(self, request: GenerationRequest, ticket: Ticket) -> AsyncGenerator[PrefillEvent, None]:
        """Computes the context, hands its KV to the ticket's decode worker.

        Yields one FirstToken, then one HandoffDone, and ends. Closing the generator cancels the work:
        its blocks are free within one chunk.
        """
        ...


class DecodeClient(WorkerClient, Protocol):
    def tokens(self, router_id: str) -> AsyncGenerator[TokenBatch, None]:
        """The one stream of all tokens for this router. Must be open before the first `reserve` or
        `submit`; when it ends, the worker cancels all that this router asked of it.
        """
        ...

    async def reserve(self, router_id: str, request: GenerationRequest) -> Ticket:
        """Blocks for the request's context, or NoCapacityError. Tokens appear on the stream once a
        prefill worker has committed.
        """
        ...

    async def submit(self, router_id: str, request: GenerationRequest) -> None:
        """Asks a worker to compute the context itself and to generate (colocated, local prefill), or
        NoCapacityError. All tokens, the first included, appear on the stream.
        """
        ...

    async def cancel(self, request_id: str, attempt: int) -> None:
        """Ends an attempt at whatever stage it is; one that is not there yet is refused when it comes."""
        ...
