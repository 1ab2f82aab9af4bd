"""One attempt at an answer: one request on one pair of workers.

An attempt ends once, with the decode worker's `Finish` or with an error, and the `outcome` future says
so to whoever waits. Token frames come in through `deliver`, from whichever stream carries them; the
registry calls `fail` when a worker that takes part is lost.

Knows nothing of queues, retries or how frames travel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from common.errors import BatonError, HandoffError, from_wire
from common.messages import Finish, FinishReason, GenerationRequest, Logprobs, TokenDelta

AttemptKey = tuple[str, int]
"""(request id, attempt number)."""


Accept = Callable[[int, Sequence[int], Sequence[Logprobs], Sequence[Logprobs]], None]
"""(index of the first, tokens, their logprobs, the prompt's logprobs)."""


class Attempt:
    """``accept`` takes tokens, and raises a BatonError when they do not fit."""

    def __init__(self, request: GenerationRequest, accept: Accept) -> None:
        self.request = request
        self.key: AttemptKey = (request.request_id, request.attempt)
        self.decoding = False
        """The decode worker was heard of: the handoff is behind us, whatever the prefill worker says."""
        self.outcome: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()
        # An attempt may be dropped (cancel, deadline) before anybody asks for its outcome.
        self.outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.stopping = False
        """The decode worker was told that no more tokens are wanted: it may end at any of them."""
        self.culprits: tuple[str, ...] = ()
        """Addresses of the workers that the next attempt should avoid."""
        self._accept = accept

    def deliver(self, delta: TokenDelta, address: str) -> None:
        """One delta of the worker at ``address``."""
        if self.outcome.done():
            return
        self.decoding = True
        try:
            if delta.tokens:
                self._accept(delta.first_index, delta.tokens, delta.logprobs, delta.prompt_logprobs)
        except BatonError as error:
            self.fail(error, address)
            return
        if delta.finish is not None:
            self._finish(delta.finish, address)

    def fail(self, error: BatonError, *addresses: str) -> None:
        """Ends the attempt; the workers at ``addresses`` are to blame."""
        if not self.outcome.done():
            self.culprits = addresses
            self.outcome.set_exception(error)

    def _finish(self, finish: Finish, address: str) -> None:
        if finish.reason is FinishReason.ERROR:
            self.fail(from_wire(finish.error_code, finish.error_message), address)
        elif finish.reason is FinishReason.CANCELLED and not self.stopping:
            self.fail(HandoffError("the decode worker gave the request up without being asked"), address)
        else:
            self.outcome.set_result(finish)
