"""``python -m router --config F``: a router by hand, without Ray. Its workers are named by
``prefill.addresses`` and ``decode.addresses``."""

import asyncio
from collections.abc import Callable

from common.config import Config
from common.errors import ConfigError
from common.process import main
from router.gateway_process import run_gateway


async def run(
    config: Config,
    name: str,
    ready: Callable[[str], None],
    stop: asyncio.Event,
    progress: Callable[[str], None],
) -> None:
    if config.mode != "colocated" and not config.prefill.addresses:
        raise ConfigError("prefill.addresses is empty: a router without Ray is told where its workers are")
    if not config.decode.addresses:
        raise ConfigError("decode.addresses is empty: a router without Ray is told where its workers are")
    await run_gateway(config, name, lambda running, grpc_url: ready(f"{running.url} {grpc_url}"), stop, progress)


if __name__ == "__main__":
    main("router", "router", run)
