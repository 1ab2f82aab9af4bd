"""One streamed answer, byte by byte under a clock that the test sets: which event counts, how a stream ends."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.connection import IDLE_S, ConnectionPool
from bench.load.events import EventSplitter
from bench.load.stream import StreamRecord
from tests.bench.scripted_stream import DONE, END, HEAD, Exchange, chunk, delta, event, usage

ANSWER = [
    delta("", role="x"),
    delta("né"),
    delta("日本"),
    delta("🙂"),
    delta(None, finish_reason="stop"),
    usage(3),
    DONE,
]


async def test_each_token_event_has_the_time_of_the_read_that_ended_it() -> None:
    exchange = await Exchange(intended_s=-1.0).begun()
    exchange.receive(HEAD, 0.1)
    exchange.receive(chunk(delta("")), 0.2)  # a role and no text: not yet the first token
    exchange.receive(chunk(delta("a")), 0.5)
    exchange.receive(chunk(delta("b") + delta("c")), 0.75)
    exchange.receive(chunk(delta(None, finish_reason="length")), 0.8)
    exchange.receive(chunk(usage(5, prompt=7)), 0.9)
    exchange.receive(chunk(DONE), 1.0)
    assert not exchange.task.done()  # the response is not through
    exchange.receive(END, 1.5)
    record = await exchange.ended()
    assert record.ok
    assert list(record.times_s) == [0.5, 0.75, 0.75]
    assert record.num_tokens == 5  # by usage
    assert record.usage["prompt_tokens"] == 7
    assert (record.ttft_s, record.e2e_s) == (1.5, 2.0)  # from when it was due; until [DONE]
    assert record.tpot_s == 0.25 / 4
    assert exchange.released == [exchange.connection]


@given(st.data())
def test_it_does_not_matter_where_reads_end(data: Any) -> None:
    """Not in the middle of an event, of a line's end or of a character."""
    ends = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    stream = b": a comment\n\nevent: x\n".replace(b"\n", ends) + b"".join(ANSWER).replace(b"\n", ends)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=30)))
    splitter = EventSplitter()
    events = [
        e for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True) for e in splitter.feed(stream[start:end])
    ]
    assert events == [line[6:-2] for line in ANSWER]


def test_data_of_several_lines_is_one_event_and_without_data_there_is_none() -> None:
    assert EventSplitter().feed(b"data:a\ndata: b\n\nid: 3\n\n\ndata:  c\n\ndata: never ended\n") == [b"a\nb", b" c"]


async def test_every_byte_in_a_read_of_its_own() -> None:
    exchange = await Exchange().begun()
    body = b"".join(map(chunk, ANSWER))
    for place, byte in enumerate(HEAD + body + END):
        exchange.receive(bytes([byte]), float(place))
    record = await exchange.ended()
    assert record.ok
    assert record.num_tokens == len(record.times_s) == 3
    # An event is there with its last byte, the second line feed.
    starts = [(HEAD + body).index(chunk(text)) for text in ANSWER[1:4]]
    assert list(record.times_s) == [
        start + len(chunk(text)) - 3 for start, text in zip(starts, ANSWER[1:4], strict=True)
    ]


async def test_tokens_are_counted_where_no_usage_comes() -> None:
    record = await _answered(delta("a"), delta("b"), DONE)
    assert (record.ok, record.num_tokens, record.usage) == (True, 2, {})


async def test_texts_of_all_kinds_are_tokens() -> None:
    texts = [
        event({"choices": [{"text": "a"}]}),
        event({"choices": [{"delta": {"reasoning_content": "b"}}]}),
        event({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}),
        event({"choices": [{"delta": {"content": None}}, {"delta": {"content": "c"}}]}),
    ]
    nothing = [event({"choices": [{"text": ""}]}), event({"choices": [{"delta": {"role": "assistant"}}]}), event({})]
    record = await _answered(*texts, *nothing, DONE)
    assert len(record.times_s) == len(texts)


