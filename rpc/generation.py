"""The public service `baton.v1.Generation`: fields in, answers out; what the two mean is not known here.

Of a call the client first hears its `x-request-id`. Then everything is checked, and only what came well
through that makes a stream: an error is the status of the call, before the first message or after it.
When the client goes away or its deadline passes, gRPC cancels the call's task, and with it the answers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from common.errors import InvalidRequestError
from rpc import generation_form as form
from rpc.generation_service import AnswerChunk, GenerationService
from rpc.rich_status import abort_richly
from rpc.status import REQUEST_ID_KEY, Handler, T, reporting
from rpc.v1 import generation_pb2 as pb
from rpc.v1 import generation_pb2_grpc as pb_grpc


def reports_richly(handler: Handler[T]) -> Handler[T]:
    """For methods that clients call: errors with google.rpc's details."""
    return reporting(handler, abort_richly, lambda _, error: f"internal error ({type(error).__name__})")


class GenerationServicer(pb_grpc.GenerationServicer):
    def __init__(self, service: GenerationService) -> None:
        self._service = service

    @reports_richly
    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        request_id = await self._accept(context)
        async with aclosing(await self._open(request_id, request, context)) as chunks:
            return form.response_message(request_id, self._service.model_name, [chunk async for chunk in chunks])

    @reports_richly
    async def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        request_id = await self._accept(context)
        first = True
        # Written, not yielded: the answers are then closed here, in the call's own task, when it is cancelled.
        async with aclosing(await self._open(request_id, request, context)) as chunks:
            async for chunk in chunks:
                message = form.chunk_message(chunk)
                if first:
                    message.request_id, message.model = request_id, self._service.model_name
                    first = False
                await context.write(message)

    @reports_richly
    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        await self._accept(context)
        return form.tokenized_message(await self._service.tokenize(form.tokenize_fields(request)))

    @reports_richly
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        await self._accept(context)
        return pb.DetokenizeResponse(text=await self._service.detokenize(form.detokenize_fields(request)))

    @reports_richly
    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        await self._accept(context)
        return pb.ListModelsResponse(models=map(form.model_message, self._service.models()))

    async def _accept(self, context: Any) -> str:
        """Tells the client the id of its call."""
        request_id = self._service.draw_id()
        await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
        return request_id

    async def _open(
        self, request_id: str, request: pb.GenerateRequest, context: Any
    ) -> AsyncGenerator[AnswerChunk, None]:
        fields, chat = form.generation_fields(request)
        try:
            return await self._service.open(request_id, fields, chat=chat, deadline_s=context.time_remaining())
        except InvalidRequestError as error:
            raise (error if chat else form.as_the_client_said(error)) from error.__cause__
