"""Ten common styles of chat templates (and the real model's), rendered as by transformers' tokenizers.

Every style × every conversation × every way to end the prompt × tools, documents and other variables;
where one side refuses, the other has to.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import jinja2
import pytest

from common.errors import InvalidRequestError
from router.tokenizer import Tokenizer
from router.tokenizer_parts import TokenizerParts
from tests.router import tiny_tokenizers as tiny
from tests.router.template_styles import SMOLLM2, STYLES

USER = {"role": "user", "content": "Tell me <b>why</b> & 'how' \"안녕\"  "}
ASSISTANT = {"role": "assistant", "content": "Because.\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "f", "description": "it's <é>", "parameters": {"type": "object"}}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What's the weather <now> in a città?",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "array", "items": {"type": "integer"}},
                "more": {"type": "object"},
            },
            "required": ["city"],
        },
        "strict": True,
    },
}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "abcdefgh1", "type": "function", "function": {"name": name, "arguments": arguments}}


CALLS = {"role": "assistant", "content": None, "tool_calls": [call("weather", {"city": "大阪", "days": [1, 2]})]}
RESULT = {"role": "tool", "content": '{"sky": "<blue>"}', "tool_call_id": "abcdefgh1"}
THOUGHT = {"role": "assistant", "content": "Four.", "reasoning_content": "\n2 + 2\n"}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "user", "content": "Hello"}],
    "system": [SYSTEM, USER],
    "system in the middle": [USER, ASSISTANT, SYSTEM, USER],
    "turns": [USER, ASSISTANT, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": " So. "}],
    "system and turns": [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "Why?"}],
    "two users": [USER, USER],
    "unicode": [
        {"role": "user", "content": "안녕 ไทย 中文 👩‍👩‍👧 e\u0301 \u00a0"},
        {"role": "assistant", "content": "はい🏽"},
    ],
    "empty content": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    "null content": [{"role": "user", "content": None}],
    "null fields": [{"role": "user", "content": "a", "name": None, "tool_calls": None}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}],
    "answer in parts": [USER, {"role": "assistant", "content": [{"type": "text", "text": "one"}]}],
    "call": [USER, CALLS],
    "call with its arguments as text": [USER, {**CALLS, "tool_calls": [call("weather", '{"city": "大阪"}')]}],
    "call beside content": [USER, {**CALLS, "content": "Let me see."}],
    "two calls": [USER, {**CALLS, "tool_calls": [call("weather", {}), call("weather", {"city": "x"})]}],
    "results": [SYSTEM, USER, CALLS, RESULT, {"role": "assistant", "content": "Blue."}, USER],
    "two results": [USER, CALLS, RESULT, RESULT],
    "result that is no text": [USER, CALLS, {**RESULT, "content": {"sky": ["é"]}}],
    "reasoning": [USER, THOUGHT, USER, THOUGHT],
    "reasoning in the text": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}, USER, THOUGHT],
    "unknown role": [{"role": "critic", "content": "Bad."}],
    "tokens in the text": [{"role": "user", "content": "<|begin|>[INST]<|im_end|>{{ bos_token }}{% endif %}"}],
}
ENDS: dict[str, dict[str, Any]] = {
    "closed": {"add_generation_prompt": False},
    "answer": {"add_generation_prompt": True},
    "continued": {"add_generation_prompt": False, "continue_final_message": True},
}
VARIABLES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "tools": {"tools": [WEATHER, TOOL]},
    "no tools": {"tools": []},
    "documents": {"documents": [{"title": "Été", "text": "<b>"}, {"title": "2", "text": "b"}]},
    "thinking": {"enable_thinking": False, "date_string": "1 May"},
}
ORACLE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError)


@cache
def served_and_oracle(style: str) -> tuple[Tokenizer, Any]:
    from transformers import PreTrainedTokenizerFast

    backend = tiny.byte_level(vocab_size=330)
    named = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    oracle = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    templates = STYLES[style]
    oracle.chat_template = templates if len(templates) > 1 else templates["default"]
    return Tokenizer(TokenizerParts(backend, 331, named, templates)), oracle


def served(style: str, messages: list[dict[str, Any]], **asked: Any) -> str | None:
    """What both say, None when both refuse."""
    tokenizer, oracle = served_and_oracle(style)
    try:
        expected = oracle.apply_chat_template(copy.deepcopy(messages), tokenize=False, **asked)
    except ORACLE_FAULTS:
        with pytest.raises(InvalidRequestError) as caught:
            tokenizer.render_chat(messages, **asked)
        assert caught.value.param in ("messages", "continue_final_message")
        return None
    assert tokenizer.render_chat(messages, **asked) == expected
    return str(expected)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("end", ENDS)
def test_ten_styles_are_rendered_as_by_transformers(style: str, end: str) -> None:
    for name, messages in CONVERSATIONS.items():
        for variables in VARIABLES.values():
            before = copy.deepcopy(messages)
            text = served(style, messages, **ENDS[end], **variables)
            assert messages == before, "the client's messages stay as they are"
            assert text is not None or name != "plain"


@pytest.mark.parametrize(
    ("style", "conversation", "expected"),
    [
        ("gemma", "system", "System role not supported"),
        ("gemma", "two users", "roles must alternate"),
        ("llama-2", "two users", "Roles must alternate"),
        ("llama-3", "two calls", "One tool call at once!"),
        ("mistral", "unknown role", "Unknown role critic"),
        ("zephyr", "parts", "must be str|can only concatenate"),
        ("chatml", "call", "no attribute 'content'"),
    ],
)
def test_a_refusal_says_why(style: str, conversation: str, expected: str) -> None:
    messages = CONVERSATIONS[conversation]
    assert served(style, messages, add_generation_prompt=True) is None
    with pytest.raises(InvalidRequestError, match=expected):
        served_and_oracle(style)[0].render_chat(messages)


def test_the_styles_render_most_conversations() -> None:
    """Refusals are compared too, but what is compared should be mostly text."""
    for style in STYLES:
        texts = [served(style, messages, add_generation_prompt=True) for messages in CONVERSATIONS.values()]
        assert texts.count(None) <= len(texts) * 0.6, style


def test_what_the_styles_say() -> None:
    """Some whole prompts, so that an oracle that went astray shows too."""
    hello = CONVERSATIONS["plain"]
    assert served("chatml", hello, add_generation_prompt=True) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert served("gemma", hello, add_generation_prompt=True) == (
        "<|begin|><start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n"
    )
    turns = [SYSTEM, *hello, {"role": "assistant", "content": "Hi"}]
    assert served("llama-2", turns, add_generation_prompt=False) == (
        "<|begin|>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHello [/INST] Hi <|end|>"
    )
    assert "<think>\n\n</think>" in str(served("qwen", hello, add_generation_prompt=True, enable_thinking=False))
    called = served("mistral", [*hello, CALLS], tools=[WEATHER], add_generation_prompt=False)
    assert called is not None
    assert '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "大阪", "days": [1, 2]}}, "id"' in called


def test_tools_choose_the_template_for_tools() -> None:
    text = served("command-r", CONVERSATIONS["plain"], tools=[WEATHER], add_generation_prompt=True)
    assert text is not None
    assert "def weather(city: str, days: List[int] = None, more: Dict = None) -> List[Dict]:" in text
    without = served("command-r", CONVERSATIONS["plain"], add_generation_prompt=True, **VARIABLES["documents"])
    assert without is not None
    assert "Document: 0\ntitle: Été\ntext: <b>\n" in without


def test_several_templates_and_none_is_the_default() -> None:
    tokenizer = Tokenizer(TokenizerParts(tiny.byte_level(vocab_size=330), 331, {}, {"rag": "r", "tool_use": "t"}))
    assert tokenizer.render_chat([USER], tools=[TOOL]) == "t"
    with pytest.raises(InvalidRequestError, match="no default chat template, it has only: rag, tool_use"):
        tokenizer.render_chat([USER])


@pytest.mark.e2e
def test_the_real_model_has_the_template_that_is_tested_here() -> None:
    from common.gguf_metadata import read_metadata
    from common.model_store import resolve

    assert read_metadata(resolve("smollm2-135m"), ("tokenizer.",))["tokenizer.chat_template"] == SMOLLM2
