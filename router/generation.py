"""What the gRPC interface asks for, served by the gateway: fields become the same bodies, jobs and answers
as over HTTP. The other end of `rpc/generation_service.py`; knows its plain types, and no gRPC.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from common.messages import Logprobs
from router.answer import Usage
from router.gateway import Gateway
from router.openai_form import total_usage
from router.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_fields
from router.text_answer import Job, Piece
from rpc.generation_service import (
    AnswerChunk,
    AnswerUsage,
    ChosenToken,
    Fields,
    LikelyToken,
    ServedModel,
    TokenizedText,
)

HEADROOM_S = 0.02
"""A request ends this long before its caller's patience, so that the caller hears why from the router."""

SOON_S = 1e-3
"""The least that is left of a deadline: a request's time is more than 0."""


class GatewayGeneration:
    """`rpc.generation_service.GenerationService` on a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @property
    def model_name(self) -> str:
        return self._gateway.model_name

    def draw_id(self) -> str:
        return self._gateway.service.draw_id("gen")

    async def open(
        self, request_id: str, fields: Fields, *, chat: bool, deadline_s: float | None
    ) -> AsyncGenerator[AnswerChunk, None]:
        """Raises the same errors as the HTTP endpoints do before their first byte."""
        given = dict(fields)
        body = parse_fields(ChatBody, given) if chat else parse_fields(CompletionBody, given)
        if deadline_s is not None:
            patience_s = max(SOON_S, deadline_s - HEADROOM_S)
            body = body.model_copy(update={"timeout_s": min(patience_s, body.timeout_s or patience_s)})
        jobs = await self._gateway.jobs(body, request_id)
        return self._chunks(jobs, bool(body.return_token_ids))

    async def _chunks(self, jobs: Sequence[Job], with_prompt: bool) -> AsyncGenerator[AnswerChunk, None]:
        begun: set[int] = set()
        usages: dict[int, Usage] = {}
        async with aclosing(self._gateway.answers(jobs)) as pieces:
            async for piece in pieces:
                first = piece.index not in begun
                begun.add(piece.index)
                if piece.finished is not None:
                    usages[piece.index] = piece.finished.usage
                yield AnswerChunk(
                    piece.index,
                    piece.text,
                    piece.token_ids,
                    tuple(map(self._chosen, piece.token_ids, piece.logprobs)),
                    piece.finished.reason.value if piece.finished is not None else None,
                    _usage(total_usage(jobs, usages)) if len(usages) == len(jobs) else None,
                    jobs[piece.index].request.prompt if first and with_prompt else (),
                    self._of_prompt(jobs[piece.index], piece),
                )

    async def tokenize(self, fields: Fields) -> TokenizedText:
        tokens = await self._gateway.tokenize(parse_fields(TokenizeBody, dict(fields)))
        return TokenizedText(tokens, self._gateway.service.registry.served_model().max_model_len)

    async def detokenize(self, fields: Fields) -> str:
        return await self._gateway.detokenize(parse_fields(DetokenizeBody, dict(fields)))

    def models(self) -> Sequence[ServedModel]:
        model = self._gateway.service.registry.model
        return [ServedModel(self.model_name, model.max_model_len if model is not None else 0, "baton")]

    async def is_ready(self) -> bool:
        return (await self._gateway.readiness.check()).ready

    def _of_prompt(self, job: Job, piece: Piece) -> tuple[ChosenToken, ...]:
        if not piece.prompt_logprobs:
            return ()
        return tuple(map(self._chosen, job.request.prompt[1:], piece.prompt_logprobs))

    def _chosen(self, token_id: int, logprobs: Logprobs) -> ChosenToken:
        tokenizer = self._gateway.tokenizer
        top = tuple(self._likely(likely.token, likely.logprob) for likely in logprobs.top)
        return ChosenToken(
            token_id, tokenizer.token_text(token_id), tokenizer.token_bytes(token_id), logprobs.logprob, top
        )

    def _likely(self, token_id: int, logprob: float) -> LikelyToken:
        tokenizer = self._gateway.tokenizer
        return LikelyToken(token_id, tokenizer.token_text(token_id), tokenizer.token_bytes(token_id), logprob)


def _usage(usage: Usage) -> AnswerUsage:
    total = usage.prompt_tokens + usage.completion_tokens
    return AnswerUsage(usage.prompt_tokens, usage.completion_tokens, total, usage.cached_tokens)
