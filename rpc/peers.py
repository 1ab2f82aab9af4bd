"""Other workers as a worker reaches them: the way to ask for a prefix. Satisfies `engine.ports.Peers`.

One client for each address, kept for the next time; one that lost its peer is dropped, so that a worker that
comes back is connected to anew.
"""

from __future__ import annotations

from common.errors import WorkerLostError
from common.handoff import PrefixReply, PrefixRequest
from rpc.clients import GrpcWorkerClient


class GrpcPeers:
    """``secret``: the cluster's. Needs a running loop."""

    def __init__(self, *, secret: str | None = None) -> None:
        self._secret = secret
        self._clients: dict[str, GrpcWorkerClient] = {}

    async def send_prefix(self, address: str, request: PrefixRequest) -> PrefixReply:
        """Raises WorkerLostError when nobody answers at ``address``, else what the worker raised."""
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = GrpcWorkerClient(address, secret=self._secret)
        try:
            return await client.send_prefix(request)
        except WorkerLostError:
            if self._clients.get(address) is client:
                del self._clients[address]
                await client.close()
            raise

    async def close(self) -> None:
        """What is under way ends with WorkerLostError."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()
