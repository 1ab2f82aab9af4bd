"""Runs one attempt on one pair of workers, and leaves both free of it, however it ends.

    pair:   D.reserve ─▶ P.prefill(ticket) ─▶ first token from P ─▶ tokens from D's stream ─▶ finish
    alone:  D.submit  ─▶ tokens from D's stream ─▶ finish          (colocated; adaptive, a short prompt)

P and D can each fail at any moment; whichever does first ends the attempt, and the other is told. D is
cancelled by a message, P by closing its stream.

Knows one attempt; whether there is another one is the service's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.errors import (
    BatonError,
    HandoffError,
    NoCapacityError,
    PeerLostError,
    UnavailableError,
    WorkerLostError,
)
from common.handoff import Ticket
from common.lifecycle import Tasks
from common.messages import FirstToken
from common.workers import Role
from router.attempt import Attempt
from router.live_request import SETTLE_TIMEOUT_S, LiveRequest
from router.placement import Decision
from router.worker import Worker

log = logging.getLogger(__name__)

RETRY_S = 0.25
"""A worker that refused for want of capacity is asked again after this time, without any news."""

_SIGNS_OF_LOSS = (UnavailableError, PeerLostError)
"""After these a worker may be gone without its link knowing yet."""

RESERVE_TIMEOUT_S = 5.0
CANCEL_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0
"""At the end, cancels that are on their way get this long."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Where an attempt runs; ``prefill`` is None when the decode worker does it alone."""

    prefill: Worker | None
    decode: Worker
    decision: Decision


