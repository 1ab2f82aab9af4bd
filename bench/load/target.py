"""What the server is: where it listens, which model it has, which fields it takes, how it counts tokens.

Asks each of these once, before anything is measured, and says what it found. A field beyond OpenAI's is sent
only to a server that takes it: the first request has all of them, and those that are refused are left out.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import httpx

from bench.load.prompts import VOCABULARY, Calibration, PromptWriter, listed
from bench.load.stream import message_of
from common.errors import AuthenticationError, BatonError, ConfigError, UnavailableError

PROBE_TIMEOUT_S = 120.0
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

SENT_DONE = "data: [DONE]"
NO_DONE = "the server sends no [DONE]: a stream that ends with a finish reason is taken for whole"

CHANGES: dict[str, str] = {
    "ignore_eos": "no ignore_eos: answers may end before --output-tokens",
    "include_usage": "no stream_options.include_usage: tokens are counted as chunks",
    "max_tokens": "max_completion_tokens in place of max_tokens",
    "temperature": "no temperature",
}
"""What may have to be left out of a request, and what that means."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, as far as it is known. ``left_out``: those of `CHANGES` that it made necessary.
    ``sends_done``: its streams end with [DONE], as OpenAI's do.
    """

    url: httpx.URL
    endpoint: str
    model: str
    headers: Mapping[str, str]
    temperature: float | None = 0.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()
    sends_done: bool = True

    @property
    def host(self) -> str:
        return self.url.host

    @property
    def port(self) -> int:
        return self.url.port or (443 if self.url.scheme == "https" else 80)

    @property
    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self.url.scheme == "https" else None

    def prompt_fields(self, prompt: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": prompt}]} if self.endpoint == "chat" else {"prompt": prompt}

    def body(self, prompt: str, output_tokens: int) -> dict[str, Any]:
        """The body of one streamed request."""
        body = {"model": self.model, **self.prompt_fields(prompt), "stream": True}
        body["max_completion_tokens" if "max_tokens" in self.left_out else "max_tokens"] = output_tokens
        if self.temperature is not None and "temperature" not in self.left_out:
            body["temperature"] = self.temperature
        if "ignore_eos" not in self.left_out:
            body["ignore_eos"] = True
        if "include_usage" not in self.left_out:
            body["stream_options"] = {"include_usage": True}
        return body | dict(self.extra_body)

    def request(self, prompt: str, output_tokens: int) -> bytes:
        """One whole HTTP request."""
        body = json.dumps(self.body(prompt, output_tokens), separators=(",", ":")).encode()
        path = self.url.path.rstrip("/") + PATHS[self.endpoint]
        headers = {
            "Host": self.url.netloc.decode("ascii"),
            "Accept": "text/event-stream",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **self.headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body

    @property
    def notes(self) -> list[str]:
        notes = [CHANGES[change] for change in CHANGES if change in self.left_out]
        return notes if self.sends_done else [*notes, NO_DONE]


def base_url(url: str) -> httpx.URL:
    """The server's root, whether ``url`` ends with /v1 or not. Raises ConfigError when it is none."""
    try:
        parsed = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url!r} is no URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"--url must be http://HOST:PORT or https://…, got {url!r}")
    return parsed


def open_client(target_url: httpx.URL, headers: Mapping[str, str]) -> httpx.AsyncClient:
    """For what is asked before and beside the load."""
    return httpx.AsyncClient(base_url=target_url, headers=headers, timeout=PROBE_TIMEOUT_S, trust_env=False)


async def find_model(client: httpx.AsyncClient) -> str:
    """The first model that the server lists. Raises BatonError when it lists none."""
    response = await _send(client, "GET", "/v1/models")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise BatonError(f"{client.base_url}v1/models names no model; give --model") from error


async def probe_fields(client: httpx.AsyncClient, target: Target) -> Target:
    """The target with as few fields left out as it takes. Raises BatonError when it answers no request at all."""
    refusal = ""
    for left_out in _by_size(target):
        tried = replace(target, left_out=left_out)
        body = tried.body(listed(VOCABULARY[:3]), 2)
        response = await _send(client, "POST", PATHS[target.endpoint], body)
        if response.status_code == httpx.codes.OK:
            return replace(tried, sends_done=SENT_DONE in response.text)
        if response.status_code not in (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY):
            raise _refused(response)
        refusal = refusal or _words(response)
    raise BatonError(f"{target.url} takes no request: {refusal}")


async def calibrate(client: httpx.AsyncClient, target: Target) -> PromptWriter:
    """How many tokens the words are: by /tokenize where there is one, else by the usage of two short requests."""
    vocabulary, count_tokens = VOCABULARY, _tokenize
    overhead = await _tokenize(client, target, listed(()))
    if overhead is not None:
        vocabulary = await _single_tokens(client, target, overhead)
    else:
        count_tokens = _usage
        overhead = await _usage(client, target, listed(()))
    with_words = await count_tokens(client, target, listed(vocabulary))
    if overhead is None or with_words is None or with_words <= overhead:
        return PromptWriter()
    per_word = (with_words - overhead) / len(vocabulary)
    return PromptWriter(vocabulary, Calibration(overhead, per_word, count_tokens is _tokenize and per_word == 1.0))


async def _single_tokens(client: httpx.AsyncClient, target: Target, overhead: int) -> tuple[str, ...]:
    """The words that are one token each: groups that are not are halved."""
    groups, single = [VOCABULARY], list[str]()
    while groups:
        group = groups.pop()
        if await _tokenize(client, target, listed(group)) == overhead + len(group):
            single += group
        elif len(group) > 1:
            middle = len(group) // 2
            groups += [group[:middle], group[middle:]]
    return tuple(single) if len(single) > len(VOCABULARY) // 4 else VOCABULARY


async def _tokenize(client: httpx.AsyncClient, target: Target, prompt: str) -> int | None:
    """By POST /tokenize as Baton and vLLM have it. None where there is no such thing."""
    body = {"model": target.model, **target.prompt_fields(prompt)}
    response = await _send(client, "POST", "/tokenize", body)
    try:
        return int(response.json()["count"])
    except (ValueError, LookupError, TypeError):
        return None


async def _usage(client: httpx.AsyncClient, target: Target, prompt: str) -> int | None:
    """By the usage of a request for one token. None where the server tells none."""
    body = target.body(prompt, 1) | {"stream": False}
    body.pop("stream_options", None)
    response = await _send(client, "POST", PATHS[target.endpoint], body)
    try:
        return int(response.json()["usage"]["prompt_tokens"])
    except (ValueError, LookupError, TypeError):
        return None


def _by_size(target: Target) -> Iterator[frozenset[str]]:
    """All sets of changes that make a difference, the smallest first."""
    given = [change for change in CHANGES if change != "temperature" or target.temperature is not None]
    for size in range(len(given) + 1):
        yield from map(frozenset, combinations(given, size))


async def _send(client: httpx.AsyncClient, method: str, path: str, body: Any = None) -> httpx.Response:
    try:
        response = await client.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise UnavailableError(f"no answer from {client.base_url}: {error or type(error).__name__}") from error
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise AuthenticationError(f"{client.base_url} wants another --api-key: {_words(response)}")
    return response


def _refused(response: httpx.Response) -> BatonError:
    return BatonError(f"{response.url} answered {response.status_code}: {_words(response)}")


def _words(response: httpx.Response) -> str:
    try:
        return message_of(response.json())
    except ValueError:
        return response.text[:200]
