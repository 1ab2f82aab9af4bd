"""One streamed answer: when its pieces came, how many tokens it had, how it ended.

Takes the time as an argument. All times are seconds on one clock whose zero means nothing.

A stream ends well only with ``[DONE]`` after some text. (With a server that never sends ``[DONE]``, which the
first request shows, only with a finish reason and the end of the response.) All else is an error, of one of
these kinds:

    connect        no connection
    http_NNN       a status that is not 200
    not_a_stream   200, but no event stream
    stream_error   an event that says what went wrong
    bad_json       an event that is no JSON object
    no_done        the response ended as HTTP responses end, but without the mark above
    closed, reset  the connection ended in the middle of the response, in order or not
    protocol       what came is not HTTP
    empty          a good end without any text
    timeout        not over within the time that a request gets
    interrupted    ended by this side (these are no errors of the server and are counted apart)
"""

from __future__ import annotations

import json
from array import array
from typing import Any

from bench.load.events import DONE

INTERRUPTED = "interrupted"
TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Where a delta may have text; a model that thinks aloud first has begun to answer."""
LONGEST_MESSAGE = 300


class StreamRecord:
    """``intended_s``: when the request was to be sent; ``sent_s``: when it was."""

    __slots__ = (
        "done",
        "end_s",
        "error",
        "error_text",
        "finished",
        "intended_s",
        "needs_done",
        "num_asked",
        "retry_after_s",
        "sent_s",
        "times_s",
        "usage",
    )

    def __init__(self, intended_s: float, num_asked: int) -> None:
        self.intended_s = intended_s
        self.num_asked = num_asked
        """Tokens that were asked for."""
        self.sent_s = intended_s
        self.end_s = intended_s
        self.times_s = array("d")
        """When each event with text came."""
        self.usage: dict[str, Any] = {}
        self.needs_done = True
        self.finished = False
        """A choice had a finish reason."""
        self.done = False
        self.error: str | None = None
        self.error_text = ""
        self.retry_after_s: float | None = None

    # ── what happens ──────────────────────────────────────────────────────────────────────────────

    def take(self, data: bytes, now: float) -> None:
        """One event."""
        if self.error is not None or self.done:
            return
        if data == DONE:
            self._end_well(now)
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            self.fail("bad_json", f"an event is no JSON object: {data[:80]!r}", now)
            return
        if chunk.get("error"):
            self.fail("stream_error", message_of(chunk), now)
            return
        usage = chunk.get("usage")
        if usage:
            self.usage = usage
        choices = chunk.get("choices") or ()
        if any(map(_has_text, choices)):
            self.times_s.append(now)
        if any(choice.get("finish_reason") for choice in choices):
            self.finished = True

    def close(self, now: float) -> None:
        """The response is through."""
        if self.finished and not self.needs_done and not self.over:
            self._end_well(now)
        self.fail("no_done", "the response ended before the stream did", now)

    def _end_well(self, now: float) -> None:
        self.done = True
        self.end_s = now
        if not self.times_s:
            self.fail("empty", "the stream ended without any text", now)

    def fail(self, kind: str, text: str, now: float) -> None:
        """The first failure counts, and none after a good end."""
        if self.error is None and not (self.done and self.times_s):
            self.error = kind
            self.error_text = " ".join(text.split())[:LONGEST_MESSAGE]
            self.end_s = now

    # ── what it was ───────────────────────────────────────────────────────────────────────────────

    @property
    def ok(self) -> bool:
        return self.done and self.error is None

    @property
    def over(self) -> bool:
        return self.done or self.error is not None

    @property
    def num_tokens(self) -> int:
        """By the server's own count, else one for each event with text."""
        counted = self.usage.get("completion_tokens")
        return counted if isinstance(counted, int) else len(self.times_s)

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.intended_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """None for a single token, after which there is nothing to wait for."""
        return (self.times_s[-1] - self.times_s[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None


def message_of(body: Any) -> str:
    """What an error body says, whatever its form."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error)


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return any(delta.get(field) for field in TEXT_FIELDS)
