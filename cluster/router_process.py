"""A router under Ray: the same as by hand, but told its members by the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from common.config import Config
from router.gateway_process import run_gateway

SetMembers = Callable[[Sequence[str], Sequence[str]], None]


async def run_router(
    config: Config,
    router_id: str,
    prefill_addresses: Sequence[str],
    decode_addresses: Sequence[str],
    ready: Callable[[str, str, SetMembers], None],
    stop: asyncio.Event,
    progress: Callable[[str], None],
) -> None:
    """Serves until ``stop``; ``ready`` gets the HTTP and gRPC URLs and the way to change the members."""
    members = config.model_copy(
        update={
            "prefill": config.prefill.model_copy(update={"addresses": tuple(prefill_addresses)}),
            "decode": config.decode.model_copy(update={"addresses": tuple(decode_addresses)}),
        }
    )
    await run_gateway(
        members, router_id, lambda running, grpc_url: ready(running.url, grpc_url, running.set_members), stop, progress
    )
