"""What every worker process puts together, whatever its role: model, blocks, description.

Part of the composition roots; imports torch.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable

from common.config import Config
from common.errors import ConfigError
from common.hashing import HASH_UNIT_TOKENS
from common.model_store import resolve
from common.workers import Role, WorkerInfo
from engine.blocks import BlockPool
from engine.prefix_cache import PrefixCache
from engine.runner import ModelRunner


async def load_runner(config: Config, progress: Callable[[str], None]) -> ModelRunner:
    """Finds the model's files (fetching them if need be) and loads them. Raises ConfigError or EngineError."""
    loop = asyncio.get_running_loop()

    def tell(text: str) -> None:
        loop.call_soon_threadsafe(progress, text)

    path = await asyncio.to_thread(resolve, config.model.name, config.model.cache_dir, True, tell)
    return await ModelRunner.load(
        path,
        config.engine,
        config.model.dtype,
        threads_per_worker(config),
        progress,
        name=config.model.served_name or config.model.name,
        max_model_len=config.model.max_model_len,
    )


def threads_per_worker(config: Config) -> int:
    """Compute threads of one worker when all of them share this host: cores over workers."""
    workers = config.decode.workers if config.mode == "colocated" else config.prefill.workers + config.decode.workers
    return max(1, len(os.sched_getaffinity(0)) // max(1, workers))


def make_pool(config: Config, runner: ModelRunner) -> BlockPool:
    """The books of the runner's KV pool."""
    size = runner.layout.block_size
    return BlockPool(runner.num_blocks, size, PrefixCache(size) if config.engine.prefix_cache else None)


def describe(config: Config, role: Role, worker_id: str, runner: ModelRunner, address: str, host_id: str) -> WorkerInfo:
    """The worker's side of the handshake. Raises ConfigError when the pool cannot hold two tokens."""
    pool_tokens = runner.num_blocks * runner.layout.block_size
    if pool_tokens < 2:
        raise ConfigError(f"the KV pool must hold at least 2 tokens, it holds {pool_tokens}: raise engine.pool_bytes")
    return WorkerInfo(
        worker_id=worker_id,
        role=role,
        epoch=time.time_ns() // 1_000_000,
        host=socket.gethostname(),
        host_id=host_id,
        pids=(os.getpid(),),
        address=address,
        model=runner.model_info,
        layout=runner.layout,
        total_blocks=runner.num_blocks,
        max_sequence_tokens=min(runner.model_info.max_model_len, pool_tokens),
        hash_unit_tokens=HASH_UNIT_TOKENS,
        transports=config.transfer.transports,
    )
