"""The other process of the benchmark: ``python -m bench.transfer.peer RING_FD SOCKET_FD RAW_PORT``.

One JSON object a line: orders come on standard input, each is answered on standard output. It ends with its input.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import sys
from typing import Any

from bench.transfer.cases import Case
from bench.transfer.ends import ReceivingEnd


async def serve(ring: int, sock: socket.socket, raw_port: int) -> None:
    """Until the input ends."""
    end = ReceivingEnd()
    address = await end.start()
    end.join_ring(ring, sock)
    await end.connect_raw(raw_port)
    _say({"raw_grpc": address})
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    receiving: asyncio.Future[None] | None = None
    while line := await orders.readline():
        order = json.loads(line)
        if receiving is not None:
            await receiving
            receiving = None
        match order["do"]:
            case "prepare":
                offers = await end.prepare(Case(*order["case"]), verify=order["verify"])
                _say({"offers": [dataclasses.astuple(offer) for offer in offers]})
            case "expect":
                end.expect(order["number"])
                _say({})
            case "forget":
                await end.forget(order["number"])
                _say({})
            case "join":
                receiving = asyncio.ensure_future(end.join(order["kind"], order["port"]))
                _say({})
            case "raw":
                receiving = asyncio.ensure_future(end.receive_raw(order["kind"]))
                _say({})
            case "digests":
                _say({"digests": end.digests()})
    if receiving is not None:
        receiving.cancel()  # its link ends as the input did
    await end.stop()


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    import uvloop

    ring, sock, raw_port = map(int, sys.argv[1:4])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(ring, socket.socket(fileno=sock), raw_port))


if __name__ == "__main__":
    main()
