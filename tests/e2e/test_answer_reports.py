"""Reports of users about aborts, refusals and what answers hold, with real processes and the real model.

One cluster has failpoints: pushes of KV are held up now and then, and the decode worker refuses some
handoffs at the last moment. The other is as it should be, and small enough to be asked for too much.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.asking import (
    Chat,
    Failure,
    Leave,
    Prompt,
    Reply,
    Visit,
    ask,
    check_record,
    outcomes,
    random_text_ids,
    receive,
)
from tests.e2e.conftest import CONTEXT_LIMIT
from tests.e2e.fleet import Fleet, fleet

MARGIN_S = 5.0
"""What a busy machine may add to a time that is otherwise known."""
PUSH_DELAY_S = 0.5
REFUSED_PERCENT = 40

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def faulty() -> Iterator[Fleet]:
    refusals = f"failpoints.join={REFUSED_PERCENT}%error:invalid_request"
    with fleet(sets=[f"failpoints.push=delay:{PUSH_DELAY_S}"], decode_sets=[refusals]) as running:
        yield running


@pytest.fixture
def sound(shared_fleet: Fleet) -> Fleet:
    return shared_fleet


def test_r2_a_refusal_after_the_prefill_frees_both_at_once(faulty: Fleet) -> None:
    """The decode worker refuses when all KV is there: the client hears why, nobody waits for anybody."""
    ends = []
    for number in range(10):
        prompt = Prompt(random_text_ids(number, 60), 8)
        started = time.monotonic()
        (end,) = outcomes(faulty, [Visit(prompt, streaming=number % 2 == 0)])
        ends.append(isinstance(end, Failure))
        if isinstance(end, Failure):
            assert "join" in end.message
            assert end.after_s < PUSH_DELAY_S + MARGIN_S
        faulty.quiet(timeout_s=PUSH_DELAY_S + MARGIN_S)
        assert time.monotonic() - started < 2 * (PUSH_DELAY_S + MARGIN_S)
    assert set(ends) == {True, False}  # the failpoint's dice are seeded


def test_r1_aborts_while_kv_is_awaited_leave_nothing(faulty: Fleet) -> None:
    """Pushes are held up, the clients go; then the prefill worker dies, and comes back."""
    rng = random.Random(1)
    for round_number in range(2):
        prompts = [Prompt(random_text_ids(100 + 30 * round_number + i, 40), 50) for i in range(24)]
        gone = [Visit(prompt, i % 2 == 0, Leave(PUSH_DELAY_S * rng.random())) for i, prompt in enumerate(prompts)]
        receive(faulty, gone, concurrency=8)
        faulty.prefill[0].kill()
        faulty.quiet()
        faulty.restart(faulty.prefill[0])
        normal = [Visit(Prompt(random_text_ids(50 + 8 * round_number + i, 40), 8)) for i in range(8)]
        served = [end for end in outcomes(faulty, normal) if isinstance(end, Reply)]
        assert served  # but for those that the failpoint refuses
        for reply in served:
            check_record(faulty, reply)
    faulty.quiet()


def test_r6_all_answers_of_an_aborted_request_end(sound: Fleet) -> None:
    """n = 2 with ``ignore_eos``, streamed, and gone after some events: the gauges are 0 within a second."""
    for number, events in enumerate((0, 1, 5)):
        prompt = Prompt(random_text_ids(600 + number, 30), 400, (("n", 2), ("temperature", 1.0)))
        receive(sound, [Visit(prompt, True, Leave(after_events=events, after_s=10.0))])
        gone_at = time.monotonic()
        sound.quiet(timeout_s=MARGIN_S)
        assert time.monotonic() - gone_at < 1.0 + MARGIN_S
        assert sound.metric("baton_requests_running") == 0


def test_r31_whatever_max_tokens_cuts_is_reported_as_cut(sound: Fleet) -> None:
    """A sweep through an answer that ends by itself: 'stop' from its end on, 'length' at every place before."""
    text = "What is the capital of France?"
    plain = (("temperature", 0.0), ("ignore_eos", False))
    whole = ask(sound, Chat(text, 40, plain))
    assert whole.finish_reason == "stop"
    length = len(whole.token_ids)
    assert 2 < length < 40
    for max_tokens in range(1, length + 2):
        for streaming in (False, True):
            reply = ask(sound, Chat(text, max_tokens, plain), streaming=streaming)
            assert reply.token_ids == whole.token_ids[:max_tokens]
            assert reply.finish_reason == ("stop" if max_tokens >= length else "length")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "min_tokens"])
@pytest.mark.parametrize("streaming", [False, True])
def test_r32_the_prefill_worker_makes_one_token(sound: Fleet, field: str, streaming: bool) -> None:
    """Limits are the request's, not each worker's: whatever the field, P makes the first token and no more."""
    before = sound.loads()
    limits = {"max_tokens": (1, 1), "max_completion_tokens": (1, 1), "min_tokens": (6, 6)}
    wanted, max_tokens = limits[field]
    parameters: tuple[tuple[str, Any], ...] = (("temperature", 0.0), (field, wanted))
    if field == "max_completion_tokens":
        parameters += (("max_tokens", None),)
    reply = ask(sound, Chat(f"Say something, {field} {streaming}.", max_tokens, parameters), streaming=streaming)
    assert len(reply.token_ids) == wanted
    after = sound.loads()
    prompt = len(reply.prompt_token_ids)
    done = {
        name: {key: after[name][key] - before[name][key] for key in ("computed_context_tokens", "decoded_tokens")}
        for name in after
    }
    assert done["prefill-0"] == {"computed_context_tokens": prompt - reply.cached_tokens, "decoded_tokens": 0}
    assert done["decode-0"] == {"computed_context_tokens": 0, "decoded_tokens": wanted - 1}


CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
BAD: list[tuple[dict[str, Any], int, str, tuple[str, ...]]] = [
    ({"prompt": [1], "model": "other"}, 404, "model", ("other", "smollm2-135m")),
    ({"prompt": ""}, 400, "prompt", ("0 tokens",)),
    ({"prompt": []}, 400, "prompt", ("empty",)),
    ({"messages": []}, 400, "messages", ("at least 1",)),
    ({"prompt": [300] * CONTEXT_LIMIT}, 400, "prompt", (f"{CONTEXT_LIMIT}", "no room")),
    ({"prompt": [300] * (CONTEXT_LIMIT + 1)}, 400, "prompt", (f"{CONTEXT_LIMIT + 1}", f"{CONTEXT_LIMIT}")),
    ({"prompt": [300] * (CONTEXT_LIMIT - 1), "max_tokens": 2}, 400, "max_tokens", (f"{CONTEXT_LIMIT + 1}",)),
    ({"prompt": [49152]}, 400, "prompt", ("49152", "49151")),
    ({"prompt": [-1]}, 400, "prompt", ("-1",)),
    ({"prompt": {"a": 1}}, 400, "prompt", ("list",)),
    ({"prompt": [1], "max_tokens": 0}, 400, "max_tokens", ("1", "0")),
    ({"prompt": [1], "max_tokens": -5}, 400, "max_tokens", ("1", "-5")),
    ({"prompt": [1], "max_tokens": 10**12}, 400, "max_tokens", (f"{10**12}",)),
    ({"prompt": [1], "max_tokens": "7"}, 400, "max_tokens", ("integer", "'7'")),
    ({"prompt": [1], "temperature": 3}, 400, "temperature", ("2", "3")),
    ({"prompt": [1], "temperatur": 1}, 400, "temperatur", ("temperature",)),
    ({"prompt": [1], "logit_bias": {"49152": 1}}, 400, "logit_bias", ("49152", "49151")),
    ({"prompt": [1], "stop_token_ids": [49152]}, 400, "stop_token_ids", ("49152",)),
    ({"prompt": [1], "n": 0}, 400, "n", ("1", "0")),
    ({"prompt": [1], "min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", ("8", "9")),
    ({"prompt": [1], "stop": [""]}, 400, "stop", ("0",)),
    ({"prompt": [1], "logprobs": 21}, 400, "logprobs", ("20", "21")),
    ({"prompt": "\ud800"}, 400, "", ("surrogate",)),
    (CHAT | {"top_logprobs": 2}, 400, "top_logprobs", ("2",)),
    (CHAT | {"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tool_choice", ("not parsed",)),
    (CHAT | {"chat_template_kwargs": {"tools": 1}}, 400, "chat_template_kwargs", ("tools",)),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages", ("5",)),
    (CHAT | {"response_format": {"type": "json_object"}}, 400, "response_format", ("not served",)),
]


def test_bad_input_is_refused_by_name_and_leaves_nothing(sound: Fleet) -> None:
    """Field, limit and value in the text, whether a stream was asked for or not; the ledger is as before."""
    before = sound.settled()
    for fields, status, param, words in BAD:
        for streaming in (False, True):
            path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
            body = {"model": sound.model, "stream": streaming} | fields
            response = httpx.post(sound.url + path, content=json.dumps(body), timeout=30, trust_env=False)
            assert response.status_code == status, (fields, response.text)
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert (error["param"] or "").startswith(param), (fields, error)
            for word in words:
                assert word in error["message"], (fields, error)
    for raw in (b"{", b"[]", b'{"prompt": [1], "model": NaN}', b"\xff", b'{"a":' * 5000):
        response = httpx.post(sound.url + "/v1/completions", content=raw, timeout=30, trust_env=False)
        assert response.status_code == 400, response.text
        assert "JSON" in response.json()["error"]["message"]
    after = sound.settled()
    for old, new in zip(before["workers"], after["workers"], strict=True):
        assert [old[key] for key in ("total", "free", "cached")] == [new[key] for key in ("total", "free", "cached")]
    exact = ask(sound, Prompt(random_text_ids(9, CONTEXT_LIMIT - 1), 1))
    assert (len(exact.token_ids), exact.finish_reason) == (1, "length")
