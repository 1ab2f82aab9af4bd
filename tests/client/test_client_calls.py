"""Both clients against a scripted server: answers, errors, what is tried again, and what is given up."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from baton_client import AsyncClient, Choice, Chunk, Client, Model, RetryPolicy, TokenLogprob, Tokens, TopLogprob, Usage
from common.errors import (
    DeadlineError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
)
from tests.client.scripted_generation import ScriptedGeneration, served
from tests.router.fleet import until

FAST = RetryPolicy(first_wait_s=0.01, max_wait_s=0.02)
USAGE = Usage(3, 2, 5, 1)
LOGPROBS = (
    TokenLogprob(7, "a", b"a", -0.25, (TopLogprob(8, "é", b"\xc3\xa9", -0.5), TopLogprob(9, "\ufffd", b"\xc3", -1.5))),
)
CHOICES = (Choice(0, "ab", (7, 8), "stop", LOGPROBS, (1, 2, 3)), Choice(1, "x", (9,), "length"))
CHUNKS = [
    Chunk(0, "a", (7,), LOGPROBS, None, None, "gen-1", "m", (1, 2, 3)),
    Chunk(1, "x", (9,)),
    Chunk(0, "b", (8,), (), "stop"),
    Chunk(1, "", (), (), "length", USAGE),
]


@pytest.fixture
async def service() -> ScriptedGeneration:
    return ScriptedGeneration()


@pytest.fixture
async def address(service: ScriptedGeneration) -> AsyncIterator[str]:
    async with served(service) as address:
        yield f"grpc://{address}"


def free_port() -> int:
    """A port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Blocking:
    """`Client` with AsyncClient's manners, so that one test is for both; its calls block a thread."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._client, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(function, *args, **kwargs)

        return call

    async def collect(self, **options: Any) -> list[Chunk]:
        def read() -> list[Chunk]:
            with self._client.stream("hello", **options) as chunks:
                return list(chunks)

        return await asyncio.to_thread(read)


class Waiting:
    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def collect(self, **options: Any) -> list[Chunk]:
        async with self._client.stream("hello", **options) as chunks:
            return [chunk async for chunk in chunks]


Make = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """Makes clients of one kind."""
    made: list[Any] = []

    def client(urls: Any, **options: Any) -> Any:
        options = {"retries": FAST, "timeout_s": 20.0, "model": "m"} | options
        kind = Blocking(Client(urls, **options)) if request.param == "sync" else Waiting(AsyncClient(urls, **options))
        made.append(kind)
        return kind

    yield client
    for kind in made:
        await kind.close()


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


async def test_every_call(make: Make, address: str, service: ScriptedGeneration) -> None:
    client = make(address)
    whole = await client.generate("hello", max_tokens=5)
    assert (whole.request_id, whole.model, whole.choices, whole.usage) == ("gen-1", "m", CHOICES, USAGE)
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("ab", (7, 8), "stop")
    assert (await client.chat([{"role": "user", "content": "x"}], tools=[{"a": 1}])).choices == CHOICES
    assert await client.tokenize("x") == Tokens((1, 2, 3), 100)
    await client.tokenize(messages=[{"role": "user", "content": "x"}], add_generation_prompt=False)
    assert await client.detokenize([7]) == "abc"
    assert await client.models() == [Model("m", 100, "baton")]
    opened, chatted, *rest = service.asked
    assert opened[:4] == ("open", "gen-1", {"model": "m", "prompt": "hello", "max_tokens": 5}, False)
    assert opened[4] == pytest.approx(20.0, abs=1.0)  # the deadline
    messages = [{"role": "user", "content": "x"}]
    assert chatted[2:4] == ({"model": "m", "messages": messages, "tools": [{"a": 1}]}, True)
    assert rest == [
        ("tokenize", {"prompt": "x"}),
        ("tokenize", {"messages": messages, "add_generation_prompt": False}),
        ("detokenize", {"tokens": [7]}),
        ("models",),
    ]


async def test_streams(make: Make, address: str) -> None:
    assert await make(address).collect() == CHUNKS


async def test_without_a_name_the_only_model_is_meant(make: Make, address: str, service: ScriptedGeneration) -> None:
    client = make(address, model=None)
    await client.collect()
    await client.generate("x")
    assert [what[0] for what in service.asked] == ["models", "open", "open"]
    assert service.asked[1][2]["model"] == "m"
    service.served = service.served * 2
    with pytest.raises(InvalidRequestError, match="name a model; the server has m, m"):
        await make(address, model=None).generate("x")


# ── errors and what is tried again ────────────────────────────────────────────────────────────────


async def test_errors_are_raised_as_the_servers(make: Make, address: str, service: ScriptedGeneration) -> None:
    client = make(address)
    for ask in (lambda: client.generate("x"), client.collect, lambda: client.tokenize("x")):
        service.refusals = [InvalidRequestError("n: at most 4, got 5", param="n")]
        with pytest.raises(InvalidRequestError, match="at most 4, got 5") as caught:
            await ask()
        assert caught.value.param == "n"
        assert caught.value.__notes__[0].startswith("x-request-id: gen-")
    assert len(service.asked) == 3


async def test_an_error_midway_ends_the_stream(make: Make, address: str, service: ScriptedGeneration) -> None:
    service.failure, service.fail_after = UnavailableError("the router is stopping"), 2
    with pytest.raises(UnavailableError, match="stopping"):
        await make(address).collect()
    assert len(service.asked) == 1  # what has begun is never asked for again


@pytest.mark.parametrize("error", [UnavailableError("nobody"), OverloadedError("full", retry_after_s=0.01)])
async def test_what_never_started_is_tried_again(
    make: Make, address: str, service: ScriptedGeneration, error: Exception
) -> None:
    client = make(address)
    service.refusals = [error] * 3
    assert (await client.generate("x")).choices == CHOICES
    service.refusals = [error] * 3
    assert len(await client.collect()) == len(CHUNKS)
    assert len(service.asked) == 8
    service.refusals = [error] * 4
    with pytest.raises(type(error)):
        await client.generate("x")
    assert service.refusals == []


@pytest.mark.parametrize("error", [EngineError("broken"), OverloadedError("full, for who knows how long")])
async def test_what_may_have_started_is_not(
    make: Make, address: str, service: ScriptedGeneration, error: Exception
) -> None:
    service.refusals = [error]
    with pytest.raises(type(error)):
        await make(address).generate("x")
    assert len(service.asked) == 1


async def test_a_stream_that_fails_before_its_first_chunk(
    make: Make, address: str, service: ScriptedGeneration
) -> None:
    service.failure = UnavailableError("the last worker left")
    with pytest.raises(UnavailableError, match="the last worker left"):
        await make(address).collect()
    assert len(service.asked) == FAST.max_attempts


async def test_the_next_address_when_one_is_down(make: Make, address: str, service: ScriptedGeneration) -> None:
    down = f"grpc://127.0.0.1:{free_port()}"
    client = make([down, address], retries=RetryPolicy(first_wait_s=60.0, max_wait_s=60.0))
    assert (await client.generate("x")).choices == CHOICES
    assert len(await client.collect()) == len(CHUNKS)
    with pytest.raises(UnavailableError, match="cannot be reached"):
        await make(down).generate("x")


async def test_a_server_that_comes_late_is_waited_for(make: Make, service: ScriptedGeneration) -> None:
    """It connects with its first call, not before."""
    port = free_port()
    client = make(f"grpc://127.0.0.1:{port}", retries=RetryPolicy(max_attempts=100, first_wait_s=0.05, max_wait_s=0.1))
    asking = asyncio.ensure_future(client.generate("x"))
    await asyncio.sleep(0.1)
    async with served(service, port):
        assert (await asyncio.wait_for(asking, 10)).choices == CHOICES


async def test_a_server_that_dies_after_it_began(make: Make, service: ScriptedGeneration) -> None:
    service.pause_after = 0
    async with served(service) as address:
        client = make(address)
        asking = asyncio.ensure_future(client.generate("x"))
        await asyncio.wait_for(service.pausing.wait(), 5)
    with pytest.raises((UnavailableError, RequestCancelledError)):
        await asyncio.wait_for(asking, 10)
    assert len(service.asked) == 1


# ── deadlines and cancellation ────────────────────────────────────────────────────────────────────


async def test_deadlines(make: Make, address: str, service: ScriptedGeneration) -> None:
    service.pause_after = 0
    client = make(address)
    for ask in (lambda: client.generate("x", timeout_s=0.3), lambda: client.collect(timeout_s=0.3)):
        started = time.monotonic()
        with pytest.raises(DeadlineError):
            await ask()
        assert 0.1 < time.monotonic() - started < 5.0
        await asyncio.wait_for(service.finalized.wait(), 5)
        service.finalized.clear()
    assert service.asked[0][2]["timeout_s"] == 0.3


async def test_a_deadline_covers_the_waits_too(make: Make, address: str, service: ScriptedGeneration) -> None:
    service.refusals = [OverloadedError("full", retry_after_s=30.0)]
    with pytest.raises(OverloadedError):
        await asyncio.wait_for(make(address).generate("x", timeout_s=1.0), 0.9)


async def until_finalized(service: ScriptedGeneration) -> None:
    await asyncio.wait_for(service.finalized.wait(), 5)


async def test_leaving_a_stream_ends_it(address: str, service: ScriptedGeneration) -> None:
    service.pause_after = 2

    def read() -> list[str]:
        with Client(address, model="m") as client, client.stream("x") as chunks:
            seen = [next(chunks).text, next(chunks).text]
        assert list(chunks) == []
        return seen

    assert await asyncio.to_thread(read) == ["a", "x"]
    await until_finalized(service)


async def test_leaving_an_async_stream_ends_it(address: str, service: ScriptedGeneration) -> None:
    service.pause_after = 2
    async with AsyncClient(address, model="m") as client:
        async with client.stream("x") as chunks:
            assert chunks.request_id == "gen-1"
            assert [(await anext(chunks)).text, (await anext(chunks)).text] == ["a", "x"]
        await until_finalized(service)
        assert [chunk async for chunk in chunks] == []


@pytest.mark.parametrize("pause_after", [0, 2])
async def test_another_thread_may_close_a_stream(address: str, service: ScriptedGeneration, pause_after: int) -> None:
    service.pause_after = pause_after
    with Client(address, model="m") as client:
        chunks = client.stream("x")
        seen: list[Chunk] = []
        reader = threading.Thread(target=lambda: [seen.append(chunk) for chunk in chunks])
        reader.start()
        await asyncio.wait_for(service.pausing.wait(), 5)
        await until(lambda: len(seen) == pause_after)
        chunks.close()
        await asyncio.to_thread(reader.join, 5)
        assert not reader.is_alive()
        assert len(seen) == pause_after
        await until_finalized(service)


@pytest.mark.parametrize("pause_after", [0, 2])
async def test_another_task_may_close_a_stream(address: str, service: ScriptedGeneration, pause_after: int) -> None:
    service.pause_after = pause_after
    async with AsyncClient(address, model="m") as client:
        chunks = client.stream("x")
        seen: list[Chunk] = []

        async def read() -> None:
            async for chunk in chunks:
                seen.append(chunk)  # noqa: PERF401 - one by one, to be seen

        reading = asyncio.ensure_future(read())
        await asyncio.wait_for(service.pausing.wait(), 5)
        await until(lambda: len(seen) == pause_after)
        await chunks.close()
        await asyncio.wait_for(reading, 5)
        assert len(seen) == pause_after
        await until_finalized(service)


@pytest.mark.parametrize("error", [EngineError("broken"), RequestCancelledError("the server gave up")])
async def test_a_stream_that_failed_says_so_once(address: str, service: ScriptedGeneration, error: Exception) -> None:
    """Also when the error is that the server cancelled: that is no end."""
    service.refusals = [error, error]
    async with AsyncClient(address, model="m") as client:
        chunks = client.stream("x")
        with pytest.raises(type(error), match=str(error)):
            await anext(chunks)
        assert [chunk async for chunk in chunks] == []
    with Client(address, model="m") as blocking:
        stream = blocking.stream("x")
        with pytest.raises(type(error), match=str(error)):
            await asyncio.to_thread(list, stream)
        assert list(stream) == []


@pytest.mark.parametrize("pause_after", [0, 2])
async def test_a_cancelled_task_ends_its_call(address: str, service: ScriptedGeneration, pause_after: int) -> None:
    service.pause_after = pause_after
    async with AsyncClient(address, model="m") as client:

        async def read() -> None:
            async for _ in client.stream("x"):
                pass

        asks: list[Callable[[], Awaitable[Any]]] = [read, lambda: client.generate("x")]
        # Often: there is a moment while a stream is set up in which gRPC itself forgets to tell the server.
        for ask in asks * 25:
            service.pausing.clear()
            service.finalized.clear()
            asking = asyncio.ensure_future(ask())
            await asyncio.wait_for(service.pausing.wait(), 5)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await until_finalized(service)


async def test_a_closed_client_says_so(make: Make, address: str) -> None:
    client = make(address)
    await client.generate("x")
    await client.close()
    with pytest.raises(RequestCancelledError, match="closed"):
        await client.generate("x")


async def test_threads_share_a_client(address: str) -> None:
    with Client(address, model="m") as client:
        answers = await asyncio.gather(*(asyncio.to_thread(client.generate, "x") for _ in range(16)))
    assert [answer.choices for answer in answers] == [CHOICES] * 16
