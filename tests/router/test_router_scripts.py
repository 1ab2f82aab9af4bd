"""Writing systems through the whole gateway: the real tokenizer, workers that answer given tokens one by
one, and clients that stream or not. R29: nothing of a character is lost or shown broken.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.model_store import resolve
from router.tokenizer import Tokenizer
from tests.both_ways import events_of
from tests.router.gateway import http

TEXTS = {
    "korean": "안녕하세요, 뷁 쌍둥이 값",
    "thai": "สวัสดีครับ น้ำตก เก่งมาก",
    "chinese": "鑫龘 你好，世界！繁體與简体",
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈👍🏽 🇰🇷",
    "mixed": "naïve café — 中a한b👨‍🚀c",
    "combining": "e\u0301 क्षि ﷺ \u200b",
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve("smollm2-135m"))


async def answers(tokenizer: Tokenizer, ids: list[int], **fields: Any) -> tuple[str, list[str]]:
    """The whole text, and the deltas of the stream, of an answer that is ``ids``."""
    async with http(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size) as (client, _, fleet):
        for worker in fleet.workers.values():
            worker.script = ids
        body = {"model": "fake", "prompt": [70, 71], "max_tokens": len(ids), "return_token_ids": True} | fields
        whole = await client.post("/v1/completions", json=body)
        assert whole.status_code == 200, whole.text
        (choice,) = whole.json()["choices"]
        streamed = await client.post("/v1/completions", json=body | {"stream": True})
        events = events_of(streamed.text)
        assert events.pop() == "[DONE]"
        assert [token for event in events for token in event["choices"][0]["token_ids"]] == choice["token_ids"]
        return choice["text"], [event["choices"][0]["text"] for event in events]


@pytest.mark.parametrize("name", TEXTS)
async def test_streams_are_the_whole_text(tokenizer: Tokenizer, name: str) -> None:
    text = TEXTS[name]
    ids = tokenizer.encode(text, False)
    assert any("\ufffd" in tokenizer.decode([token]) for token in ids)  # some token is no whole character
    whole, deltas = await answers(tokenizer, ids)
    assert whole == text
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("name", TEXTS)
async def test_answers_that_begin_or_end_inside_a_character(tokenizer: Tokenizer, name: str) -> None:
    """As after a prompt of ids that ends there, or when ``max_tokens`` ends the answer there."""
    ids = tokenizer.encode(TEXTS[name], False)
    for part in (ids[1:], ids[2:], ids[:-1], ids[3:-2]):
        whole, deltas = await answers(tokenizer, part)
        assert whole == tokenizer.decode(part)
        assert "".join(deltas) == whole


@pytest.mark.parametrize("name", TEXTS)
async def test_stop_strings_inside_characters_of_several_tokens(tokenizer: Tokenizer, name: str) -> None:
    text = TEXTS[name]
    ids = tokenizer.encode(text, False)
    stop = text[4:6]
    whole, deltas = await answers(tokenizer, ids, stop=[stop, "never"])
    assert whole == "".join(deltas) == text[: text.index(stop)]
    false_start = text[-1] + "\x00"
    whole, deltas = await answers(tokenizer, ids, stop=[false_start])
    assert whole == "".join(deltas) == text


async def test_bytes_of_logprobs_join_to_the_text(tokenizer: Tokenizer) -> None:
    """Clients put split characters together from ``bytes``, as with OpenAI's own service."""
    text = TEXTS["mixed"]
    ids = tokenizer.encode(text, False)
    async with http(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size) as (client, _, fleet):
        for worker in fleet.workers.values():
            worker.script = ids
        body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": len(ids)}
        response = await client.post("/v1/chat/completions", content=json.dumps(body | {"logprobs": True}))
        (choice,) = response.json()["choices"]
        content = choice["logprobs"]["content"]
        assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == text
        assert len(content) == len(ids)
