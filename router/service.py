"""One request, end to end. The life of a request in `generate`'s background task:

    queue ──▶ place ──▶ reserve on D ──▶ prefill on P ──▶ first token ──▶ D's stream ──▶ finished
      ▲         │           │                 │  (from P, at once)            │
      │         └─ no room ─┘                 └───────────── lost ────────────┤
      └───────────────── again, with the tokens accepted so far ◀─────────────┘

(P, D: a prefill and a decode worker. In colocated mode D computes the prompt too, and in adaptive mode when
it lacks little of it.)

Retries live here and nowhere else. Want of capacity is not a failure: the request keeps its place in
the queue and waits. A lost worker, one that leaves, or a broken handoff costs one of
``router.max_attempts``; the next attempt is forced through the accepted tokens. Nothing waits past the
request's deadline.

Knows token ids; text, HTTP and gRPC are its callers' business.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from dataclasses import replace

from common.config import Mode, RouterConfig
from common.errors import (
    BatonError,
    DeadlineError,
    NoCapacityError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
)
from common.hashing import prefix_hashes, root_hash
from common.lifecycle import Tasks
from common.messages import GenerationRequest
from common.metrics import RouterMetrics
from common.workers import Role
from router.answer import AnswerEvent
from router.attempt import Attempt
from router.attempt_runner import RETRY_S, AttemptRunner, Pair
from router.ending import reason_to_end
from router.live_request import LiveRequest, Pulse
from router.placement import Decision, PullCost, place_local, place_pair, place_single
from router.queue import AdmissionQueue
from router.records import Records, attempt_fields, request_fields
from router.registry import Registry
from router.worker import Worker
from router.worker_link import ClientFactory

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
"""What clients are told when they are turned away."""

BACKLOG_CHUNKS = 2
"""A prefill worker gets no more while it has this many chunks of work: reserved blocks are idle blocks."""

STOP_TIMEOUT_S = 5.0

PROBE = "ready"
"""How the ids of the router's own requests begin."""


