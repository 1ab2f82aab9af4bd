"""Put on PYTHONPATH, this gives every process of a cluster a worker and a router without a model.

They serve, stop and fail like the real ones, so that Ray's part can be tested in seconds.
STAND_IN_FAIL=ID makes that process fail at its start, STAND_IN_DEAF=1 makes workers ignore `stop`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import types
from typing import Any


async def run_worker(config: Any, role: Any, worker_id: str, ready: Any, stop: asyncio.Event, progress: Any) -> None:
    from common.errors import EngineError

    progress("loading nothing")
    if os.environ.get("STAND_IN_FAIL") == worker_id:
        raise EngineError(f"{worker_id} was told to fail")
    print(f"{worker_id} writes to standard output")  # noqa: T201
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    ready(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await stop.wait()
    if os.environ.get("STAND_IN_DEAF"):
        await asyncio.sleep(3600)
    server.close()


async def run_router(
    config: Any,
    router_id: str,
    prefill: list[str],
    decode: list[str],
    ready: Any,
    stop: asyncio.Event,
    progress: Any,
) -> None:
    members = {"prefill": prefill, "decode": decode}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Any path is answered with the members; 503 until there are as many as configured."""
        await reader.readuntil(b"\r\n\r\n")
        wanted = (config.prefill.workers, config.decode.workers)
        status = "200 OK" if (len(members["prefill"]), len(members["decode"])) == wanted else "503 Not Ready"
        environment = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "TMPDIR")}
        body = json.dumps({**members, "environment": environment, "pid": os.getpid()}).encode()
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, config.router.host, config.router.port)
    port = server.sockets[0].getsockname()[1]
    ready(
        f"http://{config.router.host}:{port}",
        f"grpc://{config.router.host}:{port}",
        lambda prefill, decode: members.update(prefill=prefill, decode=decode),
    )
    await stop.wait()
    server.close()


for _name, _value in {"worker_process": run_worker, "router_process": run_router}.items():
    _module = types.ModuleType(f"cluster.{_name}")
    setattr(_module, _value.__name__, _value)
    sys.modules[_module.__name__] = _module
