"""OpenAI's response forms: what chat completions and completions have in common, and the two differ in.

Pure but for reading pieces: it renders answers, it does not make them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from router.answer import Usage
from router.sse import DONE, encode_json
from router.text_answer import Job, Piece


@dataclass(frozen=True, slots=True)
class Form:
    """How one response is to look. ``created`` is in Unix seconds."""

    response_id: str
    model: str
    created: int
    chat: bool
    include_usage: bool = False
    return_token_ids: bool = False

    @property
    def kind(self) -> str:
        return "chat.completion" if self.chat else "text_completion"


def usage_json(usages: Sequence[Usage]) -> dict[str, Any]:
    """Several answers' tokens, added up."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


async def whole_response(form: Form, jobs: Sequence[Job], source: AsyncGenerator[Piece, None]) -> dict[str, Any]:
    """The body of a response that is not streamed."""
    texts: list[list[str]] = [[] for _ in jobs]
    token_ids: list[list[int]] = [[] for _ in jobs]
    reasons = ["" for _ in jobs]
    usages = []
    async with aclosing(source) as arrived:
        async for piece in arrived:
            texts[piece.index].append(piece.text)
            token_ids[piece.index].extend(piece.token_ids)
            if piece.finished is not None:
                reasons[piece.index] = piece.finished.reason.value
                usages.append(piece.finished.usage)
    choices = []
    for index, job in enumerate(jobs):
        text = "".join(texts[index])
        choice: dict[str, Any] = {"index": index}
        choice |= {"message": {"role": "assistant", "content": text, "refusal": None}} if form.chat else {"text": text}
        choice |= {"logprobs": None, "finish_reason": reasons[index]}
        if form.return_token_ids:
            choice |= {"token_ids": token_ids[index], "prompt_token_ids": list(job.request.prompt)}
        choices.append(choice)
    return {
        "id": form.response_id,
        "object": form.kind,
        "created": form.created,
        "model": form.model,
        "choices": choices,
        "usage": usage_json(usages),
    }


async def streamed_response(
    form: Form, jobs: Sequence[Job], source: AsyncGenerator[Piece, None]
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed response: one for each piece that brings text (or ids that are wanted)."""
    # The same for all events, so it is encoded once.
    head = encode_json(
        {
            "id": form.response_id,
            "object": form.kind + ".chunk" if form.chat else form.kind,
            "created": form.created,
            "model": form.model,
        }
    )[:-1]
    no_usage = ',"usage":null' if form.include_usage else ""
    begun = [False for _ in jobs]
    usages = []
    async with aclosing(source) as arrived:
        async for piece in arrived:
            first = not begun[piece.index]
            begun[piece.index] = True
            if piece.finished is not None:
                usages.append(piece.finished.usage)
            elif not (first or piece.text or form.return_token_ids):
                continue  # half a character: its text comes with the other half
            choice = _chunk_choice(form, jobs[piece.index], piece, first)
            yield f'data: {head},"choices":[{encode_json(choice)}]{no_usage}}}\n\n'.encode()
    if form.include_usage:
        yield f'data: {head},"choices":[],"usage":{encode_json(usage_json(usages))}}}\n\n'.encode()
    yield DONE


def _chunk_choice(form: Form, job: Job, piece: Piece, first: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": piece.index}
    if form.chat:
        delta = {"role": "assistant", "content": piece.text} if first else {}
        if piece.text:
            delta["content"] = piece.text
        choice["delta"] = delta
    else:
        choice["text"] = piece.text
    choice["logprobs"] = None
    choice["finish_reason"] = piece.finished.reason.value if piece.finished is not None else None
    if form.return_token_ids:
        choice["token_ids"] = list(piece.token_ids)
        if first:
            choice["prompt_token_ids"] = list(job.request.prompt)
    return choice
