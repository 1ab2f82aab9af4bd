"""What may be asked, by name, and requests made of it.

What is right and wrong with a value the server says; here only what the wire cannot carry is refused.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Required, TypedDict

from google.protobuf.message import Message as ProtobufMessage

from common.errors import InvalidRequestError
from rpc.v1 import generation_pb2 as pb

Prompt = str | Sequence[int]
"""Text, or token ids."""


class Slo(TypedDict, total=False):
    """Targets, in seconds."""

    ttft_s: float
    tpot_s: float


class Options(TypedDict, total=False):
    """What one request may set; the server has the defaults. ``model``: the client's, if it has one, or
    the only one that is served."""

    model: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    n: int
    logprobs: bool
    top_logprobs: int
    skip_special_tokens: bool
    return_token_ids: bool
    echo: bool
    add_special_tokens: bool
    truncate_prompt_tokens: int
    truncation_side: Literal["left", "right"]
    priority: int
    timeout_s: float
    cache_salt: str
    slo: Slo


class TemplateOptions(TypedDict, total=False):
    """What a model's chat template is given beside the messages. ``tools``: in OpenAI's form."""

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str
    chat_template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


class ChatOptions(Options, TemplateOptions, total=False):
    pass


class Message(TypedDict, total=False):
    """One message of a conversation, in OpenAI's form."""

    role: Required[str]
    content: str | None
    name: str
    tool_call_id: str
    tool_calls: Sequence[Mapping[str, Any]]
    reasoning_content: str


def generate_request(prompt: Prompt, options: Mapping[str, Any]) -> pb.GenerateRequest:
    """Raises InvalidRequestError for a value that the wire cannot carry, TypeError for an unknown option."""
    request = pb.GenerateRequest()
    if isinstance(prompt, str):
        _set(request, "text", prompt)
    else:
        request.token_ids.SetInParent()
        _set(request.token_ids, "ids", prompt, param="prompt")
    _set_options(request, options, Options.__annotations__.keys())
    return request


def chat_request(messages: Sequence[Message], options: Mapping[str, Any]) -> pb.GenerateRequest:
    """Likewise, for a conversation."""
    request = pb.GenerateRequest()
    known = ChatOptions.__annotations__.keys()
    template = {name: value for name, value in options.items() if name in TemplateOptions.__annotations__}
    _set_chat(request.chat, messages, template)
    _set_options(request, {name: options[name] for name in options.keys() - template.keys()}, known)
    return request


def tokenize_request(
    text: str | None,
    messages: Sequence[Message] | None,
    add_special_tokens: bool | None,
    template: Mapping[str, Any],
) -> pb.TokenizeRequest:
    request = pb.TokenizeRequest(add_special_tokens=add_special_tokens)
    if (text is None) == (messages is None):
        raise InvalidRequestError("give either text or messages", param="text")
    if text is not None:
        _set(request, "text", text)
    if messages is not None:
        _refuse_unknown(template, TemplateOptions.__annotations__.keys())
        _set_chat(request.chat, messages, template)
    return request


def patience_s(options: Mapping[str, Any], default_s: float) -> float:
    """How long a call with these options may take."""
    timeout_s = options.get("timeout_s")
    return default_s if timeout_s is None else float(timeout_s)


def detokenize_request(tokens: Sequence[int]) -> pb.DetokenizeRequest:
    request = pb.DetokenizeRequest()
    _set(request, "tokens", tokens)
    return request


def _set_chat(chat: pb.Chat, messages: Sequence[Message], template: Mapping[str, Any]) -> None:
    chat.SetInParent()
    for index, message in enumerate(messages):
        added = chat.messages.add()
        _refuse_unknown(message, Message.__annotations__.keys())
        for name, value in message.items():
            place = f"messages.{index}.{name}"
            if name == "tool_calls":
                try:
                    for call in message["tool_calls"]:
                        added.tool_calls.append(pb.ToolCall(**call))
                except (TypeError, ValueError) as error:
                    raise InvalidRequestError(f"{place}: {error}", param=place) from error
            elif value is not None:
                _set(added, name, value, param=place)
    for name, value in template.items():
        if name == "tools":
            chat.tools.extend(json.dumps(tool) for tool in value)
        elif value is not None:
            _set(chat, name, json.dumps(value) if name == "chat_template_kwargs" else value)


def _set_options(request: pb.GenerateRequest, options: Mapping[str, Any], known: Any) -> None:
    _refuse_unknown(options, known)
    for name, value in options.items():
        if value is None:
            continue
        if name == "stop" and isinstance(value, str):
            value = [value]
        if name == "slo" and isinstance(value, Mapping):
            for target, seconds in value.items():
                _set(request.slo, target, seconds, param=f"slo.{target}")
        else:
            _set(request, name, value)


def _set(message: ProtobufMessage, name: str, value: Any, *, param: str | None = None) -> None:
    try:
        if isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, AttributeError) as error:
        place = param or name
        raise InvalidRequestError(f"{place} cannot be {repr(value)[:80]}: {error}", param=place) from error


def _refuse_unknown(given: Mapping[str, Any], known: Any) -> None:
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise TypeError(f"there is no option {name!r}; the nearest one is {nearest[0]!r}")
