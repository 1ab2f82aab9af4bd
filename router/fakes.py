"""A fleet in memory, for tests of the router and of what is built on it.

The workers keep no KV and compute nothing: token ``index`` of an answer is `fake_token(prompt, index)`,
whoever makes it, so a test can tell what an answer must be whatever happened on the way. They do keep
the protocol: reservations with blocks, one stream per router, cancels; and they can be told to misbehave.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from common.errors import BatonError, NoCapacityError, WorkerLostError
from common.handoff import KVLayout, Ticket
from common.hashing import HASH_UNIT_TOKENS, prefix_hashes, root_hash
from common.messages import (
    ContextTokens,
    Finish,
    FinishReason,
    FirstToken,
    GenerationRequest,
    HandoffDone,
    Logprobs,
    PrefillEvent,
    TokenBatch,
    TokenDelta,
    TokenLogprob,
)
from common.workers import ModelInfo, Role, WorkerEvent, WorkerInfo, WorkerLedger, WorkerLoad, WorkerState
from router.clients import DecodeClient, PrefillClient

T = TypeVar("T")

VOCAB_SIZE = 256
EOS = 255
BLOCK_SIZE = 16


def fake_token(prompt: Sequence[int], index: int) -> int:
    """The token at ``index`` of the answer to ``prompt``: a printable character, never EOS."""
    return 97 + (sum(prompt) + 5 * index) % 26


def fake_answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    return [fake_token(prompt, index) for index in range(num_tokens)]


def fake_logprobs(token: int, index: int, wanted: int | None) -> Logprobs | None:
    """What is told of a ``token`` at ``index``: it is the likeliest, and those that follow it in the alphabet
    come next, each e times less likely."""
    if wanted is None:
        return None
    logprob = -(index + 1) / 8
    return Logprobs(logprob, tuple(TokenLogprob((token + i) % VOCAB_SIZE, logprob - i) for i in range(wanted)))


class FakeWorker:
    """One worker process. ``step_s`` is the time of a prefill, and of each decode step."""

    def __init__(
        self,
        worker_id: str,
        role: Role,
        *,
        num_blocks: int = 1000,
        step_s: float = 0.001,
        max_model_len: int = 4096,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self.role = role
        self.step_s = step_s
        self.num_blocks = num_blocks
        layout = KVLayout("fake-weights", 2, 2, 8, BLOCK_SIZE, "float32", total_kv_heads=2)
        model = ModelInfo("fake", "fake-weights", vocab_size, max_model_len, (EOS,))
        self.info = WorkerInfo(
            worker_id,
            role,
            1,
            "localhost",
            "host",
            (1,),
            worker_id,
            model,
            layout,
            num_blocks,
            num_blocks * BLOCK_SIZE,
            HASH_UNIT_TOKENS,
        )
        self.state = WorkerState.READY
        self.holding: dict[str, int] = {}
        """Attempt → blocks."""
        self.seen: list[GenerationRequest] = []
        """All that was asked of it, refused or not."""
        self.cancelled: list[str] = []
        self.cached: set[bytes] = set()
        self.waiting_tokens = 0
        self.steps = 0
        self.dead = asyncio.Event()
        self.hung = False
        """A stopped process: it answers nothing and says nothing."""
        self.script: Sequence[int] = ()
        """What it answers, whatever is asked; beyond that `fake_token`."""
        self.error: BatonError | None = None
        """Raised by the next prefill or reservation."""
        self.mute_after: int | None = None
        """Deliver this many tokens of each attempt, then none."""
        self.repeat_tokens = False
        """Send each token twice."""
        self.skip_index: int | None = None
        """Leave this token out."""
        self.die_unheard = False
        """Send the last token of an answer, and die before saying that it was the last."""
        self._tokens: dict[str, asyncio.Queue[TokenDelta]] = {}
        self._watchers: list[asyncio.Queue[WorkerEvent]] = []
        self._sequence = 0
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, tuple[str, TokenDelta]] = {}
        """Attempt → its router, and its last word if it is cancelled."""

    # ── controls ──────────────────────────────────────────────────────────────────────────────────

    def kill(self) -> None:
        self.dead.set()
        self.holding.clear()
        self.cached.clear()
        for job in self._jobs.values():
            job.cancel()

    def restart(self) -> None:
        """The same worker id, at the same address, in a new epoch."""
        self.info = replace(self.info, epoch=self.info.epoch + 1)
        self.dead = asyncio.Event()
        self._sequence = 0

    def report(self, skip: int = 0) -> None:
        """Sends a load report; ``skip`` leaves numbers out, as when events were missed."""
        self._sequence += 1 + skip
        for watcher in self._watchers:
            watcher.put_nowait(WorkerEvent(self._sequence, self.load))

    @property
    def load(self) -> WorkerLoad:
        return WorkerLoad(
            state=self.state,
            num_running=len(self.holding),
            waiting_tokens=self.waiting_tokens,
            total_blocks=self.num_blocks,
            free_blocks=self.num_blocks - sum(self.holding.values()),
            prefill_steps=self.steps,
            decode_steps=self.steps,
        )

    # ── what its clients call ─────────────────────────────────────────────────────────────────────

    async def answer(self) -> None:
        """Returns when the process would have answered."""
        if self.hung:
            await self.dead.wait()
        if self.dead.is_set():
            raise WorkerLostError(f"{self.info.worker_id} cannot be reached")

    def admit(self, request: GenerationRequest) -> None:
        self.seen.append(request)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        blocks = -(-len(request.context) // BLOCK_SIZE)
        free = self.num_blocks - sum(self.holding.values())
        if blocks > free:
            raise NoCapacityError(f"{blocks} blocks are wanted, {free} are free")
        self.holding[request.key] = blocks

    def token(self, request: GenerationRequest, index: int) -> tuple[int, Logprobs | None]:
        """The token at ``index`` of the answer, and what is told of it."""
        token = self.script[index] if index < len(self.script) else fake_token(request.prompt, index)
        return token, fake_logprobs(token, index, request.sampling.num_logprobs)

    def prompt_logprobs(self, request: GenerationRequest) -> tuple[Logprobs, ...]:
        """What is told of the prompt, by a worker that computes it for the first time."""
        if not request.sampling.score_prompt or request.generated:
            return ()
        told = (fake_logprobs(t, i, request.sampling.num_logprobs) for i, t in enumerate(request.prompt[1:]))
        return tuple(entry for entry in told if entry is not None)

    def release(self, key: str) -> None:
        job = self._jobs.pop(key, None)
        if job is not None:
            job.cancel()
        self.holding.pop(key, None)
        self._running.pop(key, None)

    def cancel(self, key: str) -> None:
        """Ends an attempt; its router hears what it took."""
        self.cancelled.append(key)
        router_id, delta = self._running.get(key, ("", None))
        self.release(key)
        if delta is not None and router_id in self._tokens:
            self._tokens[router_id].put_nowait(delta)

    async def watch(self) -> AsyncGenerator[WorkerEvent, None]:
        await self.answer()
        events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        self._watchers.append(events)
        try:
            yield WorkerEvent(self._sequence, self.load, snapshot=True, stored=tuple(sorted(self.cached)))
            while True:
                event = await _next(events, self.dead, self.info.worker_id)
                if not self.hung:
                    yield event
        finally:
            self._watchers.remove(events)

    async def tokens(self, router_id: str) -> AsyncGenerator[TokenBatch, None]:
        await self.answer()
        deltas = self._tokens[router_id] = asyncio.Queue()
        try:
            while True:
                yield TokenBatch((await _next(deltas, self.dead, self.info.worker_id),))
        finally:
            self._tokens.pop(router_id, None)

    def generate(self, router_id: str, request: GenerationRequest, context: ContextTokens, first_index: int) -> None:
        """Starts decoding at ``first_index``."""
        given_up = TokenDelta(
            request.request_id, request.attempt, first_index, (), Finish(FinishReason.CANCELLED, context)
        )
        self._running[request.key] = (router_id, given_up)
        job = asyncio.get_running_loop().create_task(self._decode(router_id, request, context, first_index))
        self._jobs[request.key] = job

    async def _decode(self, router_id: str, request: GenerationRequest, context: ContextTokens, index: int) -> None:
        last = request.sampling.max_tokens - 1
        deltas = self._tokens[router_id]
        name = (request.request_id, request.attempt)
        sent = 0
        while index <= last:
            await asyncio.sleep(self.step_s)
            self.steps += 1
            if self.hung or (self.mute_after is not None and sent >= self.mute_after):
                continue
            finish = Finish(FinishReason.LENGTH, context) if index == last else None
            token, told = self.token(request, index)
            logprobs = () if told is None else (told,)
            prompt = self.prompt_logprobs(request) if index == 0 else ()
            delta = TokenDelta(*name, index, (token,), finish, logprobs, prompt)
            if index != self.skip_index:
                if self.repeat_tokens or self.die_unheard:
                    deltas.put_nowait(replace(delta, finish=None))
                if finish is not None and self.die_unheard:
                    self._jobs.pop(request.key, None)
                    await asyncio.sleep(self.step_s)
                    self.kill()
                    return
                if not self.die_unheard:
                    deltas.put_nowait(delta)
            index, sent = index + 1, sent + 1
        if sent == 0:  # the first token was the last
            deltas.put_nowait(TokenDelta(*name, index, (), Finish(FinishReason.LENGTH, context)))
        self._jobs.pop(request.key, None)
        self.release(request.key)
        self.report()


@dataclass
class _Client:
    worker: FakeWorker
    fleet: FakeFleet
    address: str = ""
    closed: bool = False

    async def describe(self) -> WorkerInfo:
        await self.worker.answer()
        return self.worker.info

    def watch(self) -> AsyncGenerator[WorkerEvent, None]:
        return self.worker.watch()

    async def ledger(self) -> WorkerLedger:
        await self.worker.answer()
        held = sum(self.worker.holding.values())
        total = self.worker.num_blocks
        return WorkerLedger(self.worker.info.worker_id, self.worker.role, total, total - held, 0, 0, held, 0)

    async def drain(self) -> None:
        self.worker.state = WorkerState.DRAINING
        self.worker.report()

    async def close(self) -> None:
        self.closed = True


class FakePrefillClient(_Client):
    async def prefill(self, request: GenerationRequest, ticket: Ticket) -> AsyncGenerator[PrefillEvent, None]:
        worker = self.worker
        await worker.answer()
        worker.admit(request)
        try:
            try:
                await asyncio.wait_for(worker.dead.wait(), worker.step_s)
            except TimeoutError:
                pass
            await worker.answer()
            worker.steps += 1
            index = len(request.generated)
            num_context = len(request.context)
            root = root_hash("fake-weights", request.cache_salt)
            hashes = prefix_hashes(request.context, root)
            hit = sum(h in worker.cached for h in hashes) * HASH_UNIT_TOKENS
            hit = min(hit, num_context - 1)
            worker.cached.update(hashes)
            last = index + 1 >= request.sampling.max_tokens
            token, told = worker.token(request, index)
            yield FirstToken(
                request.request_id,
                request.attempt,
                index,
                token,
                ContextTokens(cached=hit, computed=num_context - hit),
                FinishReason.LENGTH if last else None,
                prefill_s=worker.step_s,
                logprobs=told,
                prompt_logprobs=worker.prompt_logprobs(request),
            )
            await worker.answer()
            decode = self.fleet.workers[ticket.worker_id]
            await decode.answer()
            received = ContextTokens(moved=num_context)
            decode.generate(ticket.secret.decode(), request, received, index + 1)
            yield HandoffDone(request.request_id, request.attempt, 1024 * num_context, num_context, "fake")
        finally:
            worker.release(request.key)


class FakeDecodeClient(_Client):
    def tokens(self, router_id: str) -> AsyncGenerator[TokenBatch, None]:
        return self.worker.tokens(router_id)

    async def reserve(self, router_id: str, request: GenerationRequest) -> Ticket:
        worker = self.worker
        await worker.answer()
        worker.admit(request)
        return Ticket(
            f"ticket-{request.key}",
            request.request_id,
            request.attempt,
            worker.info.worker_id,
            worker.info.epoch,
            len(request.context),
            0,
            (),
            worker.info.layout,
            (),
            router_id.encode(),
            30.0,
        )

    async def submit(self, router_id: str, request: GenerationRequest) -> None:
        await self.worker.answer()
        self.worker.admit(request)
        context = ContextTokens(computed=len(request.context))
        self.worker.generate(router_id, request, context, len(request.generated))

    async def cancel(self, request_id: str, attempt: int) -> None:
        await asyncio.sleep(self.worker.step_s)  # the way there
        if self.closed:
            raise WorkerLostError(f"the client of {self.address} was closed")
        await self.worker.answer()
        self.worker.cancel(f"{request_id}#{attempt}")


@dataclass
class FakeFleet:
    """Workers by address (their id), and the client factory for them."""

    workers: dict[str, FakeWorker] = field(default_factory=dict)

    def add(self, worker: FakeWorker) -> FakeWorker:
        self.workers[worker.info.worker_id] = worker
        return worker

    def prefill(self, address: str) -> PrefillClient:
        return FakePrefillClient(self.workers[address], self, address)

    def decode(self, address: str) -> DecodeClient:
        return FakeDecodeClient(self.workers[address], self, address)

    @property
    def idle(self) -> bool:
        """No living worker holds anything."""
        return not any(worker.holding for worker in self.workers.values())


async def _next(queue: asyncio.Queue[T], dead: asyncio.Event, name: str) -> T:
    getter, death = asyncio.ensure_future(queue.get()), asyncio.ensure_future(dead.wait())
    try:
        await asyncio.wait([getter, death], return_when=asyncio.FIRST_COMPLETED)
        if dead.is_set():
            raise WorkerLostError(f"the connection to {name} broke")
        return getter.result()
    finally:
        getter.cancel()
        death.cancel()
