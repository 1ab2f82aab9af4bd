"""The HTTP gateway: endpoints, and nothing that decides.

/v1/chat/completions  /v1/completions  /v1/models      as OpenAI's
/tokenize  /detokenize                                 text ↔ ids
/health  /ready  /metrics                              for machines
/cluster  /ledger  /requests/{id}                      for people and scripts
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from common.config import RouterConfig
from common.errors import (
    BatonError,
    InvalidRequestError,
    NotFoundError,
    RequestCancelledError,
    UnavailableError,
    openai_body,
)
from common.messages import GenerationRequest, Role
from common.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from router.cluster_views import ledger_view, worker_json
from router.http_errors import Envelope, handle_baton_error, handle_http_error, read_body
from router.openai_form import Form, streamed_response, whole_response
from router.readiness import Readiness
from router.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    Message,
    TokenizeBody,
    parse_body,
)
from router.service import RouterService
from router.sse import EventStream, unless_gone
from router.text_answer import Job, Tokenizer, off_loop, pieces_of_all
from router.validation import Limits, check_model, check_prompt, check_token_ids, sampling_params


@dataclass(slots=True)
class Gateway:
    """What the endpoints work on. ``clock`` gives Unix seconds, for ``created``; ``url`` is where
    this router is reached, once that is known.
    """

    service: RouterService
    tokenizer: Tokenizer
    readiness: Readiness
    config: RouterConfig
    model_name: str
    url: str = ""
    clock: Callable[[], float] = time.time
    sampling: SamplingDefaults = OPENAI_DEFAULTS

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

    async def encode_chat(self, messages: list[Message], add_generation_prompt: bool = True) -> list[int]:
        rendered = [message.for_template() for message in messages]
        size = sum(len(message["content"]) for message in rendered)

        def encode() -> list[int]:
            text = self.tokenizer.render_chat(rendered, add_generation_prompt=add_generation_prompt)
            # The template spells the special tokens out.
            return self.tokenizer.encode(text, False)

        return await off_loop(size, encode)

    def job(self, body: GenerationBody, request_id: str, prompt: list[int], param: str) -> Job:
        """One answer to one prompt, once all limits are checked."""
        limits = self.limits()
        check_prompt(prompt, limits, param)
        sampling = sampling_params(body, len(prompt), limits, self.service.draw_seed())
        request = GenerationRequest(
            request_id,
            tuple(prompt),
            sampling,
            cache_salt=body.cache_salt or "",
            priority=body.priority,
            timeout_s=body.timeout_s,
        )
        return Job(request, body.slo.model_dump(exclude_none=True) if body.slo is not None else None)

    async def respond(self, request: Request, body: GenerationBody, jobs: list[Job], response_id: str) -> Response:
        """The answers to ``jobs`` as one response, streamed or whole."""
        form = Form(
            response_id,
            self.model_name,
            int(self.clock()),
            chat=isinstance(body, ChatBody),
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
            return_token_ids=bool(body.return_token_ids),
        )
        source = pieces_of_all(self.service, self.tokenizer, jobs)
        if body.stream:
            return EventStream(streamed_response(form, jobs, source))
        return JSONResponse(await unless_gone(request.receive, whole_response(form, jobs, source)))


def create_app(gateway: Gateway) -> FastAPI:
    """The ASGI application. It has no lifespan of its own: who made the service closes it."""
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(BatonError, handle_baton_error)
    app.add_exception_handler(HTTPException, handle_http_error)
    app.add_middleware(Envelope, draw_id=gateway.service.draw_id, metrics=gateway.service.metrics)
    _add_openai_endpoints(app, gateway)
    _add_operator_endpoints(app, gateway)
    return app


def _add_openai_endpoints(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await _parse(request, ChatBody)
        check_model(body.model, gateway.model_name)
        response_id = request.state.request_id = gateway.service.draw_id("chatcmpl")
        prompt = await gateway.encode_chat(body.messages)
        return await gateway.respond(request, body, [gateway.job(body, response_id, prompt, "messages")], response_id)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await _parse(request, CompletionBody)
        check_model(body.model, gateway.model_name)
        response_id = request.state.request_id = gateway.service.draw_id("cmpl")
        jobs = []
        for index, given in enumerate(body.prompts()):
            if isinstance(given, str):
                prompt = await gateway.encode(given, body.add_special_tokens)
            else:
                check_token_ids(prompt := given, gateway.limits(), "prompt")
            # The first answer has the response's own id, so that /requests/{id} finds it.
            jobs.append(gateway.job(body, f"{response_id}-{index}" if index else response_id, prompt, "prompt"))
        return await gateway.respond(request, body, jobs, response_id)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_json(gateway)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name, gateway.model_name)
        return _model_json(gateway)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await _parse(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        if body.messages is not None:
            tokens = await gateway.encode_chat(body.messages, body.add_generation_prompt)
        else:
            tokens = await gateway.encode(body.prompt or "", body.add_special_tokens)
        max_model_len = gateway.service.registry.served_model().max_model_len
        return {"tokens": tokens, "count": len(tokens), "max_model_len": max_model_len}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        body = await _parse(request, DetokenizeBody)
        check_token_ids(body.tokens, gateway.limits(), "tokens")
        decode = gateway.tokenizer.decode
        return {"prompt": await off_loop(4 * len(body.tokens), decode, body.tokens, skip_special_tokens=False)}


def _add_operator_endpoints(app: FastAPI, gateway: Gateway) -> None:
    service = gateway.service

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        verdict = await gateway.readiness.check()
        if verdict.ready:
            # It serves; that some worker does not is no secret.
            degraded = service.registry.not_ready()
            return JSONResponse({"status": "ready"} | ({"degraded": degraded} if degraded else {}))
        error = UnavailableError("; ".join(verdict.reasons))
        return JSONResponse({"status": "not ready", "reasons": verdict.reasons, **openai_body(error)}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        counts: dict[tuple[str, str], int] = {}
        for worker in service.registry.workers:
            key = (worker.role.value, worker.state.value)
            counts[key] = counts.get(key, 0) + 1
        service.metrics.workers.clear()
        for (role, state), count in counts.items():
            service.metrics.workers.labels(role, state).set(count)
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/cluster")
    async def cluster() -> dict[str, Any]:
        state = "draining" if service.stopping else "ready"
        return {
            "model": gateway.model_name,
            "mode": service.registry.mode,
            "routers": [{"id": service.router_id, "url": gateway.url, "pid": os.getpid(), "state": state}],
            "workers": [worker_json(worker) for worker in service.registry.workers],
        }

    @app.get("/ledger")
    async def ledger() -> dict[str, Any]:
        return await ledger_view(service)

    @app.get("/requests/{request_id}")
    async def request_record(request_id: str) -> dict[str, Any]:
        record = service.records.find(request_id)
        if record is None:
            raise NotFoundError(f"no request {request_id!r} is under way or among the recent ones")
        return record.to_json(asyncio.get_running_loop().time())


async def _parse(request: Request, schema: type[Body]) -> Body:
    try:
        return parse_body(schema, await read_body(request))
    except ClientDisconnect as error:
        raise RequestCancelledError("the client went away before its request was complete") from error


def _model_json(gateway: Gateway) -> dict[str, Any]:
    model = gateway.service.registry.model
    return {
        "id": gateway.model_name,
        "object": "model",
        "created": int(gateway.clock()),
        "owned_by": "baton",
        "max_model_len": model.max_model_len if model is not None else None,
    }
