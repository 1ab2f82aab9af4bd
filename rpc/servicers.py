"""Adapters between the generated servicers and a worker's services: convert, call, convert.

A stream is written item by item, not yielded: so the service's generator is closed here, in the call's
own task, at the moment the client goes away, and not whenever a collector finds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from common.errors import ConfigError
from common.workers import PROTOCOL_VERSION
from rpc import conversion
from rpc.connection import ACCEPTED
from rpc.services import DecodeService, PrefillService, WorkerService
from rpc.status import reports_errors
from rpc.v1 import worker_pb2 as pb
from rpc.v1 import worker_pb2_grpc as pb_grpc

T = TypeVar("T")

OPENING_S = 1.0


async def write_stream(context: Any, items: AsyncGenerator[T, None], encode: Callable[[T], Any]) -> None:
    """Sends every item to the client, at the client's pace. However it ends, ``items`` is closed.

    Initial metadata tells the client that the call is accepted. They leave after ``items`` has run up to
    its first wait, so what it sets up there is in place by then.
    """
    async with aclosing(items):
        opening = asyncio.ensure_future(context.send_initial_metadata(ACCEPTED))
        opening.add_done_callback(_retrieve)
        try:
            async for item in items:
                await opening
                await context.write(encode(item))
        finally:
            # A status must not overtake the metadata. On a call that is gone gRPC fails them at once.
            await asyncio.wait({opening}, timeout=OPENING_S)


def _retrieve(done: asyncio.Future[Any]) -> None:
    """A client that is gone before the call is open is nobody's error."""
    if not done.cancelled():
        done.exception()


class WorkerServicer(pb_grpc.WorkerServicer):
    def __init__(self, service: WorkerService) -> None:
        self._service = service

    @reports_errors
    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.WorkerInfo:
        if request.protocol_version != PROTOCOL_VERSION:
            raise ConfigError(
                f"this worker speaks protocol version {PROTOCOL_VERSION}, the caller {request.protocol_version}"
            )
        return conversion.WORKER_INFO.encode(await self._service.describe())

    @reports_errors
    async def Watch(self, request: pb.WatchRequest, context: Any) -> None:  # type: ignore[override]
        await write_stream(context, self._service.watch(), conversion.WORKER_EVENT.encode)

    @reports_errors
    async def Ledger(self, request: pb.LedgerRequest, context: Any) -> pb.WorkerLedger:
        return conversion.WORKER_LEDGER.encode(await self._service.ledger())

    @reports_errors
    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        await self._service.drain()
        return pb.DrainResponse()

    @reports_errors
    async def SendPrefix(self, request: pb.PrefixRequest, context: Any) -> pb.PrefixReply:
        wanted = conversion.PREFIX_REQUEST.decode(request)
        return conversion.PREFIX_REPLY.encode(await self._service.send_prefix(wanted))


class PrefillServicer(pb_grpc.PrefillServicer):
    def __init__(self, service: PrefillService) -> None:
        self._service = service

    @reports_errors
    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> None:  # type: ignore[override]
        events = self._service.prefill(
            conversion.GENERATION_REQUEST.decode(request.request), conversion.TICKET.decode(request.ticket)
        )
        await write_stream(context, events, conversion.encode_prefill_event)


class DecodeServicer(pb_grpc.DecodeServicer):
    def __init__(self, service: DecodeService) -> None:
        self._service = service

    @reports_errors
    async def Tokens(self, request: pb.TokensRequest, context: Any) -> None:  # type: ignore[override]
        await write_stream(context, self._service.tokens(request.router_id), conversion.TOKEN_BATCH.encode)

    @reports_errors
    async def Reserve(self, request: pb.ReserveRequest, context: Any) -> pb.Ticket:
        wanted = conversion.GENERATION_REQUEST.decode(request.request)
        return conversion.TICKET.encode(await self._service.reserve(request.router_id, wanted))

    @reports_errors
    async def Submit(self, request: pb.SubmitRequest, context: Any) -> pb.SubmitResponse:
        wanted = conversion.GENERATION_REQUEST.decode(request.request)
        await self._service.submit(request.router_id, wanted)
        return pb.SubmitResponse()

    @reports_errors
    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        await self._service.cancel(request.request_id, request.attempt)
        return pb.CancelResponse()
