"""Which process a worker's role is. Imports torch: only worker processes may import this module."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.config import Config
from common.workers import Role
from decode_worker.process import run_decode_worker
from prefill_worker.process import run_prefill_worker


async def run_worker(
    config: Config,
    role: Role,
    worker_id: str,
    ready: Callable[[str], None],
    stop: asyncio.Event,
    progress: Callable[[str], None],
) -> None:
    """Runs one worker until ``stop``, or until it has drained; ``ready`` gets its address."""
    run = run_prefill_worker if role is Role.PREFILL else run_decode_worker
    await run(config, worker_id, ready, stop, progress)
