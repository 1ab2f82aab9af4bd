"""The same request whole and streamed: two roads to one answer."""

from __future__ import annotations

import json
from typing import Any

import httpx


def events_of(body: str) -> list[Any]:
    """The events of a stream that is over."""
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def both_ways(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Choices of the whole response, and the same put together from the stream."""
    whole = await client.post(path, json=body)
    assert whole.status_code == 200, whole.text
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await client.post(path, json=body | options)
    assert response.status_code == 200, response.text
    events = events_of(response.text)
    assert events[-1] == "[DONE]"
    joined: dict[int, dict[str, Any]] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            into = joined.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": [], "deltas": []})
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            into["text"] += text
            into["deltas"].append(text)
            into["token_ids"] += choice.get("token_ids", [])
            if choice["logprobs"] is not None:
                into["logprobs"].append(choice["logprobs"])
            into["finish_reason"] = choice["finish_reason"]
    body_json = whole.json()
    usage = {key: value for key, value in body_json["usage"].items() if key != "prompt_tokens_details"}
    streamed = {key: value for key, value in events[-2]["usage"].items() if key != "prompt_tokens_details"}
    assert usage == streamed
    for choice in body_json["choices"]:
        mine = joined[choice["index"]]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert (text, choice["finish_reason"]) == (mine["text"], mine["finish_reason"])
        assert choice.get("token_ids", []) == mine["token_ids"]
        choice["deltas"], choice["stream_logprobs"], choice["usage"] = mine["deltas"], mine["logprobs"], usage
    return list(body_json["choices"])
