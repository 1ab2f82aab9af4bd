"""The HTTP gateway: endpoints, and nothing that decides.

/v1/chat/completions  /v1/completions  /v1/models      as OpenAI's
/tokenize  /detokenize                                 text ↔ ids
/health  /ready  /metrics                              for machines
/cluster  /ledger  /requests/{id}                      for people and scripts
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from common.errors import BatonError, NotFoundError, RequestCancelledError, UnavailableError, openai_body
from router.cluster_views import ledger_view, worker_json
from router.gateway import Gateway
from router.http_errors import Envelope, handle_baton_error, handle_http_error, read_body
from router.openai_form import Form, streamed_response, whole_response
from router.schemas import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_body
from router.sse import EventStream, unless_gone
from router.validation import check_model


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
    created = int(gateway.clock())

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _respond(request, gateway, await _parse(request, ChatBody))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _respond(request, gateway, await _parse(request, CompletionBody))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_json(gateway, created)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name, gateway.model_name)
        return _model_json(gateway, created)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        tokens = await gateway.tokenize(await _parse(request, TokenizeBody))
        max_model_len = gateway.service.registry.served_model().max_model_len
        return {"tokens": tokens, "count": len(tokens), "max_model_len": max_model_len}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        return {"prompt": await gateway.detokenize(await _parse(request, DetokenizeBody))}


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
            "routers": [
                {
                    "id": service.router_id,
                    "url": gateway.url,
                    "grpc": gateway.grpc_url,
                    "pid": os.getpid(),
                    "state": state,
                }
            ],
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


async def _respond(request: Request, gateway: Gateway, body: ChatBody | CompletionBody) -> Response:
    """The answers to ``body`` as one response, streamed or whole."""
    response_id = request.state.request_id = gateway.service.draw_id(
        "chatcmpl" if isinstance(body, ChatBody) else "cmpl"
    )
    jobs = await gateway.jobs(body, response_id)
    form = Form(
        response_id,
        gateway.model_name,
        int(gateway.clock()),
        isinstance(body, ChatBody),
        gateway.tokenizer,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        continuous_usage=body.stream_options is not None and body.stream_options.continuous_usage_stats,
        return_token_ids=bool(body.return_token_ids),
    )
    source = gateway.answers(jobs)
    if body.stream:
        return EventStream(streamed_response(form, jobs, source))
    return JSONResponse(await unless_gone(request.receive, whole_response(form, jobs, source)))


def _model_json(gateway: Gateway, created: int) -> dict[str, Any]:
    model = gateway.service.registry.model
    return {
        "id": gateway.model_name,
        "object": "model",
        "created": created,
        "owned_by": "baton",
        "max_model_len": model.max_model_len if model is not None else None,
    }
