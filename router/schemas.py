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

INT32 = 2**31 - 1
INT63 = 2**63 - 1
MAX_PROMPTS = 256
"""Prompts in one completions request."""

TokenIds = list[Annotated[int, Field(ge=0, le=INT32)]]


class _Body(BaseModel):
    # Strict: "5" is no number, as for OpenAI.
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: Literal[False] = False


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


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: None = None
    refusal: str | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: content is one text, null fields are left out."""
        fields = self.model_dump(exclude_none=True, exclude={"content", "refusal"})
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        return fields | {"content": content if content is not None else ""}


class ChatBody(GenerationBody):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32)


class CompletionBody(GenerationBody):
    prompt: str | list[str] | TokenIds | list[TokenIds]
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """One entry for each answer that is wanted."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequestError("prompt must not be empty, it is []", param="prompt")
        if len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int):
            raise InvalidRequestError(f"prompt may hold {MAX_PROMPTS} prompts, got {len(prompt)}", param="prompt")
        several: list[str | list[int]] = []
        ids: list[int] = []
        for entry in prompt:
            if isinstance(entry, int):
                ids.append(entry)
            else:
                several.append(entry)
        return several or [ids]


class TokenizeBody(_Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeBody(_Body):
    model: str | None = None
    tokens: TokenIds


Body = TypeVar("Body", bound=_Body)


def parse_body(schema: type[Body], data: bytes) -> Body:
    """The request body that ``data`` holds. Raises InvalidRequestError that names field and value."""
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequestError(f"the request body must be a JSON object, it is {_json_type(body)}")
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
    path = ".".join(str(part) for part in detail["loc"] if not str(part).startswith(("list[", "str")))
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