@pytest.mark.parametrize(
    ("events", "kind", "words"),
    [
        ([delta("a")], "no_done", "ended before"),
        ([delta("a", finish_reason="stop")], "no_done", "ended before"),
        ([DONE], "empty", "without any text"),
        ([delta(""), usage(3), DONE], "empty", "without any text"),
        ([delta("a"), event({"error": {"message": "the worker\ndied"}}), DONE], "stream_error", "the worker died"),
        ([delta("a"), event("{broken"), DONE], "bad_json", "{broken"),
        ([event("[1]"), DONE], "bad_json", "[1]"),
    ],
)
async def test_a_stream_that_does_not_end_well(events: list[bytes], kind: str, words: str) -> None:
    record = await _answered(*events)
    assert (record.ok, record.error) == (False, kind)
    assert words in record.error_text


async def test_a_server_known_to_send_no_done_ends_with_a_finish_reason() -> None:
    record = await _answered(delta("a"), delta(None, finish_reason="stop"), needs_done=False)
    assert record.ok
    assert record.end_s == 2.0
    cut = await _answered(delta("a"), needs_done=False)
    assert cut.error == "no_done"


@pytest.mark.parametrize(("loss", "kind"), [(None, "closed"), (ConnectionResetError("by peer"), "reset")])
async def test_a_connection_that_ends_in_the_middle(loss: Exception | None, kind: str) -> None:
    exchange = await Exchange().begun()
    exchange.receive(HEAD + chunk(delta("a")), 1.0)
    exchange.lose(loss, 3.0)
    record = await exchange.ended()
    assert (record.error, record.e2e_s) == (kind, 3.0)
    assert exchange.released == []


async def test_a_connection_that_ends_after_done_spoils_nothing() -> None:
    exchange = await Exchange().begun()
    exchange.receive(HEAD + chunk(delta("a")) + chunk(DONE), 1.0)
    exchange.lose(ConnectionResetError(), 3.0)
    record = await exchange.ended()
    assert (record.ok, record.end_s) == (True, 1.0)
    assert exchange.released == []


async def test_a_refusal_is_counted_with_its_words_and_its_wait() -> None:
    body = json.dumps({"error": {"message": "too many"}}).encode()
    head = f"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 2\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    exchange = await Exchange().begun()
    exchange.receive(head + body, 1.0)
    record = await exchange.ended()
    assert (record.error, record.error_text, record.retry_after_s) == ("http_429", "too many", 2.0)
    assert exchange.wire.written == b"request"  # once
    assert exchange.released == [exchange.connection]


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (b"HTTP/1.1 500 X\r\nContent-Length: 5\r\n\r\n<htm>", "http_500"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}", "not_a_stream"),
        (b"SSH-2.0-OpenSSH\r\n", "protocol"),
    ],
)
async def test_what_is_no_stream(response: bytes, kind: str) -> None:
    exchange = await Exchange().begun()
    exchange.receive(response, 1.0)
    assert (await exchange.ended()).error == kind


async def test_a_connection_is_reused_only_while_it_is_fresh() -> None:
    exchange = await Exchange().begun()
    exchange.receive(HEAD + b"".join(map(chunk, ANSWER)) + END, 5.0)
    await exchange.ended()
    exchange.now = 5.0 + IDLE_S
    assert exchange.connection.usable
    exchange.now += 0.1
    assert not exchange.connection.usable


async def test_a_server_that_closes_is_not_kept() -> None:
    exchange = await Exchange().begun()
    exchange.receive(
        HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + chunk(delta("a")) + chunk(DONE) + END, 1.0
    )
    assert (await exchange.ended()).ok
    assert exchange.released == []
    assert exchange.wire.closed


async def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        pool = ConnectionPool("127.0.0.1", free.getsockname()[1], lambda: 7.0)
        record = StreamRecord(0.0, 1)
        await pool.ask(b"request", record, timeout_s=10.0)
    assert (record.error, record.end_s) == ("connect", 7.0)


async def _answered(*events: bytes, needs_done: bool = True) -> Any:
    """The record of a whole response: all its events at 1 s, its end at 2 s."""
    exchange = await Exchange(needs_done=needs_done).begun()
    exchange.receive(HEAD + b"".join(map(chunk, events)), 1.0)
    exchange.receive(END, 2.0)
    return await exchange.ended()
