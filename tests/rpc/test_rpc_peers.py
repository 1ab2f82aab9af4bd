"""One worker asks another for a prefix, over real loopback sockets."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import AuthenticationError, DeadlineError, TicketError, WorkerLostError
from common.handoff import PrefixReply, PrefixRequest
from engine.ports import Peers
from rpc.peers import GrpcPeers
from rpc.servers import WorkerServer
from tests.rpc.scripted_worker import TICKET, Worker, forever, raising, serving

REQUEST = PrefixRequest(TICKET, tuple(range(52)), "salt", 30.0)


async def test_the_question_and_the_answer_arrive_whole(worker: Worker, server: WorkerServer) -> None:
    peers: Peers = GrpcPeers()
    assert await peers.send_prefix(server.address, REQUEST) == PrefixReply(52, 4096)
    assert worker.asked == [("send_prefix", REQUEST)]
    await peers.close()


async def test_what_the_holder_raises_is_raised_here(worker: Worker, server: WorkerServer) -> None:
    peers = GrpcPeers()
    worker.script["send_prefix"] = raising(TicketError("ticket t-1 is void"))
    with pytest.raises(TicketError, match="ticket t-1 is void"):
        await peers.send_prefix(server.address, REQUEST)
    await peers.close()


async def test_a_holder_may_take_longer_than_other_answers_but_not_than_the_request(
    worker: Worker, server: WorkerServer
) -> None:
    peers = GrpcPeers()
    worker.script["send_prefix"] = forever
    with pytest.raises(DeadlineError):
        await peers.send_prefix(server.address, PrefixRequest(TICKET, (1,), "", 0.2))
    await peers.close()


async def test_giving_up_ends_the_push(worker: Worker, server: WorkerServer) -> None:
    ended = asyncio.Event()

    async def push() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    peers = GrpcPeers()
    worker.script["send_prefix"] = push
    asking = asyncio.create_task(peers.send_prefix(server.address, REQUEST))
    while not worker.asked:  # noqa: ASYNC110 - the server has no event for this
        await asyncio.sleep(0.001)
    asking.cancel()
    async with asyncio.timeout(5.0):
        await ended.wait()
    await peers.close()


async def test_a_holder_that_died_is_lost_and_one_that_came_back_is_found(worker: Worker) -> None:
    peers = GrpcPeers()
    async with serving(worker) as server:
        address = server.address
        await peers.send_prefix(address, REQUEST)
    async with asyncio.timeout(5.0):
        with pytest.raises(WorkerLostError):
            await peers.send_prefix(address, REQUEST)
    async with serving(worker, int(address.rsplit(":", 1)[1])):
        assert (await peers.send_prefix(address, REQUEST)).held_tokens == 52
    await peers.close()


async def test_a_stranger_gets_nothing(worker: Worker) -> None:
    async with serving(worker, secret="ours") as server:
        peers = GrpcPeers(secret="theirs")
        with pytest.raises(AuthenticationError):
            await peers.send_prefix(server.address, REQUEST)
        assert worker.asked == []
        await peers.close()