class AttemptRunner:
    """``news`` is called when capacity may have become free."""

    def __init__(self, router_id: str, tasks: Tasks, news: Callable[[], None]) -> None:
        self._router_id = router_id
        self._tasks = tasks
        self._cancels = Tasks()
        self._news = news

    def begin(self, live: LiveRequest, pair: Pair) -> Attempt:
        """Books the attempt on both workers, so that the next placement sees it."""
        attempt = live.begin_attempt(pair.decision)
        context = live.demand.context_tokens
        for worker, choice in ((pair.prefill, pair.decision.prefill), (pair.decode, pair.decision.decode)):
            if worker is not None and choice is not None:
                missing = max(0, context - choice.hit_tokens)
                pulled = choice.pull.num_tokens if choice.pull is not None else 0
                tokens = context if worker is pair.decode else max(1, missing - pulled)
                worker.begin(attempt, tokens, -(-missing // worker.block_size))
        return attempt

    async def run(self, live: LiveRequest, pair: Pair, attempt: Attempt) -> None:
        """Returns when the answer is complete and both workers have said their last word.

        Raises what ended the attempt. NoCapacityError: a worker is full, and nothing was lost by it.
        """
        held = True  # D may hold something for this attempt
        live.on_stop = partial(self._stop, pair.decode, attempt)
        leg: asyncio.Task[None] | None = None
        try:
            ticket = await self._reserve(live, pair, attempt)
            if pair.prefill is not None and ticket is not None:
                leg = self._tasks.spawn(self._prefill(live, pair.prefill, attempt, ticket), f"prefill {attempt.key}")
            finish = await attempt.outcome
            held = False
            if live.answer.lacks_prompt and leg is not None:
                await asyncio.wait([leg], timeout=SETTLE_TIMEOUT_S)
            if live.answer.lacks_prompt:
                raise HandoffError("the prompt's logprobs were lost with the prefill worker")
            live.settle(finish, alone=pair.prefill is None, colocated=pair.decode.role is Role.BOTH)
            if leg is not None:
                await asyncio.wait([leg], timeout=SETTLE_TIMEOUT_S)
        except NoCapacityError as error:
            held = leg is not None
            live.drop_attempt(error, reserved=held)
            raise
        except BatonError as error:
            culprits = _culprits(pair, attempt, error)
            for worker in (pair.prefill, pair.decode):
                # One that lives ends its pause with its next report.
                if worker is not None and worker.address in culprits and isinstance(error, _SIGNS_OF_LOSS):
                    self._pause(worker)
            live.fail_attempt(error, culprits)
            raise
        finally:
            live.on_stop = None
            if leg is not None:
                leg.cancel()
            if held and not attempt.stopping:
                self._cancels.spawn(self._cancel(pair.decode, attempt), f"cancel {attempt.key}")
            for worker in (pair.prefill, pair.decode):
                if worker is not None:
                    worker.end(attempt)
            self._news()

    async def close(self) -> None:
        """Lets the cancels of ended attempts through: before the workers' clients are closed."""
        await self._cancels.settle(CLOSE_TIMEOUT_S)
        await self._cancels.close()

    def _stop(self, decode: Worker, attempt: Attempt) -> None:
        """No more tokens are wanted. D ends the attempt, and with its last word says what it took."""
        if not attempt.stopping:
            attempt.stopping = True
            self._cancels.spawn(self._cancel(decode, attempt), f"stop {attempt.key}")

    async def _reserve(self, live: LiveRequest, pair: Pair, attempt: Attempt) -> Ticket | None:
        """D's promise of blocks. None from a worker that does it all."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        call = loop.create_task(self._ask(pair, attempt), name=f"reserve {attempt.key}")
        try:
            # A worker that is lost meanwhile ends the attempt, and with it the wait.
            either: list[asyncio.Future[Any]] = [call, attempt.outcome]
            await asyncio.wait(either, timeout=RESERVE_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                ticket = call.result()
            elif attempt.outcome.done():
                attempt.outcome.result()  # raises, or the whole answer has overtaken the worker's word
                ticket = None
            else:
                raise WorkerLostError(
                    f"{pair.decode.worker_id} did not answer a reservation within {RESERVE_TIMEOUT_S:g} s"
                )
        except NoCapacityError:
            self._pause(pair.decode)
            raise
        finally:
            call.cancel()
        pair.decode.took(attempt)
        live.record.reserve_s = loop.time() - started_at
        live.count_attempt()
        return ticket

    async def _ask(self, pair: Pair, attempt: Attempt) -> Ticket | None:
        client = pair.decode.decode_client
        if pair.prefill is not None:
            return await client.reserve(self._router_id, attempt.request)
        await client.submit(self._router_id, attempt.request)
        return None

    async def _prefill(self, live: LiveRequest, worker: Worker, attempt: Attempt, ticket: Ticket) -> None:
        """P's leg: the first token at once, then word that D has the KV. Its failure fails the attempt."""
        handed_off = False
        try:
            async with aclosing(worker.prefill_client.prefill(attempt.request, ticket)) as events:
                worker.took(attempt)
                async for event in events:
                    if isinstance(event, FirstToken):
                        worker.outstanding.computed(attempt.key)
                        self._news()
                        live.first_token(event)
                    else:
                        live.handed_off(event)
                        handed_off = True
            if not handed_off:
                raise WorkerLostError(f"{worker.worker_id} ended a prefill without a handoff")
        except BatonError as error:
            if attempt.decoding or handed_off:
                return  # D has the KV and goes on: P does not matter any more
            if isinstance(error, NoCapacityError):
                self._pause(worker)
            attempt.fail(error, worker.address)
        except Exception as error:
            log.exception("prefill failed", extra=_about(attempt, worker))
            attempt.fail(BatonError(f"internal error ({type(error).__name__})"), worker.address)
        finally:
            worker.end(attempt)
            self._news()

    def _pause(self, worker: Worker) -> None:
        """Nothing more goes to the worker until it reports, or for a moment: it has no capacity, or it
        may be gone without its link knowing yet.
        """
        worker.refused()

        def retry() -> None:
            worker.may_retry()
            self._news()

        asyncio.get_running_loop().call_later(RETRY_S, retry)

    async def _cancel(self, decode: Worker, attempt: Attempt) -> None:
        """Tells D that the attempt is over, until it has heard or its connection is gone: then it ends all
        that this router asked for over it.
        """
        connection, pause_s = decode.connection, RETRY_S
        while decode.connection is connection and decode.alive:
            try:
                async with asyncio.timeout(CANCEL_TIMEOUT_S):
                    await decode.decode_client.cancel(*attempt.key)
                return
            except (BatonError, TimeoutError) as error:
                log.warning("could not cancel: %s", error, extra=_about(attempt, decode))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, CANCEL_TIMEOUT_S)


def _about(attempt: Attempt, worker: Worker) -> dict[str, object]:
    request_id, number = attempt.key
    return {"request_id": request_id, "attempt": number, "worker_id": worker.worker_id}


def _culprits(pair: Pair, attempt: Attempt, error: BatonError) -> tuple[str, ...]:
    """The workers that the next attempt should avoid; a broken handoff has two ends."""
    if isinstance(error, HandoffError) and pair.prefill is not None:
        return (pair.prefill.address, pair.decode.address)
    return attempt.culprits or (pair.decode.address,)
