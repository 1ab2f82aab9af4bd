"""The connection to one worker, kept up for as long as the worker is a member.

    connect ─▶ describe ─▶ checked against the others ─▶ token stream, events ─▶ lost ─▶ wait, again
                  │                   │
                  └─ unreachable      └─ does not fit: refused, with the reason in /cluster

The token stream is opened before the events are asked for, over one connection; so when the first event
is here the stream is open there, and only then is the worker ready. A gap in the events' numbers means a
missed one: watching anew starts with a snapshot. A worker that is silent for too long, or says that its
engine hangs, is first suspect (no new work), then taken for lost (its attempts go on elsewhere).

Knows the clients' protocol, and nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Protocol, cast

from common.errors import BatonError, WorkerLostError
from common.lifecycle import first_of
from common.workers import Role, WorkerInfo, WorkerState
from router.clients import DecodeClient, PrefillClient, WorkerClient
from router.prefix_index import PrefixIndex
from router.worker import Worker

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Waits between attempts to connect; the last one repeats."""

REWATCH_S = 0.05
"""Pause before watching anew after a gap, lest a faulty worker keep the loop busy."""

LOST_AFTER = 3
"""A worker is taken for lost after this many times the silence that makes it suspect."""


class ClientFactory(Protocol):
    """Makes clients for addresses: gRPC ones, or the simulation's. Connecting is lazy, nothing fails here."""

    def prefill(self, address: str) -> PrefillClient: ...

    def decode(self, address: str) -> DecodeClient: ...


class WorkerLink:
    """``admit(worker, info)`` raises when the worker does not fit; ``news`` is called on any change."""

    def __init__(
        self,
        worker: Worker,
        clients: ClientFactory,
        index: PrefixIndex,
        *,
        router_id: str,
        suspect_after_s: float,
        admit: Callable[[Worker, WorkerInfo], None],
        news: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._clients = clients
        self._index = index
        self._router_id = router_id
        self._suspect_after_s = suspect_after_s
        self._admit = admit
        self._news = news

    async def run(self) -> None:
        """Connects, and connects again, until cancelled."""
        failures = 0
        while True:
            was_alive = False
            try:
                await self._session()
            except BatonError as error:
                was_alive = self._worker.alive
                if was_alive:
                    # One that drained has said that it would go.
                    level = logging.DEBUG if self._worker.state is WorkerState.DRAINING else logging.WARNING
                    log.log(
                        level, "worker out of service: %s", error.message, extra={"worker_id": self._worker.worker_id}
                    )
                self._disconnected(error)
            except Exception as error:  # the top of this connection: no peer may end the keeping up of it
                was_alive = self._worker.alive
                log.exception("a link failed", extra={"worker_id": self._worker.worker_id})
                self._disconnected(WorkerLostError(f"internal error ({type(error).__name__})"))
            finally:
                # It is no member any more. Its address may be one again: the index is not this link's business now.
                if self._worker.alive:
                    self._worker.lost(WorkerLostError(f"{self._worker.worker_id} is no member any more"))
            failures = 0 if was_alive else failures + 1
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])

    def _disconnected(self, error: BatonError) -> None:
        worker = self._worker
        if worker.alive:
            self._index.drop(worker.address)
            if not isinstance(error, WorkerLostError):
                error = WorkerLostError(f"{worker.worker_id}: {error.message}")
            worker.lost(error)
        else:
            worker.refused_to_connect(error)
        self._news()

    async def _session(self) -> None:
        """One connection, from the handshake to its loss, which it raises."""
        worker = self._worker
        prefill = worker.role is Role.PREFILL
        client: PrefillClient | DecodeClient
        client = self._clients.prefill(worker.address) if prefill else self._clients.decode(worker.address)
        try:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    info = await client.describe()
            except TimeoutError:
                raise WorkerLostError(
                    f"{worker.address} did not answer the handshake within {CONNECT_TIMEOUT_S:g} s"
                ) from None
            self._admit(worker, info)
            worker.connected(info, client, asyncio.get_running_loop().time())
            legs = [] if prefill else [self._read_tokens(cast(DecodeClient, client))]
            await first_of(*legs, self._watch(client), self._listen_for_silence())
        finally:
            await client.close()

    async def _read_tokens(self, client: DecodeClient) -> None:
        worker = self._worker
        loop = asyncio.get_running_loop()
        async with aclosing(client.tokens(self._router_id)) as batches:
            async for batch in batches:
                worker.heard(loop.time())
                for delta in batch.deltas:
                    worker.deliver(delta)
        raise WorkerLostError(f"{worker.worker_id} ended its token stream")

    async def _watch(self, client: WorkerClient) -> None:
        while True:
            await self._follow(client)
            log.warning("missed an event; watching anew", extra={"worker_id": self._worker.worker_id})
            await asyncio.sleep(REWATCH_S)

    async def _follow(self, client: WorkerClient) -> None:
        """Applies events until one is missing, or the worker ends them because this router is too slow."""
        worker = self._worker
        loop = asyncio.get_running_loop()
        expected: int | None = None
        async with aclosing(client.watch()) as events:
            async for event in events:
                if event.snapshot:
                    self._index.replace(worker.address, event.stored)
                elif event.sequence != expected:
                    return
                elif event.stored or event.removed:
                    self._index.update(worker.address, event.stored, event.removed)
                expected = event.sequence + 1
                worker.reported(event.load, loop.time())
                self._news()
                # Suspect so far; what runs there is given up as if it had been silent.
                stuck_s = worker.stuck_s(loop.time())
                if worker.attempts and stuck_s >= self._suspect_after_s * (LOST_AFTER - 1):
                    raise WorkerLostError(f"{worker.worker_id} is stuck: {worker.reason}")

    async def _listen_for_silence(self) -> None:
        worker = self._worker
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            suspect_at = worker.heard_at + self._suspect_after_s
            lost_at = worker.heard_at + self._suspect_after_s * LOST_AFTER
            if now >= lost_at:
                raise WorkerLostError(f"{worker.worker_id} was silent for {now - worker.heard_at:.1f} s")
            if now >= suspect_at:
                worker.quiet(now - worker.heard_at)
                self._news()
                # Not until ``lost_at``: it may speak, and fall silent again, before.
                await asyncio.sleep(min(lost_at - now, self._suspect_after_s))
            else:
                await asyncio.sleep(suspect_at - now)
