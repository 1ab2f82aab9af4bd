"""Chat templates: a conversation becomes the one text that its model was trained on.

Rendering is that of transformers to the letter (same jinja2 environment, filters and globals, same
treatment of the messages), in a sandbox: templates come with the model, and models come from anywhere.
Knows nothing of tokens; what a template calls ``bos_token`` is handed in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ConfigError, InvalidRequestError

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send an assistant's reasoning; templates read one of the first two."""

TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a template raises when a conversation is not of the form that it expects."""


class ChatTemplate:
    """One compiled template. Rendering changes nothing, so threads may share it."""

    def __init__(self, source: str, now: Callable[[], datetime] = datetime.now) -> None:
        """``now`` answers templates that print today's date. Raises ConfigError for a syntax error."""
        try:
            self._template = _environment(now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            where = f"line {error.lineno} of the model's chat template"
            raise ConfigError(f"syntax error in {where}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of ``messages`` (OpenAI's form, plain JSON values) in the model's own format.

        ``add_generation_prompt`` opens the assistant's turn at the end. ``variables`` are further
        names that the template may use: special tokens, ``documents``, ``enable_thinking``, …

        Raises InvalidRequestError when the template refuses the conversation or cannot render it.
        """
        if not messages:
            raise InvalidRequestError("messages must hold at least one message, it is empty", param="messages")
        variables.setdefault("documents", None)
        try:
            return self._template.render(
                messages=[_as_templates_expect(message) for message in messages],
                tools=None if tools is None else list(tools),
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except TEMPLATE_FAULTS as error:
            raise InvalidRequestError(
                f"the model's chat template cannot render these messages: {error}", param="messages"
            ) from error


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
    return environment


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
