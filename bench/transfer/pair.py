"""A prefill and a decode worker in processes of their own, asked as a router asks them, with clocks on what they say.

All times are of this process's one clock, at the arrival of what a worker says as soon as it happens. Which way KV
goes is the caller's choice: a ticket is passed on with that one offer. Knows no figures.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter as now
from typing import IO

from common.errors import BatonError
from common.handoff import PrefixRequest, Ticket, TransportOffer
from common.messages import FirstToken, GenerationRequest, HandoffDone, SamplingParams
from rpc.clients import GrpcDecodeClient, GrpcPrefillClient

ROUTER_ID = "bench"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 120.0
NUM_DECODED = 8
"""Tokens after the first one."""


@dataclass(frozen=True, slots=True)
class HandoffTimes:
    """One request through both workers. ``first_token_at``: when P said the first token, at prefill's end;
    ``token_times``: when D said tokens 0 (it has joined), 1, … Seconds on one clock; ``prefill_s`` is P's own word.
    """

    prefill_s: float
    first_token_at: float
    token_times: tuple[float, ...]
    num_bytes: int
    transport: str


class WorkerPair:
    """Made by `worker_pair`."""

    def __init__(self, prefill: GrpcPrefillClient, decode: GrpcDecodeClient) -> None:
        self._prefill = prefill
        self._decode = decode
        self._said: dict[str, asyncio.Queue[float | BatonError]] = {}
        self._num_requests = 0

    async def listen(self) -> None:
        """Puts the decode worker's words to the requests that they belong to. Runs as long as the pair is asked."""
        async with aclosing(self._decode.tokens(ROUTER_ID)) as batches:
            async for batch in batches:
                for delta in batch.deltas:
                    said = self._said.get(delta.request_id)
                    if said is None:
                        continue
                    for _ in delta.tokens:
                        said.put_nowait(now())
                    if delta.finish is not None and delta.finish.error_code:
                        said.put_nowait(BatonError(delta.finish.error_message))

    async def offers(self) -> dict[str, TransportOffer]:
        """The ways into D's pool, by transport."""
        request, ticket = await self._reserve((1,), None)
        await self._forget(request)
        return {offer.name: offer for offer in ticket.offers}

    async def hand_over(
        self, prompt: tuple[int, ...], offer: TransportOffer, on_first_token: Callable[[], None] | None = None
    ) -> HandoffTimes:
        """Computes ``prompt`` on P, decodes a few tokens on D; KV goes the way of ``offer``. Raises BatonErrors."""
        request, ticket = await self._reserve(prompt, offer)
        said = self._said[request.request_id]
        first: FirstToken | None = None
        done: HandoffDone | None = None
        first_token_at = 0.0
        try:
            async with aclosing(self._prefill.prefill(request, ticket)) as events:
                async for event in events:
                    if isinstance(event, FirstToken):
                        first, first_token_at = event, now()
                        if on_first_token is not None:
                            on_first_token()
                    else:
                        done = event
            times = [await _next(said) for _ in range(request.sampling.max_tokens)]
        finally:
            await self._forget(request)
        assert first is not None
        assert done is not None
        return HandoffTimes(first.prefill_s, first_token_at, tuple(times), done.num_bytes, done.transport)

    async def send_again(self, prompt: tuple[int, ...], offer: TransportOffer) -> float:
        """Seconds that the transfer of ``prompt``'s KV, all of which P has in its cache, takes by itself."""
        request, ticket = await self._reserve(prompt, offer, cache_salt="nobody had this before")
        try:
            started = now()
            reply = await self._prefill.send_prefix(PrefixRequest(ticket, prompt))
            taken = now() - started
            if reply.held_tokens < len(prompt):
                raise BatonError(f"of {len(prompt)} tokens {reply.held_tokens} were in the prefill worker's cache")
            await _next(self._said[request.request_id])
        finally:
            await self._forget(request)
        return taken

    async def _reserve(
        self, prompt: tuple[int, ...], offer: TransportOffer | None, cache_salt: str = ""
    ) -> tuple[GenerationRequest, Ticket]:
        self._num_requests += 1
        name = f"overlap-{self._num_requests}"
        sampling = SamplingParams(max_tokens=NUM_DECODED + 1, temperature=0.0, ignore_eos=True)
        request = GenerationRequest(name, prompt, sampling, cache_salt=cache_salt, timeout_s=REQUEST_TIMEOUT_S)
        self._said[name] = asyncio.Queue()
        ticket = await self._decode.reserve(ROUTER_ID, request)
        return request, ticket if offer is None else replace(ticket, offers=(offer,))

    async def _forget(self, request: GenerationRequest) -> None:
        """What of it is still going on ends."""
        del self._said[request.request_id]
        await self._decode.cancel(request.request_id, request.attempt)


async def _next(said: asyncio.Queue[float | BatonError]) -> float:
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        word = await said.get()
    if isinstance(word, BatonError):
        raise word
    return word


@asynccontextmanager
async def worker_pair(*settings: str) -> AsyncIterator[WorkerPair]:
    """Both workers with ``settings`` (``path=value``), by default with the configuration's defaults. Raises BatonError
    when one does not start."""
    with tempfile.TemporaryFile() as log:
        processes: list[asyncio.subprocess.Process] = []
        try:
            processes.append(await _start("prefill_worker", settings, log))
            processes.append(await _start("decode_worker", settings, log))
            async with asyncio.timeout(START_TIMEOUT_S):
                addresses = [await _ready(process, log) for process in processes]
            prefill, decode = GrpcPrefillClient(addresses[0]), GrpcDecodeClient(addresses[1])
            pair = WorkerPair(prefill, decode)
            listening = asyncio.ensure_future(pair.listen())
            try:
                yield pair
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
                await prefill.close()
                await decode.close()
        finally:
            for process in processes:
                await _stop(process)


async def _start(role: str, settings: Sequence[str], log: IO[bytes]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", role),
        *(part for setting in settings for part in ("--set", setting)),
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        cwd=Path(__file__).parents[2],
        start_new_session=True,  # Ctrl-C is for this process, which then ends its workers
    )


async def _ready(process: asyncio.subprocess.Process, log: IO[bytes]) -> str:
    assert process.stdout is not None
    word, _, address = (await process.stdout.readline()).decode().strip().partition(" ")
    if word != "ready":
        log.seek(0)
        said = log.read().decode(errors="replace").strip()
        raise BatonError(f"a worker for the benchmark did not start: {said[-2000:]}")
    return address


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
