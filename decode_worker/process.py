"""A decode worker as a process: everything put together, served, and ended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial

from common.config import Config
from common.failpoints import Failpoints
from common.lifecycle import end_within, first_of, freeze_heap
from common.workers import Role, WorkerState
from decode_worker.scheduler import DecodeScheduler
from decode_worker.worker import DecodeWorker
from engine.assembly import describe, load_runner, make_pool
from engine.ports import Exchange
from kv_transfer.blocking import run_inline
from kv_transfer.host import host_id
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transports.available import make_transports
from rpc import kv_channel
from rpc.peers import GrpcPeers
from rpc.servers import WorkerServer


async def run_decode_worker(
    config: Config,
    worker_id: str,
    ready: Callable[[str], None],
    stop: asyncio.Event,
    progress: Callable[[str], None],
) -> None:
    """Serves until ``stop``, or until it has drained. ``ready`` gets the address.

    In colocated mode its role is ``BOTH``. Raises what the worker broke down with.
    """
    server = WorkerServer(secret=config.cluster.secret)
    address = server.bind(config.worker.host, config.worker.port)
    runner = await load_runner(config, progress)
    failpoints = Failpoints(config.failpoints, random.Random(worker_id))
    connect = partial(kv_channel.connect, secret=config.cluster.secret)
    transports = make_transports(config.transfer, host_id(), address, connect)
    copies = run_inline if runner.cache.on_host else None
    receiver = Receiver(runner.cache, config.transfer, host_id(), transports, copies, failpoints)
    await receiver.start()
    sender = Sender(runner.cache, config.transfer, transports, copies, failpoints)
    exchange = Exchange(sender, receiver, GrpcPeers(secret=config.cluster.secret))
    pool = make_pool(config, runner)
    scheduler = DecodeScheduler(pool, runner.model_info, config.decode.max_sequences, config.decode.chunk_tokens)
    role = Role.BOTH if config.mode == "colocated" else Role.DECODE
    info = describe(config, role, worker_id, runner, address, host_id())
    worker = DecodeWorker(
        info,
        config.worker,
        config.transfer,
        pool,
        scheduler,
        runner,
        exchange,
        step_timeout_s=config.engine.step_timeout_s,
        failpoints=failpoints,
    )
    worker.start()
    try:
        await server.start(worker, decode=worker, kv=receiver)
        freeze_heap()
        ready(address)
        health = server.follow(lambda: worker.state is WorkerState.READY, config.worker.heartbeat_s)
        await first_of(stop.wait(), worker.drained(), worker.failed(), health)
    finally:
        await end_within(config.cluster.stop_timeout_s, worker.close, server.stop)
