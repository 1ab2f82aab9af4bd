"""Chat templates, with transformers' own rendering as oracle."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from common.errors import ConfigError, InvalidRequestError
from router.templates import ChatTemplate

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WHITESPACE = """\
{%- for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {# a comment #}
  <{{ message.role }}>
    {%- if message.content is defined %}{{ message.content | trim }}{% else %}nothing{% endif %}

{% if loop.index == 3 %}{% break %}{% endif %}
{% endfor %}
{{ bos_token }}end
"""
TOOLS = """\
{%- if tools %}{{ tools | tojson }}|{{ tools[0] | tojson(indent=2, sort_keys=true) }}|{{ tools | length }}{% endif %}
{%- for message in messages %}{{ message.role }}:{% for call in message.tool_calls or [] %}
{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}{{ message.content }}
{%- endfor %}{{ documents is none }}
"""
GENERATION = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}!"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
REASONING = "{% for m in messages %}{{ m.reasoning_content }}/{{ m.thinking }}/{{ m.reasoning }}{% endfor %}"
NAMESPACE = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ x }}"

USER = {"role": "user", "content": "Tell me <b>why</b> & 'how' \"안녕\"  "}
ASSISTANT = {"role": "assistant", "content": "Because.\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": "é<>", "y": [1, None, True]}}}],
}
TOOL = {"type": "function", "function": {"name": "f", "description": "it's <é>", "parameters": {"type": "object"}}}

CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [SYSTEM, USER, ASSISTANT, {"role": "skip", "content": "x"}, USER],
    [{"role": "user", "content": "a", "name": None}],
]


def transformers_text(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

    rendered, _ = render_jinja_template([_normalize_chat_messages(messages)], chat_template=source, **variables)
    return str(rendered[0])


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("source", [SMOLLM2, WHITESPACE, TOOLS, GENERATION, REASONING, NAMESPACE])
def test_text_is_that_of_transformers(source: str, messages: list[dict[str, Any]], generate: bool) -> None:
    variables = {"add_generation_prompt": generate, "bos_token": "<s>", "x": "ü"}
    assert ChatTemplate(source).render(messages, **variables) == transformers_text(source, messages, **variables)


def test_tools_and_calls_are_those_of_transformers() -> None:
    messages = [USER, CALL, {"role": "tool", "content": "42"}]
    text = ChatTemplate(TOOLS).render(messages, tools=[TOOL])
    assert text == transformers_text(TOOLS, messages, tools=[TOOL], add_generation_prompt=True)
    assert "it's <é>" in text, "no HTML escaping"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_under_every_name(name: str) -> None:
    messages = [{**ASSISTANT, name: "hmm"}]
    assert ChatTemplate(REASONING).render(messages) == transformers_text(REASONING, messages)


def test_the_clients_messages_stay_as_they_are() -> None:
    message = {**CALL, "reasoning": "hmm"}
    before = dict(message)
    ChatTemplate(TOOLS).render([message])
    assert message == before


def test_date_comes_from_the_given_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %B %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render([USER]) == "26 July 2024"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + messages[0].parts }}", "no attribute 'parts'"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[7].role.upper() }}", "has no element 7"),
        ("{{ 1 // (messages | length - 1) }}", "zero"),
        ("{{ raise_exception | tojson }}", "not JSON serializable"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ messages.__class__.__mro__ }}", "unsafe|undefined"),
    ],
)
def test_what_a_template_refuses_is_the_clients_fault(source: str, expected: str) -> None:
    with pytest.raises(InvalidRequestError, match=expected) as caught:
        ChatTemplate(source).render([USER])
    assert caught.value.param == "messages"


def test_content_in_parts_is_refused_by_a_template_for_strings() -> None:
    with pytest.raises(InvalidRequestError, match="cannot render these messages"):
        ChatTemplate(SMOLLM2).render([{"role": "user", "content": [{"type": "text", "text": "a"}]}])
    with pytest.raises(InvalidRequestError, match="no attribute 'content'"):
        ChatTemplate(SMOLLM2).render([{"role": "user", "content": None}])


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least one message"):
        ChatTemplate(SMOLLM2).render([])


def test_a_broken_template_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="syntax error in line 2"):
        ChatTemplate("fine\n{% if %}")
