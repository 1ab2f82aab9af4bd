"""OpenAI's response forms: what chat completions and completions have in common, and the two differ in.

Pure but for reading pieces: it renders answers, it does not make them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from common.messages import Logprobs
from router.answer import Usage
from router.sse import DONE, encode_json
from router.text_answer import Job, Piece, Tokenizer


@dataclass(frozen=True, slots=True)
class Form:
    """How one response is to look. ``created`` is in Unix seconds; ``tokenizer`` spells the tokens out for
    logprobs."""

    response_id: str
    model: str
    created: int
    chat: bool
    tokenizer: Tokenizer
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False

    @property
    def kind(self) -> str:
        return "chat.completion" if self.chat else "text_completion"


def total_usage(jobs: Sequence[Job], usages: Mapping[int, Usage]) -> Usage:
    """The tokens of the answers to ``jobs``, added up; a prompt with several answers counts once."""
    prompts = [usage for index, usage in usages.items() if jobs[index].follows is None]
    return Usage(
        sum(usage.prompt_tokens for usage in prompts),
        sum(usage.cached_tokens for usage in prompts),
        sum(usage.completion_tokens for usage in usages.values()),
    )


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _usage_so_far(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


async def whole_response(form: Form, jobs: Sequence[Job], source: AsyncGenerator[Piece, None]) -> dict[str, Any]:
    """The body of a response that is not streamed."""
    texts: list[list[str]] = [[] for _ in jobs]
    token_ids: list[list[int]] = [[] for _ in jobs]
    logprobs: list[list[Logprobs]] = [[] for _ in jobs]
    prompts: list[Sequence[Logprobs] | None] = [() if job.request.sampling.score_prompt else None for job in jobs]
    reasons = ["" for _ in jobs]
    usages: dict[int, Usage] = {}
    async with aclosing(source) as arrived:
        async for piece in arrived:
            texts[piece.index].append(piece.text)
            token_ids[piece.index].extend(piece.token_ids)
            logprobs[piece.index].extend(piece.logprobs)
            if piece.prompt_logprobs:
                prompts[piece.index] = piece.prompt_logprobs
            if piece.finished is not None:
                reasons[piece.index] = piece.finished.reason.value
                usages[piece.index] = piece.finished.usage
    choices = []
    for index, job in enumerate(jobs):
        text = "".join(texts[index])
        choice: dict[str, Any] = {"index": index}
        choice |= {"message": {"role": "assistant", "content": text, "refusal": None}} if form.chat else {"text": text}
        told = _logprobs(form, job, token_ids[index], logprobs[index], prompts[index])
        choice |= {"logprobs": told, "finish_reason": reasons[index]}
        if form.return_token_ids:
            choice |= {"token_ids": token_ids[index], "prompt_token_ids": list(job.request.prompt)}
        choices.append(choice)
    return {
        "id": form.response_id,
        "object": form.kind,
        "created": form.created,
        "model": form.model,
        "choices": choices,
        "usage": usage_json(total_usage(jobs, usages)),
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
    num_prompt = sum(len(job.request.prompt) for job in jobs if job.follows is None)
    num_completion = 0
    begun = [False for _ in jobs]
    offsets = [0 for _ in jobs]
    usages: dict[int, Usage] = {}
    async with aclosing(source) as arrived:
        async for piece in arrived:
            num_completion += len(piece.token_ids)
            first = not begun[piece.index]
            begun[piece.index] = True
            if piece.finished is not None:
                usages[piece.index] = piece.finished.usage
            elif not (first or piece.text or piece.logprobs or form.return_token_ids):
                continue  # half a character: its text comes with the other half
            choice = _chunk_choice(form, jobs[piece.index], piece, first, offsets[piece.index])
            if not form.chat and choice["logprobs"] is not None:
                offsets[piece.index] += sum(len(token) for token in choice["logprobs"]["tokens"])
            usage = no_usage
            if form.continuous_usage:
                usage = f',"usage":{encode_json(_usage_so_far(num_prompt, num_completion))}'
            yield f'data: {head},"choices":[{encode_json(choice)}]{usage}}}\n\n'.encode()
    if form.include_usage:
        yield f'data: {head},"choices":[],"usage":{encode_json(usage_json(total_usage(jobs, usages)))}}}\n\n'.encode()
    yield DONE


def _chunk_choice(form: Form, job: Job, piece: Piece, first: bool, offset: int) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": piece.index}
    if form.chat:
        delta = {"role": "assistant", "content": piece.text} if first else {}
        if piece.text:
            delta["content"] = piece.text
        choice["delta"] = delta
    else:
        choice["text"] = piece.text
    prompt = piece.prompt_logprobs if first and job.request.sampling.score_prompt else None
    choice["logprobs"] = _logprobs(form, job, piece.token_ids, piece.logprobs, prompt, offset)
    choice["finish_reason"] = piece.finished.reason.value if piece.finished is not None else None
    if form.return_token_ids:
        choice["token_ids"] = list(piece.token_ids)
        if first:
            choice["prompt_token_ids"] = list(job.request.prompt)
    return choice


def _logprobs(
    form: Form,
    job: Job,
    token_ids: Sequence[int],
    logprobs: Sequence[Logprobs],
    prompt: Sequence[Logprobs] | None,
    offset: int = 0,
) -> dict[str, Any] | None:
    """The log probabilities of some tokens as the endpoint tells them; None where they are not wanted, or
    there are no tokens. ``prompt``: the prompt's come first, those of its first token are null; ``offset``:
    where the first token's text begins. Both are for completions."""
    if job.request.sampling.num_logprobs is None or not token_ids:
        return None
    if form.chat:
        return {"content": [_chat_entry(form.tokenizer, *pair) for pair in zip(token_ids, logprobs, strict=True)]}
    entries: list[Logprobs | None] = [*logprobs]
    if prompt is not None:
        token_ids = [*job.request.prompt, *token_ids]
        entries = [None, *prompt, *logprobs]
    tokens = [form.tokenizer.token_text(token) for token in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    wants_top = job.request.sampling.num_logprobs > 0
    return {
        "tokens": tokens,
        "token_logprobs": [entry and entry.logprob for entry in entries],
        "top_logprobs": [entry and _by_text(form.tokenizer, entry) for entry in entries] if wants_top else None,
        "text_offset": offsets,
    }


def _chat_entry(tokenizer: Tokenizer, token: int, logprobs: Logprobs) -> dict[str, Any]:
    def spelled(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token),
            "logprob": logprob,
            "bytes": list(tokenizer.token_bytes(token)),
        }

    top = [spelled(entry.token, entry.logprob) for entry in logprobs.top]
    return spelled(token, logprobs.logprob) | {"top_logprobs": top}


def _by_text(tokenizer: Tokenizer, logprobs: Logprobs) -> dict[str, float]:
    """Likeliest first; of tokens with the same text (parts of characters) the likeliest counts."""
    texts: dict[str, float] = {}
    for entry in logprobs.top:
        texts.setdefault(tokenizer.token_text(entry.token), entry.logprob)
    return texts
