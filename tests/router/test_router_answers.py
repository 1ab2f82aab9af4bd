"""What a request may ask of its answers beyond tokens: stop strings, several answers, logprobs, echo,
truncation. On a fake fleet; every expected text is made from `fake_answer`, which no stop or child changes.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from common.log import CONTENT_LOGGER
from router.fakes import FakeFleet, fake_answer
from tests.both_ways import both_ways, events_of
from tests.router.fleet import until
from tests.router.gateway import ByteTokenizer, chat, http

PROMPT = [40, 41, 42]
TEXT = bytes(fake_answer(PROMPT, 60)).decode()


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": PROMPT, "max_tokens": 12, **fields}


async def settled(fleet: FakeFleet) -> None:
    await until(lambda: fleet.idle)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stops", "ends_at"),
    [
        (TEXT[3], 3),
        (TEXT[4:8], 4),
        ([TEXT[6:9], TEXT[2:5]], 2),
        (["never", TEXT[0]], 0),
        ([TEXT[11]], 11),  # the last token of all
        (["never"], None),
        ([TEXT[10:12] + "!"], None),  # a false start at the very end
    ],
)
async def test_stop_strings_end_the_text(stops: str | list[str], ends_at: int | None, include: bool) -> None:
    async with http() as (client, _, fleet):
        (choice,) = await both_ways(
            client,
            "/v1/completions",
            completion(stop=stops, include_stop_str_in_output=include, return_token_ids=True),
        )
        if ends_at is None:
            assert (choice["text"], choice["finish_reason"]) == (TEXT[:12], "length")
            return
        stop = next(stop for stop in ([stops] if isinstance(stops, str) else stops) if TEXT[ends_at:].startswith(stop))
        assert choice["text"] == TEXT[: ends_at + (len(stop) if include else 0)]
        assert choice["finish_reason"] == "stop"
        num_tokens = ends_at + len(stop)
        assert choice["token_ids"] == fake_answer(PROMPT, num_tokens)
        assert choice["usage"]["completion_tokens"] == num_tokens
        await settled(fleet)


async def test_what_is_stopped_is_recorded_as_finished_and_its_tokens_add_up() -> None:
    async with http(step_s=0.01) as (client, gateway, fleet):
        response = await client.post("/v1/completions", json=completion(stop=TEXT[2:4], max_tokens=50))
        body = response.json()
        await until(lambda: gateway.service.records.num_live == 0)
        assert fleet.idle
        record = (await client.get(f"/requests/{body['id']}")).json()
        assert (record["state"], record["finish_reason"]) == ("finished", "stop")
        tokens = record["tokens"]
        assert tokens["emitted"] == body["usage"]["completion_tokens"] == 4
        assert tokens["cached_decode"] + tokens["received"] + tokens["computed_decode"] == tokens["prompt"] == 3
        assert fleet.workers["d0"].cancelled == [f"{body['id']}#0"]
        assert fleet.workers["d0"].steps < 30  # it did not go on to 50
        assert gateway.service.metrics.requests_running._value.get() == 0


async def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    async with http() as (client, _, _):
        (choice,) = await both_ways(client, "/v1/completions", completion(stop=[TEXT[2], TEXT[7]], min_tokens=4))
        assert choice["text"] == TEXT[:7]
        assert choice["finish_reason"] == "stop"


async def test_nothing_of_a_stop_string_is_streamed() -> None:
    """R30: a stop string over seven tokens; and the beginning of one that is none is released."""
    async with http() as (client, _, _):
        stop = TEXT[5:12]
        (choice,) = await both_ways(client, "/v1/completions", completion(stop=[stop, TEXT[1:3] + "?"], max_tokens=30))
        assert "".join(choice["deltas"]) == TEXT[:5]
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
async def test_several_answers_share_a_prompt(endpoint: str) -> None:
    """R33: all come, with one seed and a child each, and later ones find the prompt where the first left it."""
    async with http() as (client, _, fleet):
        prompt = list(range(60, 110))
        body = completion(prompt=prompt, n=3, seed=5) if endpoint == "/v1/completions" else chat("x" * 50, n=3, seed=5)
        choices = await both_ways(client, endpoint, body)
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        seen = fleet.workers["d0"].seen
        assert [(r.sampling.seed, r.sampling.child) for r in seen] == [(5, 0), (5, 1), (5, 2)] * 2
        length = len(seen[0].prompt)
        num_completion = body["max_tokens"] * 3
        assert choices[0]["usage"] == {
            "prompt_tokens": length,
            "completion_tokens": num_completion,
            "total_tokens": length + num_completion,
        }
        await settled(fleet)


async def test_later_answers_wait_for_the_handoff_of_the_first() -> None:
    async with http(step_s=0.02) as (client, _, fleet):
        asked = asyncio.ensure_future(client.post("/v1/completions", json=completion(n=2, max_tokens=30)))
        await until(lambda: fleet.workers["p0"].seen)
        assert len(fleet.workers["d0"].seen) == 1
        response = await asked
        records = [(await client.get(f"/requests/{response.json()['id']}{end}")).json() for end in ("", "-1")]
        assert records[1]["phases_s"]["first_token"] > records[0]["phases_s"]["first_token"]
        assert all(record["tokens"]["emitted"] == 30 for record in records)


@pytest.mark.parametrize("worker", ["p0", "d0"])
async def test_later_answers_go_on_when_the_first_is_placed_again(worker: str) -> None:
    async with http(prefill=2, decode=2, step_s=0.01) as (client, _, fleet):
        asked = asyncio.ensure_future(client.post("/v1/completions", json=completion(n=3, max_tokens=20)))
        await until(lambda: any(w.seen for w in fleet.workers.values()))
        role = worker[0]
        victim = next(w for name, w in fleet.workers.items() if name.startswith(role) and (w.seen or role == "p"))
        victim.kill()
        response = await asked
        assert response.status_code == 200
        text = bytes(fake_answer(PROMPT, 20)).decode()
        assert [choice["text"] for choice in response.json()["choices"]] == [text] * 3


async def test_logprobs_of_chat() -> None:
    """R34: one entry for each token, the first included, streamed or not."""
    async with http() as (client, _, _):
        (choice,) = await both_ways(client, "/v1/chat/completions", chat(logprobs=True, top_logprobs=2))
        content = choice["logprobs"]["content"]
        answer = fake_answer(ByteTokenizer().encode("<user>Hello<assistant>", False), 5)
        assert [entry["token"] for entry in content] == [chr(token) for token in answer]
        assert [entry["logprob"] for entry in content] == [-(index + 1) / 8 for index in range(5)]
        assert [entry["bytes"] for entry in content] == [[token] for token in answer]
        assert [[top["token"] for top in entry["top_logprobs"]] for entry in content] == [
            [chr(token), chr(token + 1)] for token in answer
        ]
        assert [entry for part in choice["stream_logprobs"] for entry in part["content"]] == content
        (plain,) = await both_ways(client, "/v1/chat/completions", chat(logprobs=True))
        assert [entry["top_logprobs"] for entry in plain["logprobs"]["content"]] == [[]] * 5
        (none,) = await both_ways(client, "/v1/chat/completions", chat())
        assert none["logprobs"] is None


async def test_logprobs_of_completions() -> None:
    async with http() as (client, _, _):
        (choice,) = await both_ways(client, "/v1/completions", completion(logprobs=2, max_tokens=4))
        told = choice["logprobs"]
        answer = fake_answer(PROMPT, 4)
        assert told["tokens"] == [chr(token) for token in answer]
        assert told["token_logprobs"] == [-(index + 1) / 8 for index in range(4)]
        assert told["top_logprobs"] == [
            {chr(token): -(i + 1) / 8, chr(token + 1): -(i + 1) / 8 - 1} for i, token in enumerate(answer)
        ]
        assert told["text_offset"] == [0, 1, 2, 3]
        for key in told:
            assert [value for part in choice["stream_logprobs"] for value in part[key]] == told[key]
        (zero,) = await both_ways(client, "/v1/completions", completion(logprobs=0, max_tokens=4))
        assert zero["logprobs"]["top_logprobs"] is None
        assert zero["logprobs"]["token_logprobs"] == told["token_logprobs"]


async def test_logprobs_end_where_a_stop_string_is_complete() -> None:
    async with http() as (client, _, _):
        (choice,) = await both_ways(client, "/v1/completions", completion(logprobs=1, stop=TEXT[3:5]))
        assert len(choice["logprobs"]["tokens"]) == choice["usage"]["completion_tokens"] == 5


async def test_echo() -> None:
    async with http() as (client, _, _):
        (choice,) = await both_ways(client, "/v1/completions", completion(prompt="Once", echo=True))
        assert choice["text"] == "Once" + bytes(fake_answer(list(b"Once"), 12)).decode()
        (choice,) = await both_ways(client, "/v1/completions", completion(echo=True, n=1))
        assert choice["text"] == bytes(PROMPT).decode() + TEXT[:12]


async def test_what_is_echoed_is_the_prompt_that_was_used() -> None:
    async with http() as (client, _, _):
        body = completion(prompt="Once upon", echo=True, logprobs=0, truncate_prompt_tokens=4, max_tokens=2)
        (choice,) = await both_ways(client, "/v1/completions", body)
        assert choice["text"] == "upon" + bytes(fake_answer(list(b"upon"), 2)).decode()
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


@pytest.mark.parametrize("mode", ["split", "colocated"])
@pytest.mark.parametrize("prompt", [PROMPT, [70]])
async def test_echo_with_logprobs_tells_of_the_prompt(mode: str, prompt: list[int]) -> None:
    """R34: one entry for each token of prompt and answer; null for the first, which follows nothing."""
    async with http(mode=mode) as (client, _, _):
        body = completion(prompt=prompt, echo=True, logprobs=2, max_tokens=3)
        (choice,) = await both_ways(client, "/v1/completions", body)
        told = choice["logprobs"]
        everything = prompt + fake_answer(prompt, 3)
        assert told["tokens"] == [chr(token) for token in everything]
        expected = [-(i + 1) / 8 for i in range(len(prompt) - 1)] + [-(i + 1) / 8 for i in range(3)]
        assert told["token_logprobs"] == [None, *expected]
        assert told["top_logprobs"][0] is None
        assert [next(iter(entry.values())) for entry in told["top_logprobs"][1:]] == expected
        assert told["text_offset"] == list(range(len(everything)))
        assert "".join(told["tokens"]) == choice["text"]
        for key in told:
            assert [value for part in choice["stream_logprobs"] for value in part[key]] == told[key]


@pytest.mark.parametrize("worker", ["p0", "p1", "d0", "d1"])
async def test_what_is_told_of_the_prompt_survives_a_worker(worker: str) -> None:
    async with http(prefill=2, decode=2, step_s=0.02) as (client, _, fleet):
        body = completion(echo=True, logprobs=0, max_tokens=8)
        asked = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await until(lambda: any(w.seen for w in fleet.workers.values()))
        await asyncio.sleep(0.01)
        fleet.workers[worker].kill()
        response = await asked
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        assert choice["text"] == bytes(PROMPT).decode() + TEXT[:8]
        assert len(choice["logprobs"]["tokens"]) == len(PROMPT) + 8
        assert None not in choice["logprobs"]["token_logprobs"][1:]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"truncate_prompt_tokens": 10}, list(range(30, 40))),
        ({"truncate_prompt_tokens": 10, "truncation_side": "right"}, list(range(10))),
        ({"truncate_prompt_tokens": 40}, list(range(40))),
        ({"truncate_prompt_tokens": -1, "max_tokens": 24}, list(range(40))),
        ({"truncate_prompt_tokens": -1, "max_tokens": 25}, list(range(1, 40))),
    ],
)
async def test_long_prompts_are_cut_on_request(fields: dict[str, Any], prompt: list[int]) -> None:
    async with http(max_model_len=64) as (client, _, fleet):
        response = await client.post("/v1/completions", json=completion(prompt=list(range(40)), **fields))
        assert response.status_code == 200, response.text
        assert list(fleet.workers["d0"].seen[0].prompt) == prompt
        assert response.json()["usage"]["prompt_tokens"] == len(prompt)


async def test_limits_of_several_answers() -> None:
    async with http() as (client, _, fleet):
        body = completion(prompt=[[1], [2], [3]], n=100)
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert "256 answers at most, got 3 prompts with n = 100" in response.json()["error"]["message"]
        assert not fleet.workers["d0"].seen


async def test_sampling_fields_reach_the_workers() -> None:
    async with http() as (client, _, fleet):
        fields = {"min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.4}
        response = await client.post(
            "/v1/completions", json=completion(**fields, logit_bias={"7": -100, "9": 0, "8": 2})
        )
        assert response.status_code == 200, response.text
        sampling = fleet.workers["p0"].seen[0].sampling
        assert {name: getattr(sampling, name) for name in fields} == fields
        assert [(bias.token, bias.bias) for bias in sampling.logit_bias] == [(7, -100.0), (8, 2.0)]


async def test_a_client_that_leaves_ends_all_its_answers() -> None:
    """R6: n = 3, gone after the first event."""
    async with http(step_s=0.01) as (client, gateway, fleet):
        body = json.dumps(completion(n=3, max_tokens=200, stream=True, ignore_eos=True))
        async with client.stream("POST", "/v1/completions", content=body) as response:
            async for _ in response.aiter_bytes():
                break
        await settled(fleet)
        await until(lambda: gateway.service.metrics.requests_running._value.get() == 0)


async def test_logs_name_the_request_and_say_nothing_of_what_was_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with http() as (client, gateway, _):
        body = (await client.post("/v1/chat/completions", json=chat("SECRET"))).json()
        await until(lambda: gateway.service.records.num_live == 0)
    answer = body["choices"][0]["message"]["content"]
    (line,) = [record for record in caplog.records if getattr(record, "request_id", None) == body["id"]]
    fields = vars(line)
    assert fields["message"] == "request finished"
    assert (fields["prefill"], fields["decode"], fields["completion_tokens"]) == ("p0", "d0", 5)
    assert fields["prompt_tokens"] == body["usage"]["prompt_tokens"]
    assert 0 < fields["ttft_s"] <= fields["total_s"]
    everything = "".join(str(vars(record)) for record in caplog.records)
    assert "SECRET" not in everything
    assert answer not in everything


async def test_content_is_logged_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with http() as (client, gateway, _):
        gateway.content = logging.getLogger(CONTENT_LOGGER)
        body = (await client.post("/v1/completions", json=completion(n=2))).json()
    lines = [vars(record) for record in caplog.records if record.name == CONTENT_LOGGER]
    assert [(line["request_id"], line["prompt"], line["answer"]) for line in lines] == [
        (body["id"], "()*", TEXT[:12]),
        (f"{body['id']}-1", "()*", TEXT[:12]),
    ]


async def test_usage_in_every_event_when_asked_for() -> None:
    async with http() as (client, _, _):
        options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        response = await client.post("/v1/completions", json=completion(max_tokens=4, n=2) | options)
        events = events_of(response.text)[:-1]
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-2:] == [8, 8]
        assert {event["usage"]["prompt_tokens"] for event in events} == {3}
