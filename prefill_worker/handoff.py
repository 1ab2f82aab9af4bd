"""One prompt on a prefill worker, from its place in the queue to the decode worker's receipt.

    queued ─▶ admitted (has blocks) ─▶ chunks, each layer pushed as it is complete ─▶ first token
           ─▶ commit ─▶ receipt ─▶ blocks released

The push is opened as soon as the prompt has blocks, beside the computing. What is complete before the
peer has answered is remembered and pushed then. The first token does not wait for the push: the
router hears it at once.

This module knows sequences, pieces and a `KVPush`; not how bytes travel, nor what is computed next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.errors import BatonError
from common.failpoints import Failpoints
from common.handoff import HandoffCommit, HandoffReceipt, Ticket
from common.messages import FirstToken, HandoffDone, PrefillEvent
from engine.ports import KVPush, KVSender
from engine.sequence import Sequence, SequenceOutput


class Handoff:
    """``num_layers`` and ``block_size`` are the worker's own, and what is pushed is counted in its blocks,
    from the one on that holds the first token which the decode worker lacks."""

    def __init__(
        self,
        sequence: Sequence,
        ticket: Ticket,
        sender: KVSender,
        num_layers: int,
        block_size: int,
        failpoints: Failpoints,
    ) -> None:
        self.sequence = sequence
        self.ticket = ticket
        self.events: asyncio.Queue[PrefillEvent | BatonError | None] = asyncio.Queue()
        """What the router is told; an error or None ends it."""
        self._sender = sender
        self._failpoints = failpoints
        self._block_size = block_size
        self._first_block = ticket.cached_tokens // block_size
        self._num_blocks = -(-sequence.num_context // block_size) - self._first_block
        self._complete = [0] * num_layers
        self._pushed = [0] * num_layers
        self._push: KVPush | None = None
        self._admitted = asyncio.Event()
        self._computed: asyncio.Future[SequenceOutput] = asyncio.get_running_loop().create_future()

    # ── told by the worker, on the event loop ─────────────────────────────────────────────────────

    def admitted(self) -> None:
        """The sequence has its blocks; those of a cached prefix are complete in every layer."""
        for layer in range(len(self._complete)):
            self._mark(layer, self.sequence.num_computed)
        self._admitted.set()

    def layer_complete(self, layer: int, num_tokens: int) -> None:
        """In ``layer`` the KV of the first ``num_tokens`` tokens is written."""
        self._mark(layer, num_tokens)
        if self._push is not None:
            self._push_complete(self._push, layer)

    def computed(self, output: SequenceOutput) -> None:
        """The first token was sampled, or computing failed."""
        if not self._computed.done():
            self._computed.set_result(output)

    # ── the handoff itself ────────────────────────────────────────────────────────────────────────

    async def run(self, now: Callable[[], float]) -> HandoffReceipt:
        """Carries the handoff through. Raises what broke it; nothing reads the blocks afterwards."""
        push: KVPush | None = None
        try:
            await self._admitted.wait()
            block_ids = self.sequence.block_ids[self._first_block : self._first_block + self._num_blocks]
            if self._failpoints:
                await self._failpoints.reach("open")
            push = await self._sender.open(self.ticket, block_ids)
            if self._failpoints:
                await self._failpoints.reach("push")
            self._push = push
            for layer in range(len(self._complete)):
                self._push_complete(push, layer)
            output = await asyncio.shield(self._computed)
            if output.error is not None:
                raise output.error
            assert output.token is not None
            if self._failpoints:
                await self._failpoints.reach("commit")
            started = now()
            receipt = await push.commit(
                HandoffCommit(
                    self.ticket.ticket_id,
                    output.token,
                    output.index,
                    self.ticket.layout.num_layers * len(self.ticket.block_ids),
                    output.finish,
                    self.sequence.context,
                    output.logprobs,
                )
            )
            request = self.sequence.request
            self.events.put_nowait(
                HandoffDone(
                    request.request_id,
                    request.attempt,
                    receipt.num_bytes,
                    self._num_blocks,
                    push.transport,
                    now() - started,
                )
            )
            return receipt
        except BaseException:
            if push is not None:
                await push.abort("the prefill worker gave up")
            raise
        finally:
            self._push = None

    def first_token(self, output: SequenceOutput, now: float) -> None:
        """Tells the router the first token."""
        sequence = self.sequence
        assert output.token is not None
        assert sequence.started_at is not None
        self.events.put_nowait(
            FirstToken(
                sequence.request.request_id,
                sequence.request.attempt,
                output.index,
                output.token,
                sequence.context,
                output.finish,
                queue_s=sequence.started_at - sequence.arrival,
                prefill_s=now - sequence.started_at,
                logprobs=output.logprobs,
                prompt_logprobs=tuple(sequence.prompt_logprobs),
            )
        )

    def _mark(self, layer: int, num_tokens: int) -> None:
        """Only blocks that will not be written again are complete: full ones, and the last one when
        the whole context is there."""
        if num_tokens >= self.sequence.num_context:
            blocks = self._first_block + self._num_blocks
        else:
            blocks = num_tokens // self._block_size
        self._complete[layer] = max(self._complete[layer], blocks - self._first_block)

    def _push_complete(self, push: KVPush, layer: int) -> None:
        first, end = self._pushed[layer], self._complete[layer]
        if end > first:
            push.push(layer, first, end - first)
            self._pushed[layer] = end
