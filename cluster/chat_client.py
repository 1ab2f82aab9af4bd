"""Asks an OpenAI-compatible server for streamed chat answers, and times them.

Knows HTTP and server-sent events; nothing of terminals or of what is done with an answer. Baton's
own `/requests/{id}` is asked too, and missed by nobody where it does not exist.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from common.errors import BatonError, UnavailableError

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0
"""Between two pieces of an answer, and before the first: a queue may be long."""
RECORD_TIMEOUT_S = 2.0


@dataclass(slots=True)
class Answer:
    """One answer as it comes. Times are the clock's, in seconds."""

    asked_at: float
    pieces: list[str] = field(default_factory=list)
    first_at: float | None = None
    last_at: float | None = None
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    request_id: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.asked_at

    @property
    def completion_tokens(self) -> int | None:
        return _count(self.usage.get("completion_tokens"))

    @property
    def prompt_tokens(self) -> int | None:
        return _count(self.usage.get("prompt_tokens"))

    @property
    def cached_tokens(self) -> int | None:
        details = self.usage.get("prompt_tokens_details")
        return _count(details.get("cached_tokens")) if isinstance(details, dict) else None

    @property
    def tokens_per_s(self) -> float | None:
        """After the first one; the number of pieces stands in for a count that the server did not give."""
        count = self.completion_tokens or len(self.pieces)
        if count < 2 or self.first_at is None or self.last_at is None or self.last_at <= self.first_at:
            return None
        return (count - 1) / (self.last_at - self.first_at)


class ChatClient:
    """``url`` is the server's root. ``api_key`` goes into every request."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S)
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False, transport=transport)
        self._url = url
        self._clock = clock

    def close(self) -> None:
        self._http.close()

    def first_model(self) -> str:
        """The name of the first model that the server lists. Raises BatonError."""
        try:
            response = self._http.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise self._no_answer(error) from error
        if response.status_code != httpx.codes.OK:
            raise _refusal(response)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise BatonError(f"{self._url}/v1/models lists no model: say which with --model") from error

    def ask(self, body: Mapping[str, Any]) -> tuple[Answer, Generator[str, None, None]]:
        """The answer to ``body`` (a chat completion without its streaming fields), and its text piece by
        piece; the answer fills while the pieces are taken. Closing the generator cancels the request.

        The generator raises UnavailableError when the server cannot be reached, BatonError for what it
        refuses and for a stream that ends too early.
        """
        answer = Answer(self._clock())
        return answer, self._pieces({**body, "stream": True, "stream_options": {"include_usage": True}}, answer)

    def record(self, request_id: str) -> Mapping[str, Any] | None:
        """What a Baton router remembers of the request; None where there is no such thing."""
        try:
            response = self._http.get(f"/requests/{request_id}", timeout=RECORD_TIMEOUT_S)
            record = response.json() if response.status_code == httpx.codes.OK else None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            return None
        return record if isinstance(record, dict) else None

    def _pieces(self, body: Mapping[str, Any], answer: Answer) -> Generator[str, None, None]:
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise _refusal(response)
                for data in event_data(response.iter_bytes()):
                    if data == "[DONE]":
                        return
                    if piece := self._take(_parsed(data), answer):
                        yield piece
        except httpx.HTTPError as error:
            if answer.pieces:
                raise UnavailableError(f"the answer broke off: {_reason(error)}") from error
            raise self._no_answer(error) from error
        if answer.finish_reason is None:
            raise UnavailableError("the answer broke off: the server ended the stream before the answer's end")

    def _take(self, chunk: Mapping[str, Any], answer: Answer) -> str:
        """The text of one chunk."""
        if "error" in chunk:
            raise BatonError(_words(chunk) or "the server failed and gives no reason")
        answer.request_id = str(chunk.get("id") or answer.request_id)
        if isinstance(chunk.get("usage"), dict):
            answer.usage = chunk["usage"]
        text = ""
        for choice in _objects(chunk.get("choices")):
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            text += "".join(str(delta.get("content") or "") for delta in _objects([choice.get("delta")]))
        if text:
            answer.last_at = self._clock()
            answer.first_at = answer.last_at if answer.first_at is None else answer.first_at
            answer.pieces.append(text)
        return text

    def _no_answer(self, error: httpx.HTTPError) -> UnavailableError:
        return UnavailableError(f"no answer from {self._url}: {_reason(error)}")


def event_data(chunks: Iterable[bytes]) -> Iterator[str]:
    """The ``data`` of server-sent events. Lines end at line feeds only: JSON may hold other separators."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip().decode("utf-8", "replace")


def _parsed(data: str) -> Mapping[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise BatonError(f"the server sent something that is not JSON: {data[:80]!r}") from error
    if not isinstance(chunk, dict):
        raise BatonError(f"the server sent something that is no chunk of an answer: {data[:80]!r}")
    return chunk


def _refusal(response: httpx.Response) -> BatonError:
    """An error response in the server's own words."""
    try:
        words = _words(response.json())
    except ValueError:
        words = ""
    path = response.request.url.path
    return BatonError(f"{path} answered {response.status_code}: {words or response.reason_phrase or 'no reason given'}")


def _words(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message") or "") if isinstance(error, dict) else str(error or "")


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _objects(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) else None
