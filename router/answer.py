"""The answer to one request: its tokens, accepted by index, and its end.

Whatever happens to the attempts behind it, an answer's tokens are 0, 1, 2, … with no gap and no
repeat, and once accepted they are final. One side writes (`accept`, `finish`, `fail`), the other reads
`events`; tokens that came in several frames while the reader was busy are read together.

Knows nothing of workers, text or HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from common.errors import BatonError, HandoffError
from common.messages import FinishReason, Logprobs


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that the client is told about. ``cached_tokens`` <= ``prompt_tokens``."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class NewTokens:
    """``tokens[i]`` has index ``first_index + i``, and ``logprobs[i]`` where they are wanted; with the first
    tokens come the ``prompt_logprobs``."""

    first_index: int
    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of an answer that succeeded."""

    reason: FinishReason
    usage: Usage


AnswerEvent = NewTokens | Finished


class Answer:
    """The tokens of one request so far; ``wants_logprobs``: a token without its logprobs is not accepted.
    ``num_prompt_logprobs``: so many come of the prompt's tokens, and before them nothing is read."""

    def __init__(self, wants_logprobs: bool = False, num_prompt_logprobs: int = 0) -> None:
        self.prompt_logprobs: tuple[Logprobs, ...] = ()
        self._num_prompt_logprobs = num_prompt_logprobs
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self._wants_logprobs = wants_logprobs
        self._cut = False
        self.duplicates = 0
        self._expected_twice: list[int] = []
        self._finished: Finished | None = None
        self._error: BatonError | None = None
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._finished is not None or self._error is not None

    @property
    def complete(self) -> bool:
        """It ended, and well."""
        return self._finished is not None

    @property
    def lacks_prompt(self) -> bool:
        """What is told of the prompt has not come yet."""
        return len(self.prompt_logprobs) < self._num_prompt_logprobs

    def accept_prompt(self, logprobs: Sequence[Logprobs]) -> None:
        """What the model thought of the prompt's tokens; only the first word counts."""
        if self.lacks_prompt and len(logprobs) == self._num_prompt_logprobs:
            self.prompt_logprobs = tuple(logprobs)
            self._changed.set()

    def restart(self) -> None:
        """Forgets tokens that nobody can have read, since what is told of the prompt was lost with a worker."""
        if self.lacks_prompt:
            self.tokens.clear()
            self.logprobs.clear()

    def expect_twice(self, index: int) -> None:
        """Token ``index`` comes from two workers (the prefill worker, and with the handoff the decode
        worker); the second one is no duplicate to be counted."""
        self._expected_twice.append(index)

    def accept(self, first_index: int, tokens: Sequence[int], logprobs: Sequence[Logprobs] = ()) -> int:
        """Takes the tokens that are new and returns their number; repeats are dropped and counted.

        Raises HandoffError when an index or a token's logprobs are missing, or when a repeat differs from
        what was accepted.
        """
        if self._wants_logprobs and len(logprobs) != len(tokens):
            raise HandoffError(f"{len(tokens)} tokens came with the logprobs of {len(logprobs)}")
        if self.ended:
            if not self._cut:  # else they are what its reader did not want, and nobody sent them twice
                self._count_repeats(first_index, len(tokens))
            return 0
        known = len(self.tokens) - first_index
        if known < 0:
            raise HandoffError(f"token {len(self.tokens)} is missing: the worker went on with token {first_index}")
        if known == 0:
            self._extend(tokens, logprobs)
            return len(tokens)
        repeats = list(tokens[:known])
        self._count_repeats(first_index, len(repeats))
        accepted = self.tokens[first_index : first_index + len(repeats)]
        if repeats != accepted:
            raise HandoffError(f"tokens from index {first_index} came twice and differ: {accepted}, then {repeats}")
        new = tokens[known:]
        if new:
            self._extend(new, logprobs[known:])
        return len(new)

    def _extend(self, tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> None:
        self.tokens.extend(tokens)
        if self._wants_logprobs:
            self.logprobs.extend(logprobs)
        self._changed.set()

    def _count_repeats(self, first_index: int, count: int) -> None:
        if count and first_index in self._expected_twice:
            self._expected_twice.remove(first_index)
            count -= 1
        self.duplicates += count

    def finish(self, reason: FinishReason, usage: Usage) -> None:
        """Ends the answer; what was ended before stays as it was."""
        if not self.ended:
            self._finished = Finished(reason, usage)
            self._changed.set()

    def cut(self, num_tokens: int, usage: Usage) -> None:
        """Ends the answer after its first ``num_tokens`` tokens, as its reader says: what came after them
        was not wanted, not even another end. Nothing happens to an answer that failed."""
        if self._error is None:
            del self.tokens[num_tokens:], self.logprobs[num_tokens:]
            self._finished = Finished(FinishReason.STOP, usage)
            self._cut = True
            self._changed.set()

    def fail(self, error: BatonError) -> None:
        if not self.ended:
            self._error = error
            self._changed.set()

    async def events(self) -> AsyncGenerator[AnswerEvent, None]:
        """All tokens from index 0, then Finished, or the error raised. Its writer owns the deadline."""
        num_read = 0
        while True:
            if num_read < len(self.tokens) and not self.lacks_prompt:
                first_index, num_read = num_read, len(self.tokens)
                new = slice(first_index, num_read)
                told = self.prompt_logprobs if first_index == 0 else ()
                yield NewTokens(first_index, tuple(self.tokens[new]), tuple(self.logprobs[new]), told)
            elif self._finished is not None:
                yield self._finished
                return
            elif self._error is not None:
                raise self._error
            else:
                self._changed.clear()
                await self._changed.wait()
