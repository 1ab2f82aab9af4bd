"""A router on a real port: the official client, clients that go away, an orderly end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from common.config import Config
from common.errors import ConfigError
from common.workers import Role
from router.fakes import FakeFleet, FakeWorker, fake_answer
from router.process import RunningRouter, run_router
from tests.both_ways import events_of
from tests.router.fleet import until
from tests.router.gateway import ByteTokenizer, answer_to, chat


@asynccontextmanager
async def real_server() -> AsyncIterator[tuple[RunningRouter, FakeFleet]]:
    fleet = FakeFleet()
    fleet.add(FakeWorker("p0", Role.PREFILL))
    fleet.add(FakeWorker("d0", Role.DECODE))
    config = Config.model_validate(
        {
            "router": {"port": 0},
            "model": {"name": "fake"},
            "prefill": {"addresses": ("p0",)},
            "decode": {"addresses": ("d0",)},
        }
    )
    stop = asyncio.Event()
    ready: asyncio.Future[RunningRouter] = asyncio.get_running_loop().create_future()
    server = asyncio.ensure_future(run_router(config, fleet, ByteTokenizer(), stop=stop, on_ready=ready.set_result))
    await asyncio.wait([server, ready], timeout=5.0, return_when=asyncio.FIRST_COMPLETED)
    router = ready.result()
    await until(lambda: router.service.registry.missing(0.0) is None)
    try:
        yield router, fleet
    finally:
        stop.set()
        await asyncio.wait_for(server, 10.0)


async def test_openai_client() -> None:
    async with real_server() as (router, _), openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="k") as client:
        messages: Any = [{"role": "user", "content": "Hello"}]
        whole = await client.chat.completions.create(model="fake", messages=messages, max_tokens=5)
        assert whole.choices[0].message.content == answer_to("Hello", 5)
        assert whole.usage is not None
        assert whole._request_id == whole.id
        stream = await client.chat.completions.create(model="fake", messages=messages, max_tokens=5, stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer_to("Hello", 5)
        assert chunks[-1].choices[0].finish_reason == "length"
        completion = await client.completions.create(model="fake", prompt=[1, 2], max_tokens=3)
        assert completion.choices[0].text == bytes(fake_answer([1, 2], 3)).decode()
        with pytest.raises(openai.BadRequestError, match="not served yet"):
            await client.chat.completions.create(model="fake", messages=messages, modalities=["audio"])
        assert [model.id async for model in client.models.list()] == ["fake"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["before the first token", "midway"])
async def test_a_client_that_goes_away_frees_everything(stream: bool, when: str) -> None:
    async with real_server() as (router, fleet), httpx.AsyncClient() as client:
        prefill, decode = fleet.workers["p0"], fleet.workers["d0"]
        if when == "before the first token":
            prefill.step_s = 30.0
        call = asyncio.ensure_future(
            client.post(f"{router.url}/v1/chat/completions", json=chat(max_tokens=4000, stream=stream))
        )
        await until(lambda: prefill.holding if when == "before the first token" else decode.steps > 3)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: fleet.idle and router.service.records.num_live == 0, timeout_s=2.0)


async def test_stopping_tells_streams_why() -> None:
    async with real_server() as (router, fleet), httpx.AsyncClient(timeout=20) as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("router.process.GRACE_S", 0.05)
            call = asyncio.ensure_future(
                client.post(f"{router.url}/v1/chat/completions", json=chat(max_tokens=4000, stream=True))
            )
            await until(lambda: fleet.workers["d0"].steps > 3)
            await router.service.close(0.05)
            *_, last = events_of((await call).text)
            assert "stopping" in last["error"]["message"]


async def test_a_taken_port_is_one_clear_line() -> None:
    async with real_server() as (router, fleet):
        port = int(router.url.rpartition(":")[2])
        config = Config.model_validate({"router": {"port": port}})
        with pytest.raises(ConfigError, match=f"router.port {port}"):
            await run_router(config, fleet, ByteTokenizer(), stop=asyncio.Event())
