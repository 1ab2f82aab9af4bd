"""What the load generator finds out about a server before it begins: servers that are functions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from bench.load.prompts import VOCABULARY
from bench.load.target import Target, base_url, calibrate, find_model, probe_fields
from bench.load.workload import Planned
from common.errors import AuthenticationError, BatonError, ConfigError, UnavailableError

URL = httpx.URL("http://server:1234")
TEMPLATE_TOKENS = 11
DONE = "data: [DONE]\n\n"

Answer = Callable[[str, dict[str, Any]], httpx.Response]


def client_of(answer: Answer) -> httpx.AsyncClient:
    def handle(request: httpx.Request) -> httpx.Response:
        return answer(request.url.path, json.loads(request.content) if request.content else {})

    return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url=URL)


def target(**changes: Any) -> Target:
    return Target(**{"url": URL, "endpoint": "chat", "model": "m", "headers": {}} | changes)


# ── fields ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "refused",
    [
        (),
        ("ignore_eos",),
        ("stream_options",),
        ("ignore_eos", "stream_options"),
        ("max_tokens", "temperature"),
        ("ignore_eos", "stream_options", "max_tokens", "temperature"),
    ],
)
@pytest.mark.parametrize("status", [400, 422])
async def test_fields_that_are_refused_are_left_out_and_no_others(refused: tuple[str, ...], status: int) -> None:
    def answer(path: str, body: dict[str, Any]) -> httpx.Response:
        assert path == "/v1/chat/completions"
        bad = [name for name in refused if name in body]
        return (
            httpx.Response(status, json={"error": {"message": f"no {bad}"}}) if bad else httpx.Response(200, text=DONE)
        )

    found = await probe_fields(client_of(answer), target())
    sent = found.body("text", 8)
    assert found.sends_done
    for name in ("ignore_eos", "stream_options", "max_tokens", "temperature"):
        assert (name in sent) == (name not in refused)
    assert sent.get("max_tokens") == 8 or sent["max_completion_tokens"] == 8
    assert len(found.notes) == len(refused)


async def test_a_server_without_done_is_known_for_it() -> None:
    found = await probe_fields(client_of(lambda path, body: httpx.Response(200, text="data: {}\n\n")), target())
    assert not found.sends_done
    assert len(found.notes) == 1


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (400, BatonError, "takes no request: no such model"),
        (404, BatonError, "answered 404: no such model"),
        (503, BatonError, "answered 503: no such model"),
        (401, AuthenticationError, "--api-key: no such model"),
    ],
)
async def test_a_server_that_takes_no_request_at_all(status: int, error: type[BatonError], words: str) -> None:
    client = client_of(lambda path, body: httpx.Response(status, json={"error": {"message": "no such model"}}))
    with pytest.raises(error, match=words):
        await probe_fields(client, target())


async def test_a_server_that_is_not_there() -> None:
    def answer(path: str, body: dict[str, Any]) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(UnavailableError, match="no answer from http://server:1234: refused"):
        await find_model(client_of(answer))


async def test_the_first_model_that_is_listed() -> None:
    assert await find_model(client_of(lambda path, body: httpx.Response(200, json={"data": [{"id": "a"}, {}]}))) == "a"
    with pytest.raises(BatonError, match="names no model; give --model"):
        await find_model(client_of(lambda path, body: httpx.Response(200, json={"data": []})))


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────


def counted(text: str, costly: tuple[str, ...] = ()) -> int:
    """A tokenizer for which every word is one token, but ``costly`` ones are two; and a template."""
    return TEMPLATE_TOKENS + sum(2 if word in costly else 1 for word in text.split())


def text_of(body: dict[str, Any]) -> str:
    text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("costly", [(), VOCABULARY[3:20:4]])
async def test_with_tokenize_prompts_have_exactly_the_wanted_tokens(endpoint: str, costly: tuple[str, ...]) -> None:
    def answer(path: str, body: dict[str, Any]) -> httpx.Response:
        assert path == "/tokenize"
        return httpx.Response(200, json={"count": counted(text_of(body), costly)})

    writer = await calibrate(client_of(answer), target(endpoint=endpoint))
    assert writer.calibration.exact
    assert set(writer.vocabulary) == set(VOCABULARY) - set(costly)
    for length in (20, 100, 1000):
        assert counted(writer.text(Planned(0.0, length, 1, (12345,), length)), costly) == length


async def test_without_tokenize_usage_tells() -> None:
    def answer(path: str, body: dict[str, Any]) -> httpx.Response:
        if path == "/tokenize":
            return httpx.Response(404, json={"detail": "Not Found"})
        assert not body["stream"]
        assert "stream_options" not in body
        return httpx.Response(200, json={"usage": {"prompt_tokens": counted(text_of(body), VOCABULARY[::2])}})

    writer = await calibrate(client_of(answer), target())
    assert not writer.calibration.exact  # words are 1.5 tokens on average, so lengths are right on average
    lengths = [
        counted(writer.text(Planned(0.0, 500, 1, (seed,), 500)), VOCABULARY[::2]) for seed in range(2**50, 2**50 + 50)
    ]
    assert sum(lengths) / len(lengths) == pytest.approx(500, rel=0.02)


async def test_with_neither_a_word_is_taken_for_a_token() -> None:
    writer = await calibrate(client_of(lambda path, body: httpx.Response(404, text="?")), target())
    assert len(writer.text(Planned(0.0, 50, 1, (1,), 50)).split()) - 1 == 50
    assert not writer.calibration.exact


# ── requests ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "url", ["http://server:1234", "http://server:1234/", "http://server:1234/v1", "http://server:1234/v1/"]
)
def test_a_url_with_or_without_v1(url: str) -> None:
    assert base_url(url) == URL


@pytest.mark.parametrize("url", ["server:1234", "localhost", "ftp://server", "http://", "http://a:b:c"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        base_url(url)


def test_a_request_is_the_bytes_that_http_wants() -> None:
    made = target(
        url=httpx.URL("https://server/prefix"),
        endpoint="completions",
        headers={"Authorization": "Bearer k"},
        extra_body={"top_k": 3},
        left_out=frozenset({"ignore_eos"}),
    )
    head, body = made.request("words ☃", 9).split(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    assert first == "POST /prefix/v1/completions HTTP/1.1"
    headers = dict(line.split(": ", 1) for line in lines)
    assert headers["Host"] == "server"
    assert headers["Authorization"] == "Bearer k"
    assert int(headers["Content-Length"]) == len(body)
    assert json.loads(body) == {
        "model": "m",
        "prompt": "words ☃",
        "stream": True,
        "max_tokens": 9,
        "temperature": 0.0,
        "stream_options": {"include_usage": True},
        "top_k": 3,
    }
    assert (made.host, made.port) == ("server", 443)
    assert made.tls is not None
