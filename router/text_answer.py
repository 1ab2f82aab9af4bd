"""Between text and token ids: prompts in, pieces of text out.

The service knows ids only, the OpenAI endpoints speak text; this is the one place where they meet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

from common.errors import BatonError
from common.lifecycle import Tasks
from common.messages import GenerationRequest
from router.answer import Finished
from router.service import RouterService

LOOP_CHARACTERS = 16_384
"""Texts up to this length are tokenized on the event loop; longer ones would hold up every stream."""

P = ParamSpec("P")
T = TypeVar("T")


class TextStream(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class Tokenizer(Protocol):
    """What the gateway needs of `router.tokenizer.Tokenizer`."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str: ...

    def stream(self) -> TextStream: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One answer that is wanted."""

    request: GenerationRequest
    slo: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event adds to the answer of job ``index``; the last one has ``finished``."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    finished: Finished | None = None


async def off_loop(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``function(…)``, in a thread when ``size`` (characters) says that it takes a while."""
    if size <= LOOP_CHARACTERS:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


async def pieces(service: RouterService, tokenizer: Tokenizer, job: Job, index: int = 0) -> AsyncGenerator[Piece, None]:
    """The answer as text. Stop tokens that the client named end the text and are no part of it."""
    stream = tokenizer.stream()
    hidden = job.request.sampling.stop_token_ids
    async with aclosing(service.generate(job.request, job.slo)) as events:
        async for event in events:
            if isinstance(event, Finished):
                yield Piece(index, stream.flush(), (), event)
            else:
                visible = [token for token in event.tokens if token not in hidden] if hidden else event.tokens
                yield Piece(index, stream.push(visible), event.tokens)


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
