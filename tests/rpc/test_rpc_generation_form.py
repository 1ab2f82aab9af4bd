"""Messages of the public service become the fields that the same request has as JSON."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequestError
from rpc.generation_form import generation_fields
from rpc.v1 import generation_pb2 as pb

TEXT = pb.GenerateRequest(model="m", text="hello")


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (pb.GenerateRequest(), {}),
        (TEXT, {"model": "m", "prompt": "hello"}),
        (pb.GenerateRequest(text=""), {"prompt": ""}),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[0, 7])), {"prompt": [0, 7]}),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), {"prompt": []}),
        (pb.GenerateRequest(top_p=0.0, seed=0, ignore_eos=False), {"top_p": 0.0, "seed": 0, "ignore_eos": False}),
        (pb.GenerateRequest(stop=["a", ""], stop_token_ids=[0]), {"stop": ["a", ""], "stop_token_ids": [0]}),
        (pb.GenerateRequest(logit_bias={0: -1.5, 9: 0.0}), {"logit_bias": {"0": -1.5, "9": 0.0}}),
        (pb.GenerateRequest(slo=pb.Slo(ttft_s=1.0)), {"slo": {"ttft_s": 1.0}}),
        (pb.GenerateRequest(logprobs=True), {"logprobs": 0}),
        (pb.GenerateRequest(logprobs=True, top_logprobs=3), {"logprobs": 3}),
        (pb.GenerateRequest(logprobs=False, top_logprobs=0), {}),
        (pb.GenerateRequest(chat=pb.Chat()), {"messages": []}),
        (pb.GenerateRequest(chat=pb.Chat(), logprobs=True, top_logprobs=3),
         {"messages": [], "logprobs": True, "top_logprobs": 3}),
        (
            pb.GenerateRequest(
                chat=pb.Chat(
                    messages=[
                        pb.ChatMessage(role="user", content=""),
                        pb.ChatMessage(
                            role="assistant",
                            tool_calls=[pb.ToolCall(id="c", function=pb.ToolFunction(name="f", arguments="{}"))],
                        ),
                    ],
                    tools=['{"n": 12345678901234567890}'],
                    chat_template_kwargs='{"thinking": true}',
                    add_generation_prompt=False,
                )
            ),
            {
                "messages": [
                    {"role": "user", "content": ""},
                    {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
                ],
                "tools": [{"n": 12345678901234567890}],
                "chat_template_kwargs": {"thinking": True},
                "add_generation_prompt": False,
            },
        ),
    ],
)  # fmt: skip
def test_a_request_is_the_fields_that_were_set(request_: pb.GenerateRequest, fields: dict[str, Any]) -> None:
    chat = "messages" in fields
    assert generation_fields(request_) == (fields, chat)
    assert generation_fields(pb.GenerateRequest.FromString(request_.SerializeToString())) == (fields, chat)


@pytest.mark.parametrize(
    ("request_", "param", "words"),
    [
        (pb.GenerateRequest(top_logprobs=2), "top_logprobs", "only be set when logprobs is true, got 2"),
        (pb.GenerateRequest(chat=pb.Chat(tools=["{}", "{"])), "tools.1", "tools.1 is not JSON"),
        (pb.GenerateRequest(chat=pb.Chat(chat_template_kwargs='{"x": NaN}')), "chat_template_kwargs", "NaN is no JSON"),
        (pb.GenerateRequest(chat=pb.Chat(tools=["[" * 100_000])), "tools.0", "is not JSON"),
        (pb.GenerateRequest(chat=pb.Chat(tools=["1" * 10_000])), "tools.0", "is not JSON"),
    ],
)
def test_what_is_no_request_at_all(request_: pb.GenerateRequest, param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        generation_fields(request_)
    assert caught.value.param == param
