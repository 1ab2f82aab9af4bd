"""The request bodies: OpenAI's chat completions and completions, with Baton's own fields, and the
tokenizer's endpoints. What a field may hold is stated here; how fields limit each other, and what the
model allows, in `router/validation.py`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import InvalidRequestError
from router.fields import served_fields
from router.templates import OWN_NAMES

INT32 = 2**31 - 1
INT63 = 2**63 - 1
MAX_ANSWERS = 256
"""Answers to one request: prompts times ``n``."""

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_LOGPROBS = 20
MAX_BIASES = 1024


TokenIds = list[Annotated[int, Field(ge=0, le=INT32)]]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class _Body(BaseModel):
    # Strict: "5" is no number, as for OpenAI.
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = Field(False, description="every event says what was used so far (as vLLM's)")


class Slo(_Body):
    """Targets, in seconds."""

    ttft_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    tpot_s: float | None = Field(None, gt=0, allow_inf_nan=False)


class GenerationBody(_Body):
    """What both completion endpoints have in common. None: the default applies."""

    model: str
    max_tokens: int | None = Field(None, ge=1, le=INT32)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=INT32, description="0 and -1: all tokens")
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: dict[str, Bias] | None = Field(None, max_length=MAX_BIASES, description="token id → added logit")
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=INT32, description="a longer prompt is cut to so many tokens; -1: to what the model allows"
    )
    truncation_side: Literal["left", "right"] = Field("left", description="the end at which a prompt is cut")
    seed: int | None = Field(None, ge=-INT63 - 1, le=INT63)
    min_tokens: int = Field(0, ge=0, le=INT32)
    ignore_eos: bool = False
    stop_token_ids: TokenIds | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    priority: int = Field(0, ge=-INT32, le=INT32, description="smaller is sooner")
    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    cache_salt: str | None = Field(None, max_length=1024)
    slo: Slo | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises InvalidRequestError when there are too many, or one is of no use."""
        if not self.stop:
            return ()
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(dict.fromkeys(self.stop))
        if len(stops) > MAX_STOPS:
            raise InvalidRequestError(f"stop may hold {MAX_STOPS} strings, got {len(stops)}", param="stop")
        for stop in stops:
            if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
                raise InvalidRequestError(
                    f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters, got one of {len(stop)}", param="stop"
                )
        return stops


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: content is one text, null fields are left out."""
        fields = self.model_dump(exclude_none=True, exclude={"content", "refusal"})
        if self.tool_calls:
            fields["tool_calls"] = [_with_parsed_arguments(call) for call in self.tool_calls]
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        return fields | {"content": content if content is not None else ""}


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call as templates expect it: OpenAI's clients send the arguments as JSON in a string, templates
    write them out as JSON themselves."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}}


class ChatBody(GenerationBody):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[dict[str, Any]] | None = Field(None, description="shown to the model; its calls are plain text")
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = Field(None, description="default: unless the final message is continued")
    continue_final_message: bool = False

    def template_arguments(self) -> dict[str, Any]:
        """What the chat template gets besides the messages."""
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt begins a new message, continue_final_message goes on with the last one: "
                "only one of them may be true",
                param="continue_final_message",
            )
        variables = self.chat_template_kwargs or {}
        if taken := sorted(OWN_NAMES & set(variables)):
            raise InvalidRequestError(
                f"chat_template_kwargs may not hold {taken[0]!r}, which is a field of the request",
                param="chat_template_kwargs",
            )
        add_generation_prompt = self.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not self.continue_final_message
        return variables | {
            "tools": self.tools or None,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }


class CompletionBody(GenerationBody):
    prompt: str | list[str] | TokenIds | list[TokenIds]
    add_special_tokens: bool = True
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    def prompts(self) -> list[str | list[int]]:
        """One entry for each prompt."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]  # ``n`` has its own limit
        if not prompt:
            raise InvalidRequestError("prompt must not be empty, it is []", param="prompt")
        several: list[str | list[int]] = []
        ids: list[int] = []
        for entry in prompt:
            if isinstance(entry, int):
                ids.append(entry)
            else:
                several.append(entry)
        prompts = several or [ids]
        if len(prompts) * (self.n or 1) > MAX_ANSWERS:
            raise InvalidRequestError(
                f"one request gets {MAX_ANSWERS} answers at most, got {len(prompts)} prompts with n = {self.n or 1}",
                param="prompt",
            )
        return prompts


class TokenizeBody(_Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = Field(None, description="default: around a prompt, not around messages")
    add_generation_prompt: bool = True


class DetokenizeBody(_Body):
    model: str | None = None
    tokens: TokenIds


Body = TypeVar("Body", bound=_Body)


def parse_body(schema: type[Body], data: bytes) -> Body:
    """The request body that ``data`` holds. Raises InvalidRequestError that names field and value."""
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # no JSON, no text, a number of thousands of digits, too deep
        raise InvalidRequestError(f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequestError(f"the request body must be a JSON object, it is {_json_type(body)}")
    return parse_fields(schema, body)


def parse_fields(schema: type[Body], body: dict[str, Any]) -> Body:
    """The same for a body that is no text any more. Raises InvalidRequestError that names field and value."""
    try:
        return schema.model_validate(served_fields(body, schema.model_fields))
    except ValidationError as error:
        raise _explained(error, body) from error


def _explained(error: ValidationError, body: dict[str, Any]) -> InvalidRequestError:
    """The first broken limit. In a union every branch complains; the one that came furthest is meant."""
    details = error.errors(include_url=False, include_context=False)
    field = details[0]["loc"][0] if details[0]["loc"] else None
    if field == "prompt":
        given = json.dumps(body.get("prompt"))
        return InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids (each 0 or more), or a list of such "
            f"lists; got {given[:80]}",
            param="prompt",
        )
    detail = max(details, key=lambda d: len(d["loc"]) if d["loc"][:1] == (field,) else 0)
    path = ".".join(str(part) for part in detail["loc"] if part != "str" and not str(part).startswith("list["))
    if detail["type"] == "missing":
        return InvalidRequestError(f"{path} is required", param=path)
    if detail["type"] == "extra_forbidden":
        return InvalidRequestError(f"unknown field {path!r}", param=path)
    given = repr(detail["input"])
    return InvalidRequestError(f"{path}: {detail['msg'][:1].lower()}{detail['msg'][1:]}, got {given[:80]}", param=path)


def _json_type(value: Any) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequestError(f"the request body is not JSON: {name} is no JSON number")
