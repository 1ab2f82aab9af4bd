"""What the HTTP and the gRPC interface share: one parsed body in, checked jobs and answers out.

A body becomes the same jobs, or the same error, whichever interface it came through. Knows neither
HTTP nor gRPC.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from common.config import RouterConfig
from common.errors import InvalidRequestError
from common.messages import GenerationRequest
from common.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from common.workers import Role
from router.readiness import Readiness
from router.schemas import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, Message, TokenizeBody
from router.service import RouterService
from router.text_answer import Job, Piece, TextOptions, Tokenizer, off_loop, pieces_of_all
from router.tokenizer import truncated
from router.validation import Limits, check_model, check_prompt, check_token_ids, prompt_limit, sampling_params


@dataclass(slots=True)
class Gateway:
    """What the endpoints work on. ``clock`` gives Unix seconds, for ``created``; ``url`` and
    ``grpc_url`` are where this router is reached, once that is known.
    """

    service: RouterService
    tokenizer: Tokenizer
    readiness: Readiness
    config: RouterConfig
    model_name: str
    url: str = ""
    grpc_url: str = ""
    clock: Callable[[], float] = time.time
    sampling: SamplingDefaults = OPENAI_DEFAULTS
    content: logging.Logger | None = None
    """Where prompts and answers are logged, if anybody asked for that."""

    def limits(self) -> Limits:
        registry = self.service.registry
        model = registry.served_model()
        colocated = registry.mode == "colocated"
        return Limits(
            model_name=self.model_name,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            max_sequence_tokens=registry.largest_sequence(Role.BOTH if colocated else Role.DECODE),
            max_prompt_tokens=0 if colocated else registry.largest_sequence(Role.PREFILL),
            default_max_tokens=self.config.default_max_tokens,
            sampling=self.sampling,
        )

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return await off_loop(len(text), self.tokenizer.encode, text, add_special_tokens)

    async def encode_chat(
        self, messages: list[Message], arguments: Mapping[str, Any], add_special_tokens: bool = False
    ) -> list[int]:
        """The ids of a conversation as the model's template renders it, with the template's ``arguments``. It
        spells special tokens out, so none are added as a rule."""
        rendered = [message.for_template() for message in messages]
        size = sum(len(message["content"]) for message in rendered)

        def encode() -> list[int]:
            return self.tokenizer.encode(self.tokenizer.render_chat(rendered, **arguments), add_special_tokens)

        return await off_loop(size, encode)

    async def jobs(self, body: ChatBody | CompletionBody, response_id: str) -> list[Job]:
        """The answers that ``body`` asks for. Raises InvalidRequestError when one of them breaks a limit."""
        check_model(body.model, self.model_name)
        limits = self.limits()
        jobs: list[Job] = []
        if isinstance(body, ChatBody):
            prompt = await self.encode_chat(body.messages, body.template_arguments())
            self._add_jobs(jobs, body, response_id, prompt, "", "messages", limits)
            return jobs
        for given in body.prompts():
            if isinstance(given, str):
                prompt, text = await self.encode(given, body.add_special_tokens), given
            else:
                check_token_ids(prompt := given, limits, "prompt")
                text = self.tokenizer.decode(prompt, body.skip_special_tokens) if body.echo else ""
            self._add_jobs(jobs, body, response_id, prompt, text if body.echo else "", "prompt", limits)
        return jobs

    def _add_jobs(
        self,
        jobs: list[Job],
        body: GenerationBody,
        response_id: str,
        prompt: list[int],
        echo: str,
        param: str,
        limits: Limits,
    ) -> None:
        """The ``n`` answers to one prompt, once all limits are checked."""
        length = prompt_limit(body, limits)
        if length is not None and length < len(prompt):
            prompt = truncated(prompt, length, body.truncation_side, self.tokenizer.bos_token_id)
            echo = self.tokenizer.decode(prompt, body.skip_special_tokens) if echo else ""
        check_prompt(prompt, limits, param)
        sampling = sampling_params(body, len(prompt), limits, self.service.draw_seed())
        slo = body.slo.model_dump(exclude_none=True) if body.slo is not None else None
        text = TextOptions(body.stops, body.include_stop_str_in_output, body.skip_special_tokens, echo)
        leader: str | None = None
        for child in range(body.n or 1):
            # The first answer has the response's own id, so that /requests/{id} finds it.
            request = GenerationRequest(
                f"{response_id}-{len(jobs)}" if jobs else response_id,
                tuple(prompt),
                replace(sampling, child=child),
                cache_salt=body.cache_salt or "",
                priority=body.priority,
                timeout_s=body.timeout_s,
            )
            jobs.append(Job(request, slo, text, leader))
            leader = leader or request.request_id

    def answers(self, jobs: Sequence[Job]) -> AsyncGenerator[Piece, None]:
        """The answers' text and tokens as they come. Closing it cancels what has not ended."""
        source = pieces_of_all(self.service, self.tokenizer, jobs)
        return source if self.content is None else self._logged(jobs, source, self.content)

    async def _logged(
        self, jobs: Sequence[Job], source: AsyncGenerator[Piece, None], content: logging.Logger
    ) -> AsyncGenerator[Piece, None]:
        texts: list[list[str]] = [[] for _ in jobs]
        try:
            async with aclosing(source) as pieces:
                async for piece in pieces:
                    texts[piece.index].append(piece.text)
                    yield piece
        finally:
            for job, parts in zip(jobs, texts, strict=True):
                prompt = self.tokenizer.decode(job.request.prompt, skip_special_tokens=False)
                fields = {"request_id": job.request.request_id, "prompt": prompt, "answer": "".join(parts)}
                content.info("content", extra=fields)

    async def tokenize(self, body: TokenizeBody) -> list[int]:
        """Ids of a text, or of a conversation as the model's template renders it."""
        if body.model is not None:
            check_model(body.model, self.model_name)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        if body.messages is not None:
            arguments = {"tools": body.tools or None, "add_generation_prompt": body.add_generation_prompt}
            return await self.encode_chat(body.messages, arguments, bool(body.add_special_tokens))
        return await self.encode(body.prompt or "", body.add_special_tokens is not False)

    async def detokenize(self, body: DetokenizeBody) -> str:
        if body.model is not None:
            check_model(body.model, self.model_name)
        check_token_ids(body.tokens, self.limits(), "tokens")
        return await off_loop(4 * len(body.tokens), self.tokenizer.decode, body.tokens, skip_special_tokens=False)
