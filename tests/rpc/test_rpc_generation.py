"""The public service over real loopback sockets: what reaches the router, what comes back, how it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from common.errors import BY_CODE, GRPC_STATUS, BatonError, InvalidRequestError, OverloadedError
from rpc.connection import MAX_MESSAGE_BYTES
from rpc.status import raised_by_peer
from rpc.v1 import generation_pb2 as pb
from rpc.v1.generation_pb2_grpc import GenerationStub
from tests.client.scripted_generation import CHUNKS, ScriptedGeneration, served

TEXT = pb.GenerateRequest(model="m", text="hello")


@pytest.fixture
async def service() -> ScriptedGeneration:
    return ScriptedGeneration()


@pytest.fixture
async def channel(service: ScriptedGeneration) -> AsyncIterator[grpc.aio.Channel]:
    """As any client has it: gRPC's own settings."""
    async with served(service) as address, grpc.aio.insecure_channel(address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> GenerationStub:
    return GenerationStub(channel)


async def test_fields_of_a_newer_client_are_refused(stub: GenerationStub, service: ScriptedGeneration) -> None:
    """Ignored in silence, they would give another answer than was asked for."""
    unknown = b"\xd8\x3e\x01"  # field 1003, a number
    message = pb.ChatMessage.FromString(pb.ChatMessage(role="user").SerializeToString() + unknown)
    for request, place in (
        (pb.GenerateRequest.FromString(TEXT.SerializeToString() + unknown), "GenerateRequest"),
        (pb.GenerateRequest(model="m", chat=pb.Chat(messages=[message])), "ChatMessage"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"baton.v1.{place} has no field 1003" in (caught.value.details() or "")
    assert service.asked == []


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_whole_answer(stub: GenerationStub, service: ScriptedGeneration) -> None:
    call = stub.Generate(TEXT)
    response = await call
    assert dict(await call.initial_metadata())["x-request-id"] == response.request_id == "gen-1"
    assert service.asked == [("open", "gen-1", {"model": "m", "prompt": "hello"}, False, None)]
    top = [
        pb.TopLogprob(token_id=8, token="é", bytes=b"\xc3\xa9", logprob=-0.5),
        pb.TopLogprob(token_id=9, token="\ufffd", bytes=b"\xc3", logprob=-1.5),
    ]
    logprobs = [pb.TokenLogprob(token_id=7, token="a", bytes=b"a", logprob=-0.25, top=top)]
    first = pb.Choice(index=0, text="ab", token_ids=[7, 8], logprobs=logprobs, prompt_token_ids=[1, 2, 3])
    first.finish_reason = pb.FINISH_REASON_STOP
    second = pb.Choice(index=1, text="x", token_ids=[9], finish_reason=pb.FINISH_REASON_LENGTH)
    usage = pb.Usage(prompt_tokens=3, completion_tokens=2, total_tokens=5, cached_tokens=1)
    assert response == pb.GenerateResponse(request_id="gen-1", model="m", choices=[first, second], usage=usage)


async def test_a_streamed_answer(stub: GenerationStub) -> None:
    call = stub.GenerateStream(TEXT)
    chunks = [chunk async for chunk in call]
    assert dict(await call.initial_metadata())["x-request-id"] == "gen-1"
    assert [chunk.request_id for chunk in chunks] == ["gen-1", "", "", ""]
    assert [chunk.model for chunk in chunks] == ["m", "", "", ""]
    assert [chunk.HasField("usage") for chunk in chunks] == [False, False, False, True]
    assert [(c.index, c.text, tuple(c.token_ids)) for c in chunks] == [(c.index, c.text, c.token_ids) for c in CHUNKS]
    whole = await stub.Generate(TEXT)
    assert list(chunks[0].logprobs) == list(whole.choices[0].logprobs)
    assert chunks[3].usage == whole.usage


async def test_the_calls_deadline_reaches_the_service(stub: GenerationStub, service: ScriptedGeneration) -> None:
    await stub.Generate(TEXT, timeout=5.0)
    assert service.asked[0][-1] == pytest.approx(5.0, abs=1.0)


async def test_the_other_calls(stub: GenerationStub, service: ScriptedGeneration) -> None:
    tokenized = await stub.Tokenize(pb.TokenizeRequest(text="x", add_special_tokens=False))
    assert tokenized == pb.TokenizeResponse(tokens=[1, 2, 3], count=3, max_model_len=100)
    await stub.Tokenize(pb.TokenizeRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="y")])))
    assert (await stub.Detokenize(pb.DetokenizeRequest(tokens=[7]))).text == "abc"
    (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert model == pb.Model(id="m", max_model_len=100, owned_by="baton")
    assert service.asked == [
        ("tokenize", {"prompt": "x", "add_special_tokens": False}),
        ("tokenize", {"messages": [{"role": "user", "content": "y"}]}),
        ("detokenize", {"tokens": [7]}),
        ("models",),
    ]


# ── errors ────────────────────────────────────────────────────────────────────────────────────────


async def failed(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_every_error_is_the_status_of_its_call(stub: GenerationStub, service: ScriptedGeneration) -> None:
    for kind in BY_CODE.values():
        error = kind("too much: 5 is over 4", param="n", retry_after_s=1.5)
        for call in (stub.Generate, stub.GenerateStream, stub.Tokenize):
            service.refusals.append(error)
            if call is stub.GenerateStream:
                status = await failed(stub.GenerateStream(TEXT).read())
            else:
                status = await failed(call(TEXT if call is stub.Generate else pb.TokenizeRequest()))
            assert status.code().name == GRPC_STATUS[kind.code]
            assert status.details() == error.message
            assert dict(status.initial_metadata())["x-request-id"]
            raised = raised_by_peer(status)
            assert (type(raised), str(raised), raised.param, raised.retry_after_s) == (kind, error.message, "n", 1.5)


async def test_errors_explain_themselves_as_googles_do(stub: GenerationStub, service: ScriptedGeneration) -> None:
    service.refusals = [
        InvalidRequestError("n: at most 4, got 5", param="n"),
        OverloadedError("full", retry_after_s=2.5),
    ]
    refused = rpc_status.from_call(await failed(stub.Generate(TEXT)))  # type: ignore[arg-type]
    assert refused is not None
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert refused.details[0].Unpack(info)
    assert refused.details[1].Unpack(request)
    assert (info.reason, info.domain, dict(info.metadata)) == ("INVALID_REQUEST", "baton", {"param": "n"})
    (violation,) = request.field_violations
    assert (violation.field, violation.description) == ("n", "n: at most 4, got 5")
    full = rpc_status.from_call(await failed(stub.Generate(TEXT)))  # type: ignore[arg-type]
    assert full is not None
    retry = error_details_pb2.RetryInfo()
    assert full.details[1].Unpack(retry)
    assert retry.retry_delay.ToNanoseconds() == 2_500_000_000


@pytest.mark.parametrize("letter", ["x", "ä", "語", "\n"])
async def test_texts_of_any_length_arrive(stub: GenerationStub, service: ScriptedGeneration, letter: str) -> None:
    """Metadata over 8 KiB would be another error in the eyes of most clients."""
    service.refusals = [InvalidRequestError("limit 4: " + letter * 100_000, param=letter * 1000)]
    status = await failed(stub.Generate(TEXT))
    assert status.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (status.details() or "").startswith("limit 4: ")
    assert str(raised_by_peer(status)).startswith("limit 4: " + letter * 100)
    size = sum(len(key) + len(value) * 4 // 3 for key, value in status.trailing_metadata())
    assert size + 3 * len((status.details() or "").encode()) < 8192


async def test_an_error_midway_is_no_end(stub: GenerationStub, service: ScriptedGeneration) -> None:
    service.failure, service.fail_after = BatonError("the engine broke"), 2
    call = stub.GenerateStream(TEXT)
    assert [(await call.read()).text, (await call.read()).text] == ["a", "x"]
    status = await failed(call.read())
    assert (status.code(), status.details()) == (grpc.StatusCode.INTERNAL, "the engine broke")
    assert (await failed(stub.Generate(TEXT))).details() == "the engine broke"


async def test_the_unforeseen_is_an_error_without_details(
    stub: GenerationStub, service: ScriptedGeneration, caplog: pytest.LogCaptureFixture
) -> None:
    service.refusals = [ZeroDivisionError("secret")]
    status = await failed(stub.Generate(TEXT))
    assert (status.code(), status.details()) == (grpc.StatusCode.INTERNAL, "internal error (ZeroDivisionError)")
    assert "secret" in caplog.text
    service.refusals = [asyncio.CancelledError()]
    assert (await failed(stub.Generate(TEXT))).code() is grpc.StatusCode.INTERNAL


async def test_messages_over_the_limit_are_refused_with_both_sizes(stub: GenerationStub) -> None:
    status = await failed(stub.Generate(pb.GenerateRequest(text="x" * MAX_MESSAGE_BYTES)))
    assert status.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MAX_MESSAGE_BYTES) in (status.details() or "")


async def test_bytes_that_are_no_message_are_the_clients_fault(
    channel: grpc.aio.Channel, service: ScriptedGeneration, caplog: pytest.LogCaptureFixture
) -> None:
    for call in (channel.unary_unary, channel.unary_stream):
        name = "Generate" if call == channel.unary_unary else "GenerateStream"
        answer = call(f"/baton.v1.Generation/{name}")(b"\xff\xff\xff")
        error = await failed(answer if name == "Generate" else answer.read())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"/baton.v1.Generation/{name}: the request is malformed: 3 bytes" in str(error.details())
    assert service.asked == []
    assert caplog.records == []


@pytest.mark.parametrize("pause_after", [0, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_cancelled_call_closes_the_answer(
    stub: GenerationStub, service: ScriptedGeneration, pause_after: int, stream: bool
) -> None:
    service.pause_after = pause_after
    call: Any = stub.GenerateStream(TEXT) if stream else stub.Generate(TEXT)
    await asyncio.wait_for(service.pausing.wait(), 5)
    assert not service.finalized.is_set()
    call.cancel()
    await asyncio.wait_for(service.finalized.wait(), 5)


async def test_a_deadline_that_passes_closes_the_answer(stub: GenerationStub, service: ScriptedGeneration) -> None:
    service.pause_after = 1
    call = stub.GenerateStream(TEXT, timeout=0.2)
    await call.read()
    assert (await failed(call.read())).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(service.finalized.wait(), 5)


# ── beside the service ────────────────────────────────────────────────────────────────────────────


async def test_health_is_readiness(channel: grpc.aio.Channel, service: ScriptedGeneration) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    status = health_pb2.HealthCheckResponse
    for name in ("", "baton.v1.Generation"):
        for service.ready, expected in ((True, status.SERVING), (False, status.NOT_SERVING)):
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == expected
    assert (await failed(stub.Check(health_pb2.HealthCheckRequest(service="x")))).code() is grpc.StatusCode.NOT_FOUND
    unknown = stub.Watch(health_pb2.HealthCheckRequest(service="x"))
    assert (await unknown.read()).status == status.SERVICE_UNKNOWN
    unknown.cancel()
    listed = await stub.List(health_pb2.HealthListRequest())
    assert {name: answer.status for name, answer in listed.statuses.items()} == {
        "": status.NOT_SERVING,
        "baton.v1.Generation": status.NOT_SERVING,
    }


async def test_who_watches_hears_of_changes_and_of_the_end(service: ScriptedGeneration) -> None:
    status = health_pb2.HealthCheckResponse
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(AsyncExitStack())
        address = await server.enter_async_context(served(service, grace_s=5.0, watch_interval_s=0.02))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watching = stub.Watch(health_pb2.HealthCheckRequest())
        for service.ready, expected in ((True, status.SERVING), (False, status.NOT_SERVING), (True, status.SERVING)):
            assert (await asyncio.wait_for(watching.read(), 5)).status == expected
        await server.aclose()
        assert (await asyncio.wait_for(watching.read(), 5)).status == status.NOT_SERVING


async def test_reflection_describes_the_service(channel: grpc.aio.Channel) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="baton.v1.Generation"),
    ]
    services, described = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
    names = {service.name for service in services.list_services_response.service}
    assert {"baton.v1.Generation", "grpc.health.v1.Health"} <= names
    assert pb.DESCRIPTOR.serialized_pb in described.file_descriptor_response.file_descriptor_proto
