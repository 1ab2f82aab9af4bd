"""``python -m router --config F``: a router by hand, without Ray. Its workers are named by
``prefill.addresses`` and ``decode.addresses``."""

import asyncio
from collections.abc import Callable

from common.config import Config
from common.process import main
from router.gateway_process import run_gateway


async def run(
    config: Config,
    name: str,
    ready: Callable[[str], None],
    stop: asyncio.Event,
    progress: Callable[[str], None],
) -> None:
    await run_gateway(config, name, lambda running, grpc_url: ready(f"{running.url} {grpc_url}"), stop, progress)


if __name__ == "__main__":
    main("router", "router-0", run)
