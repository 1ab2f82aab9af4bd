"""Between text and token ids: prompts in, pieces of text out.

The service knows ids only, the OpenAI endpoints speak text; this is the one place where they meet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, Protocol, TypeVar

from common.errors import BatonError
from common.lifecycle import Tasks
from common.messages import FinishReason, GenerationRequest, Logprobs
from router.answer import Finished
from router.service import RouterService
from router.stop_strings import StopStrings

LOOP_CHARACTERS = 16_384
"""Texts up to this length are tokenized on the event loop; longer ones would hold up every stream."""

P = ParamSpec("P")
T = TypeVar("T")


class TextStream(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class Tokenizer(Protocol):
    """What the gateway needs of `router.tokenizer.Tokenizer`."""

    @property
    def bos_token_id(self) -> int | None: ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str: ...

    def stream(self, skip_special_tokens: bool = True) -> TextStream: ...


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How an answer's tokens become its text. ``stops``: strings that end it, and are shown only with
    ``include_stop``; ``prefix``: shown before all else."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """One answer that is wanted. ``follows``: the request id of an earlier one to the same prompt."""

    request: GenerationRequest
    slo: Mapping[str, float] | None = None
    text: TextOptions = TextOptions()
    follows: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event adds to the answer of job ``index``; the last one has ``finished``. ``logprobs[i]``
    belongs to ``token_ids[i]``, where they are wanted; ``prompt_logprobs[i]``, in the first piece, to prompt
    token i + 1."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    finished: Finished | None = None
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()


class AnswerText:
    """The text of one answer while its tokens arrive.

    Stop tokens that the client named end the text and are no part of it. Stop strings are looked for from
    token ``min_tokens`` on; a token is taken in one at a time then, so that where the answer ends does not
    hang on how its tokens happened to arrive together.
    """

    def __init__(self, tokenizer: Tokenizer, job: Job) -> None:
        sampling = job.request.sampling
        self._stream = tokenizer.stream(job.text.skip_special_tokens)
        self._hidden = sampling.stop_token_ids
        self._stops = StopStrings(job.text.stops, job.text.include_stop) if job.text.stops else None
        self._min_tokens = sampling.min_tokens
        self.num_tokens = 0
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> tuple[str, bool]:
        """What may be shown now that ``tokens`` have come, and whether a stop string is complete. Then tokens
        after the one that completes it are left out; ``num_tokens`` counts the others."""
        if self._stops is None:
            self.num_tokens += len(tokens)
            visible = [token for token in tokens if token not in self._hidden] if self._hidden else tokens
            return self._stream.push(visible), False
        shown = []
        for token in tokens:
            text = self._stream.push((token,)) if token not in self._hidden else ""
            shown.append(self._seen(text))
            self.num_tokens += 1
            if self.stopped:
                break
        return "".join(shown), self.stopped

    def flush(self) -> tuple[str, bool]:
        """What remains at the end of the answer, and whether a stop string is complete (it may be only with
        what the last token left open)."""
        if not self.stopped:
            text = self._seen(self._stream.flush())
            return text + (self._stops.flush() if self._stops is not None else ""), self.stopped
        return "", True

    def _seen(self, text: str) -> str:
        if self._stops is None or self.num_tokens < self._min_tokens:
            return text
        shown, self.stopped = self._stops.push(text)
        return shown


async def off_loop(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``function(…)``, in a thread when ``size`` (characters) says that it takes a while."""
    if size <= LOOP_CHARACTERS:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


async def pieces(service: RouterService, tokenizer: Tokenizer, job: Job, index: int = 0) -> AsyncGenerator[Piece, None]:
    """The answer as text."""
    text = AnswerText(tokenizer, job)
    prefix = job.text.prefix
    async with aclosing(service.generate(job.request, job.slo, job.follows)) as events:
        async for event in events:
            if isinstance(event, Finished):
                rest, stopped = text.flush()
                yield Piece(index, rest, (), replace(event, reason=FinishReason.STOP) if stopped else event)
            elif not text.stopped:
                shown, stopped = text.push(event.tokens)
                num_taken = text.num_tokens - event.first_index
                if stopped:
                    service.end_at(job.request.request_id, text.num_tokens)
                logprobs = event.logprobs[:num_taken]
                yield Piece(index, prefix + shown, event.tokens[:num_taken], None, logprobs, event.prompt_logprobs)
                prefix = ""


async def pieces_of_all(
    service: RouterService, tokenizer: Tokenizer, jobs: Sequence[Job]
) -> AsyncGenerator[Piece, None]:
    """The pieces of several answers as they come. The first error ends all."""
    if len(jobs) == 1:
        async with aclosing(pieces(service, tokenizer, jobs[0])) as single:
            async for piece in single:
                yield piece
        return
    arrived: asyncio.Queue[Piece | BatonError] = asyncio.Queue()
    tasks = Tasks()

    async def pump(index: int, job: Job) -> None:
        try:
            async with aclosing(pieces(service, tokenizer, job, index)) as source:
                async for piece in source:
                    arrived.put_nowait(piece)
        except BatonError as error:
            arrived.put_nowait(error)

    try:
        for index, job in enumerate(jobs):
            tasks.spawn(pump(index, job), f"answer {index}")
        num_open = len(jobs)
        while num_open:
            item = await arrived.get()
            if isinstance(item, BatonError):
                raise item
            num_open -= item.finished is not None
            yield item
    finally:
        await tasks.close()
