"""Chat templates: a conversation becomes the one text that its model was trained on.

Rendering is that of transformers to the letter (same jinja2 environment, filters and globals, same
treatment of the messages), in a sandbox: templates come with the model, and models come from anywhere.
The sandbox keeps a template from the process's objects and from changing what it is given. It does not
keep it from taking its time: a loop without end cannot be stopped from outside. That is why a template
comes with the model, which the operator chose, and never with a request.

Knows nothing of tokens; what a template calls ``bos_token`` is handed in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ConfigError, InvalidRequestError

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send an assistant's reasoning; templates read one of the first two."""

OWN_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""What `ChatTemplate.render` names itself; a client's own template variables must be called otherwise."""

TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
)
"""What a template raises when a conversation is not of the form that it expects, or asks too much."""

END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Put behind a message that is to be continued; where it comes out, the prompt ends. Its space tells whether
the template trims messages."""


class ChatTemplate:
    """One compiled template. Rendering changes nothing, so threads may share it."""

    def __init__(self, source: str, now: Callable[[], datetime] = datetime.now) -> None:
        """``now`` answers templates that print today's date. Raises ConfigError for a syntax error."""
        self._source = source
        try:
            self._template = _environment(now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            where = f"line {error.lineno} of the model's chat template"
            raise ConfigError(f"syntax error in {where}: {error}") from error

    def render(
        self,
        /,  # a client's variable may be called ``self``
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The text of ``messages`` (OpenAI's form, plain JSON values) in the model's own format.

        ``add_generation_prompt`` opens the assistant's turn at the end; ``continue_final_message`` leaves
        the last message open instead, so that the answer goes on with it. ``variables`` are further names
        that the template may use: special tokens, ``documents``, ``enable_thinking``, …, none of
        `OWN_NAMES`.

        Raises InvalidRequestError when the template refuses the conversation or cannot render it, or
        when both ends are asked for.
        """
        if not messages:
            raise InvalidRequestError("messages must hold at least one message, it is empty", param="messages")
        prepared = [_as_templates_expect(message) for message in messages]
        if continue_final_message:
            if add_generation_prompt:
                raise _not_continued("add_generation_prompt, which begins a new message, must be false with it")
            final = self._mark_end(prepared)
        names = {
            "documents": None,
            **variables,
            "messages": prepared,
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(names)
        except TEMPLATE_FAULTS as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequestError(
                f"the model's chat template cannot render these messages: {reason}", param="messages"
            ) from error
        return _cut_at_mark(text, final) if continue_final_message else text

    def _mark_end(self, messages: list[dict[str, Any]]) -> str:
        """Puts `END_MARK` behind the last message's text, which is returned."""
        content = messages[-1].get("content")
        if content is None:
            raise _not_continued("the last message has no content")
        if "content" not in self._source:
            raise _not_continued("the model's chat template does not show the content of messages")
        if isinstance(content, str):
            messages[-1]["content"] = content + END_MARK
            return content
        parts = list(content) if isinstance(content, Sequence) else []
        for index in reversed(range(len(parts))):
            text = parts[index].get("text") if isinstance(parts[index], Mapping) else None
            if isinstance(text, str):
                parts[index] = {**parts[index], "text": text + END_MARK}
                messages[-1]["content"] = parts
                return text
        raise _not_continued("the last message's content holds no text")


def _cut_at_mark(text: str, final: str) -> str:
    """``text`` up to where the last message's own text (``final``) ended, as the template shows it."""
    end = text.rfind(END_MARK.strip())
    if end < 0 or final.strip() not in text:
        raise _not_continued("the model's chat template does not show the last message as it is")
    trims = not text.startswith(END_MARK, end)
    return text[:end].rstrip() if trims else text[:end]


def _not_continued(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"continue_final_message is not possible: {why}", param="continue_final_message")


def _as_templates_expect(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without its null fields (templates test for presence, and would print ``None``), and
    with its reasoning under every name that templates read.
    """
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[name] for name in REASONING_FIELDS if name in present), None)
    if reasoning is None:
        return present
    return {"thinking": reasoning, **present, "reasoning_content": reasoning}


class _Generation(jinja2.ext.Extension):
    """``{% generation %} … {% endgeneration %}`` marks an assistant's words for training. Here they are
    only rendered.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    @staticmethod
    def _render(caller: Callable[[], str]) -> str:
        return caller()


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class _Dict:
    """What templates call ``dict``: makes one, and is not the class itself, through which there is a way out."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """What templates call ``namespace``, without the names that Python keeps for itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may well have a ``self`` of its own
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template's namespace cannot hold {name!r}: it begins with '_'")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes ``<`` and ``'`` for use in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
