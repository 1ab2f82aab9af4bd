"""Messages of `baton.v1` to request fields, and answers to messages of `baton.v1`.

A request becomes the fields that the same request has as JSON: only what the client set, under the same
names. What is right and wrong with them is not known here. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from typing import Any, NoReturn

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from common.errors import InvalidRequestError
from rpc.generation_service import AnswerChunk, AnswerUsage, ChosenToken, LikelyToken, ServedModel, TokenizedText
from rpc.v1 import generation_pb2 as pb

INPUTS = frozenset({"text", "token_ids", "chat"})
_REASON = "FINISH_REASON_"
_REASONS = {name.removeprefix(_REASON).lower(): value for name, value in pb.FinishReason.items()}


# ── requests ──────────────────────────────────────────────────────────────────────────────────────


def generation_fields(request: pb.GenerateRequest) -> tuple[dict[str, Any], bool]:
    """The fields of a completion, or of a chat completion (True).

    Raises InvalidRequestError for fields of a newer version, and for JSON text that is none.
    """
    _refuse_unknown(request, "")
    fields = _set_fields(request, but=INPUTS)
    chat = request.WhichOneof("input") == "chat"
    match request.WhichOneof("input"):
        case "text":
            fields["prompt"] = request.text
        case "token_ids":
            fields["prompt"] = list(request.token_ids.ids)
        case "chat":
            fields |= _chat_fields(request.chat)
    if "logit_bias" in fields:  # JSON has text keys only; a protobuf map has no order
        fields["logit_bias"] = {str(token): bias for token, bias in sorted(request.logit_bias.items())}
    if not chat:
        _merge_logprobs(fields)
    return fields, chat


def tokenize_fields(request: pb.TokenizeRequest) -> dict[str, Any]:
    _refuse_unknown(request, "")
    fields = _set_fields(request, but=INPUTS)
    match request.WhichOneof("input"):
        case "text":
            fields["prompt"] = request.text
        case "chat":
            fields |= _chat_fields(request.chat)
    return fields


def detokenize_fields(request: pb.DetokenizeRequest) -> dict[str, Any]:
    _refuse_unknown(request, "")
    return {**_set_fields(request, but=("tokens",)), "tokens": list(request.tokens)}


def _set_fields(message: Message, but: Container[str] = ()) -> dict[str, Any]:
    """What is set of ``message``, by name; messages in it likewise."""
    return {field.name: _plain(value) for field, value in message.ListFields() if field.name not in but}


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return _set_fields(value)
    if isinstance(value, (str, bytes, int, float)):
        return value
    return [_plain(item) for item in value]


def _chat_fields(chat: pb.Chat) -> dict[str, Any]:
    fields = {"messages": [], **_set_fields(chat)}
    if "tools" in fields:
        fields["tools"] = [_parsed(text, f"tools.{index}") for index, text in enumerate(chat.tools)]
    if "chat_template_kwargs" in fields:
        fields["chat_template_kwargs"] = _parsed(chat.chat_template_kwargs, "chat_template_kwargs")
    return fields


def _merge_logprobs(fields: dict[str, Any]) -> None:
    """Completions have one number where chat completions have a switch and a number."""
    logprobs, num_top = fields.pop("logprobs", False), fields.pop("top_logprobs", 0)
    if logprobs:
        fields["logprobs"] = num_top
    elif num_top:
        raise InvalidRequestError(
            f"top_logprobs may only be set when logprobs is true, got {num_top}", param="top_logprobs"
        )


def as_the_client_said(error: InvalidRequestError) -> InvalidRequestError:
    """``error`` over the fields of a completion, with the name that the field has in the request."""
    if error.param != "logprobs":
        return error
    return InvalidRequestError(error.message.replace("logprobs", "top_logprobs", 1), param="top_logprobs")


def _parsed(text: str, param: str) -> Any:
    def refuse(name: str) -> NoReturn:
        raise InvalidRequestError(f"{param} is not JSON: {name} is no JSON number", param=param)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits are a ValueError
        raise InvalidRequestError(f"{param} is not JSON: {error}", param=param) from error


def _refuse_unknown(message: Message, place: str) -> None:
    """What a newer client wants and this server does not know would be ignored in silence."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        numbers = ", ".join(str(unknown[index].field_number) for index in range(len(unknown)))
        raise InvalidRequestError(
            f"{message.DESCRIPTOR.full_name} has no field {numbers} on this server; is the client newer?",
            param=place or None,
        )
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in [value] if isinstance(value, Message) else value:
            _refuse_unknown(part, f"{place}.{field.name}" if place else field.name)


# ── replies ───────────────────────────────────────────────────────────────────────────────────────


def chunk_message(chunk: AnswerChunk) -> pb.GenerateChunk:
    """Without what only the first chunk of a stream has."""
    return pb.GenerateChunk(
        index=chunk.index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=map(_chosen_message, chunk.logprobs),
        finish_reason=_reason(chunk),
        usage=None if chunk.usage is None else _usage_message(chunk.usage),
        prompt_token_ids=chunk.prompt_token_ids,
        prompt_logprobs=map(_chosen_message, chunk.prompt_logprobs),
    )


def response_message(request_id: str, model: str, chunks: Iterable[AnswerChunk]) -> pb.GenerateResponse:
    """All chunks of a request as one response."""
    response = pb.GenerateResponse(request_id=request_id, model=model)
    texts: dict[int, list[str]] = {}
    choices: dict[int, pb.Choice] = {}
    for chunk in chunks:
        choice = choices.setdefault(chunk.index, pb.Choice(index=chunk.index))
        texts.setdefault(chunk.index, []).append(chunk.text)
        choice.token_ids.extend(chunk.token_ids)
        choice.logprobs.extend(map(_chosen_message, chunk.logprobs))
        choice.prompt_token_ids.extend(chunk.prompt_token_ids)
        choice.prompt_logprobs.extend(map(_chosen_message, chunk.prompt_logprobs))
        if chunk.finish_reason is not None:
            choice.finish_reason = _reason(chunk)
        if chunk.usage is not None:
            response.usage.MergeFrom(_usage_message(chunk.usage))
    for index in sorted(choices):
        choices[index].text = "".join(texts[index])
        response.choices.append(choices[index])
    return response


def tokenized_message(tokenized: TokenizedText) -> pb.TokenizeResponse:
    return pb.TokenizeResponse(
        tokens=tokenized.tokens, count=len(tokenized.tokens), max_model_len=tokenized.max_model_len
    )


def model_message(model: ServedModel) -> pb.Model:
    return pb.Model(id=model.id, max_model_len=model.max_model_len, owned_by=model.owned_by)


def _reason(chunk: AnswerChunk) -> pb.FinishReason.ValueType:
    return pb.FINISH_REASON_UNSPECIFIED if chunk.finish_reason is None else _REASONS[chunk.finish_reason]


def _usage_message(usage: AnswerUsage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _chosen_message(chosen: ChosenToken) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=chosen.token_id,
        token=chosen.token,
        bytes=chosen.data,
        logprob=chosen.logprob,
        top=[_likely_message(likely) for likely in chosen.top],
    )


def _likely_message(likely: LikelyToken) -> pb.TopLogprob:
    return pb.TopLogprob(token_id=likely.token_id, token=likely.token, bytes=likely.data, logprob=likely.logprob)
