"""Chat templates, with transformers' own rendering as oracle."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from common.errors import ConfigError, InvalidRequestError
from router.templates import OWN_NAMES, ChatTemplate
from tests.router.template_styles import COMMAND_R, LLAMA3, SMOLLM2

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


# ── a message to be continued ─────────────────────────────────────────────────────────────────────


def continued(source: str, *messages: dict[str, Any]) -> str:
    return ChatTemplate(source).render(messages, add_generation_prompt=False, continue_final_message=True)


def test_the_last_message_stays_open() -> None:
    opened = continued(SMOLLM2, SYSTEM, USER, {"role": "assistant", "content": "Well,  "})
    assert opened.endswith("<|im_start|>assistant\nWell,  "), "as it is, with its spaces"
    assert continued(LLAMA3, {"role": "assistant", "content": " Well,  "}).endswith("\n\nWell,"), "here it is trimmed"
    user = continued(SMOLLM2, SYSTEM, {"role": "user", "content": "My name is"})
    assert user.endswith("<|im_start|>user\nMy name is"), "whosever message it is"


def test_a_mark_in_the_text_is_no_mark() -> None:
    text = "CONTINUE_FINAL_MESSAGE_TAG is a name"
    assert continued(COMMAND_R, {"role": "user", "content": text}).endswith("_TOKEN|>" + text)


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (SMOLLM2, None, "the last message has no content"),
        ("{{ messages[0].role }}", "x", "does not show the content of messages"),
        ("{{ messages[0].content[:3] }}", "abcdef", "does not show the last message as it is"),
        ("{{ messages[0].content | upper }}", "abc", "does not show the last message as it is"),
        ("{{ messages[0].content[0].type }}", [{"type": "image"}], "holds no text"),
        ("{{ messages[0].content }}", 7, "holds no text"),
        ("{{ messages[0].content }}", [], "holds no text"),
    ],
)
def test_what_cannot_be_continued(source: str, content: Any, expected: str) -> None:
    with pytest.raises(InvalidRequestError, match=expected) as caught:
        continued(source, {"role": "assistant", "content": content})
    assert caught.value.param == "continue_final_message"


def test_a_prompt_ends_in_one_way_only() -> None:
    with pytest.raises(InvalidRequestError, match=r"add_generation_prompt.* must be false") as caught:
        ChatTemplate(SMOLLM2).render([USER], continue_final_message=True)
    assert caught.value.param == "continue_final_message"


# ── faults and hostile templates ──────────────────────────────────────────────────────────────────


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
        ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ ''['__class__'].__base__ }}", "unsafe"),
        ("{{ (''|attr('__class__')).__base__ }}", "unsafe|undefined"),
        ("{{ raise_exception.__globals__.keys() }}", "unsafe"),
        ("{{ strftime_now.__globals__.clear() }}", "unsafe"),
        ("{{ dict.__class__ }}{{ dict.mro() }}", "unsafe|no attribute 'mro'"),
        ("{{ namespace.__init__.__globals__ }}", "unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "cannot hold '__class__'"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "cannot hold '__class__'"),
        ("{{ cycler.__init__.__globals__.os }}", "unsafe"),
        ("{% set x = messages[0].update({'role': 'system'}) %}", "unsafe|update"),
        ("{{ messages.pop() }}", "pop"),
        ("{% include 'secret' %}", "no loader"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ messages[0].content * 10 ** 15 }}", "MemoryError"),
        ("{{ unheard_of() }}", "'unheard_of' is undefined"),
    ],
)
def test_what_a_template_refuses_is_the_clients_fault(source: str, expected: str) -> None:
    with pytest.raises(InvalidRequestError, match=expected) as caught:
        ChatTemplate(source).render([USER])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ dict.__class__ }}",
        "{{ '{0.__class__.__init__}'.format(messages) }}",
        "{{ '{x.__class__}'.format_map({'x': messages}) }}",
    ],
)
def test_what_is_behind_the_values_is_not_shown(source: str) -> None:
    assert ChatTemplate(source).render([USER]) == ""


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


def test_an_unknown_filter_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="No filter named 'unheard_of'"):
        ChatTemplate("{{ messages | unheard_of }}")


def test_templates_may_use_dict_and_namespace() -> None:
    source = (
        "{% set d = dict([('a', 1)], b=2) %}{% set ns = namespace(d, self=3) %}{% set ns.c = 4 %}"
        "{{ d }}{{ dict.fromkeys('xy', 0) }}{{ ns.a }}{{ ns.b }}{{ ns.self }}{{ ns.c }}"
    )
    assert ChatTemplate(source).render([USER]) == transformers_text(source, [USER])


def test_names_that_are_not_the_clients() -> None:
    """Python itself refuses them, so whoever passes on a client's variables looks here first."""
    for name in OWN_NAMES:
        with pytest.raises(TypeError, match=name):
            ChatTemplate("x").render([USER], None, True, False, **{name: 1})


@pytest.mark.parametrize("name", ["self", "context", "environment", "range", "source", "args", "kwargs", "a b", ""])
def test_any_other_name_is(name: str) -> None:
    assert ChatTemplate("{{ messages[0].role }}").render([USER], **{name: 1}) == "user"