class RouterService:
    """Serves requests on the workers of its ``registry``.

    ``rng`` draws seeds and ids; ``chunk_tokens`` is the prefill workers' token budget per step.
    """

    def __init__(
        self,
        config: RouterConfig,
        clients: ClientFactory,
        *,
        router_id: str,
        rng: random.Random,
        mode: Mode = "split",
        chunk_tokens: int = 512,
        suspect_after_s: float = 5.0,
        metrics: RouterMetrics | None = None,
    ) -> None:
        self.config = config
        self.router_id = router_id
        self.metrics = metrics or RouterMetrics()
        self.records = Records(config.recent_requests)
        self.pulse = Pulse()
        self.registry = Registry(
            clients, router_id=router_id, mode=mode, suspect_after_s=suspect_after_s, on_news=self._news
        )
        self._queue = AdmissionQueue()
        self._tasks = Tasks()
        self._runner = AttemptRunner(router_id, self._tasks, self._news)
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._read: dict[str, LiveRequest] = {}
        """Requests whose answer somebody still reads."""
        self._pulls = PullCost(config.pull_token_cost, config.pull_fixed_tokens) if config.pulls else None
        self._backlog_tokens = BACKLOG_CHUNKS * chunk_tokens
        self._rng = rng
        self._arrivals = 0
        self._stopping = False

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def stopping(self) -> bool:
        return self._stopping

    def draw_seed(self) -> int:
        """A seed for a request that has none: its randomness is fixed before its first attempt."""
        return self._rng.getrandbits(63)

    def draw_id(self, prefix: str) -> str:
        return f"{prefix}-{self._rng.getrandbits(128):032x}"

    async def generate(
        self, request: GenerationRequest, slo: Mapping[str, float] | None = None, follows: str | None = None
    ) -> AsyncGenerator[AnswerEvent, None]:
        """The tokens of the answer in order, then Finished; or raises the BatonError that ended it.

        ``request`` describes the first attempt; its id is new to this router. ``follows``: the id of an
        earlier request with the same prompt; this one waits until that prompt's KV has been handed over, and
        shares it. Closing the generator cancels the request at whatever stage it is.
        """
        live = self._open(request, slo, self._read.get(follows) if follows is not None else None)
        self._read[request.request_id] = live
        try:
            async with aclosing(live.answer.events()) as events:
                async for event in events:
                    yield event
        finally:
            del self._read[request.request_id]
            task = self._serving.get(request.request_id)
            if task is not None and not live.answer.ended:
                task.cancel()

    def end_at(self, request_id: str, num_tokens: int) -> None:
        """The reader of an answer says that it is complete after ``num_tokens`` tokens; of those that
        `generate` gave, it drops what is beyond. `generate` then gives Finished."""
        live = self._read[request_id]
        live.end_at(num_tokens)
        task = self._serving.get(request_id)
        if live.on_stop is None and task is not None:
            task.cancel()  # it waits for its next attempt

    async def close(self, grace_s: float = 0.0) -> None:
        """Takes nothing new, gives what is under way ``grace_s`` to end, and fails the rest."""
        self._stopping = True
        if self._serving and grace_s > 0:
            await asyncio.wait(list(self._serving.values()), timeout=grace_s)
        for task in list(self._serving.values()):
            task.cancel()
        if self._serving:
            await asyncio.wait(list(self._serving.values()), timeout=STOP_TIMEOUT_S)
        await self._runner.close()
        await self.registry.close()
        await self._tasks.close()

    # ── from arrival to end ───────────────────────────────────────────────────────────────────────

    def _open(
        self, request: GenerationRequest, slo: Mapping[str, float] | None, leader: LiveRequest | None
    ) -> LiveRequest:
        if self._stopping:
            raise UnavailableError("the router is stopping", retry_after_s=RETRY_AFTER_S)
        timeout_s = min(request.timeout_s or self.config.timeout_s, self.config.timeout_s)
        model = self.registry.model
        root = root_hash(model.fingerprint if model is not None else "", request.cache_salt)
        self._arrivals += 1
        live = LiveRequest(
            replace(request, timeout_s=timeout_s),
            prefix_hashes(request.prompt, root),
            self._arrivals,
            asyncio.get_running_loop().time() + timeout_s,
            self.metrics,
            self.pulse,
            slo,
            leader,
        )
        self.records.open(live.record)
        task = self._tasks.spawn(self._serve(live), f"request {request.request_id}")
        self._serving[request.request_id] = task
        # Not in `_serve`: a task that is cancelled before its first step never runs.
        task.add_done_callback(lambda _: self._close(live, self._cancellation()))
        return live

    async def _serve(self, live: LiveRequest) -> None:
        """The request's task: everything that happens to it, and its one end."""
        error: BatonError | None = None
        try:
            async with live.timeout:
                await self._answer(live)
        except TimeoutError:
            error = DeadlineError(f"the request took longer than its {live.request.timeout_s:g} s")
        except asyncio.CancelledError:
            error = self._cancellation()
        except BatonError as raised:
            error = raised
        except Exception as raised:
            log.exception("request failed", extra={"request_id": live.request.request_id})
            error = BatonError(f"internal error ({type(raised).__name__})")
        self._close(live, error)

    def _close(self, live: LiveRequest, error: BatonError | None) -> None:
        """The one end of a request (again: nothing happens)."""
        if self._serving.pop(live.request.request_id, None) is not None:
            live.close(error)
            self.records.close(live.record)
            level = logging.DEBUG if live.record.id.startswith(PROBE) else logging.INFO
            log.log(level, "request %s", live.record.state, extra=request_fields(live.record))

    def _cancellation(self) -> BatonError:
        if self._stopping:
            return UnavailableError("the router is stopping", retry_after_s=RETRY_AFTER_S)
        return RequestCancelledError("the client went away")

    async def _answer(self, live: LiveRequest) -> None:
        """Attempts until one succeeds; raises what the last one raised."""
        if live.leader is not None:
            await live.leader.kv_ready.wait()
        while live.record.finish_reason is None:
            pair, attempt = await self._placed(live)
            try:
                await self._runner.run(live, pair, attempt)
                return
            except NoCapacityError:
                continue
            except BatonError as error:
                if live.answer.ended:
                    return
                # The worker may have been lost after its last token, before it could say so.
                reason = reason_to_end(live.answer.tokens, live.request, self.registry.model)
                if reason is not None:
                    live.finish(reason)
                    return
                # One that cancelled without being asked is leaving: another may finish the work.
                retriable = error.retriable or isinstance(error, RequestCancelledError)
                if not retriable or live.failures >= self.config.max_attempts:
                    raise
                log.warning(
                    "placed again: %s",
                    error.message,
                    extra={
                        "request_id": live.request.request_id,
                        "error_code": error.code,
                        **attempt_fields(live.record),
                    },
                )
            finally:
                self.registry.release_leavers()

    # ── queue and placement ───────────────────────────────────────────────────────────────────────

    def _news(self) -> None:
        """Capacity may have appeared, or members gone."""
        self._queue.news()

    async def _placed(self, live: LiveRequest) -> tuple[Pair, Attempt]:
        """Waits for its turn, and for a pair of workers that can take the request."""
        loop = asyncio.get_running_loop()
        queued_at = loop.time()
        live.record.state = "queued"
        try:
            with self._queue.turn(live.request.priority, live.arrival) as turn:
                pair = self._choose(live) if turn.is_head else None
                if pair is None and not live.admitted and len(self._queue) > self.config.max_queue:
                    raise OverloadedError(
                        f"the queue is full: router.max_queue is {self.config.max_queue}", retry_after_s=RETRY_AFTER_S
                    )
                live.admitted = True
                self.metrics.requests_queued.set(len(self._queue))
                while pair is None:
                    await turn.woken(RETRY_S)
                    pair = self._choose(live)
                # Booked before the next in line looks.
                return pair, self._runner.begin(live, pair)
        finally:
            self.metrics.requests_queued.set(len(self._queue))
            live.record.queue_s += loop.time() - queued_at

    def _choose(self, live: LiveRequest) -> Pair | None:
        """A placement now, or None: there is no room at present, or a role is missing for a moment."""
        registry = self.registry
        missing = registry.missing(asyncio.get_running_loop().time())
        if missing is not None:
            role, missing_s = missing
            live.record.waiting_for = registry.explain(role)
            if missing_s >= self.config.worker_patience_s:
                raise UnavailableError(live.record.waiting_for, retry_after_s=RETRY_AFTER_S)
            return None
        try:
            decision = self._decide(live)
        except NoCapacityError as error:
            live.record.waiting_for = error.message
            return None
        prefill = registry.worker(decision.prefill.address) if decision.prefill is not None else None
        return Pair(prefill, registry.worker(decision.decode.address), decision)

    def _decide(self, live: LiveRequest) -> Decision:
        """Where it goes. A follower goes where its leader's KV is: moving that again would cost a second copy
        of it, and only workers without room are worth that. Raises NoCapacityError."""
        hits = self.registry.index.hits(live.hashes)
        places = live.leader.places if live.leader is not None else []
        if places:
            # What the workers tell of their caches may still be on its way; this is known.
            hits |= dict.fromkeys(places, len(live.hashes) * self.registry.index.unit_tokens)
            try:
                return self._place(live, hits, places)
            except NoCapacityError:
                pass
        return self._place(live, hits, [])

    def _place(self, live: LiveRequest, hits: Mapping[str, int], among: Collection[str]) -> Decision:
        """``among``: the addresses that will do, as far as any of them is ready."""

        def ready(role: Role) -> list[Worker]:
            workers = self.registry.ready(role)
            return [worker for worker in workers if worker.address in among] or workers

        mode, demand, avoid = self.registry.mode, live.demand, live.avoid
        if mode == "colocated":
            return place_single(demand, ready(Role.BOTH), hits, avoid=avoid, pulls=self._pulls)
        if mode == "adaptive" and not live.record.id.startswith(PROBE):  # a probe has to see the whole way
            most_tokens = self.config.local_prefill_tokens
            local = place_local(demand, ready(Role.DECODE), hits, most_tokens=most_tokens, avoid=avoid)
            if local is not None:
                return local
        return place_pair(
            demand,
            ready(Role.PREFILL),
            ready(Role.DECODE),
            hits,
            backlog_tokens=self._backlog_tokens,
            avoid=avoid,
            pulls=self._pulls,
        )
