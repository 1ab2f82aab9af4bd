"""What a cluster answers, as plain values. Knows protobuf messages, nothing of calls."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import InvalidRequestError
from rpc.v1 import generation_pb2 as pb

FINISH_REASONS: dict[int, str] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
"""As OpenAI calls them. A reason that only a newer server knows has its protobuf number as a name."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of all answers of one request. ``cached_tokens``: prompt tokens whose KV a cache had."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """``token`` is the token's text; ``data`` its bytes, which may be a part of a character."""

    token_id: int
    token: str
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob(TopLogprob):
    """``top``: the likeliest tokens at this place, likeliest first."""

    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. ``finish_reason``: "stop" or "length". ``prompt_logprobs`` (with ``echo`` and ``logprobs``)
    are those of the prompt's tokens from the second one on."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """All answers to one request; most have one, for which there are shortcuts."""

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one event adds to answer ``index``. ``finish_reason`` comes with an answer's last chunk,
    ``usage`` with the last of the stream, ``request_id`` and ``model`` with its first.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    request_id: str = ""
    model: str = ""
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """``max_model_len``: how many tokens prompt and answer may have together."""

    ids: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    max_model_len: int
    owned_by: str


def completion(message: pb.GenerateResponse) -> Completion:
    return Completion(message.request_id, message.model, tuple(map(_choice, message.choices)), _usage(message.usage))


def chunk(message: pb.GenerateChunk) -> Chunk:
    return Chunk(
        message.index,
        message.text,
        tuple(message.token_ids),
        tuple(map(_logprob, message.logprobs)),
        _reason(message.finish_reason) or None,
        _usage(message.usage) if message.HasField("usage") else None,
        message.request_id,
        message.model,
        tuple(message.prompt_token_ids),
        tuple(map(_logprob, message.prompt_logprobs)),
    )


def tokens(message: pb.TokenizeResponse) -> Tokens:
    return Tokens(tuple(message.tokens), message.max_model_len)


def models(message: pb.ListModelsResponse) -> list[Model]:
    return [Model(model.id, model.max_model_len, model.owned_by) for model in message.models]


def only_model(served: list[Model]) -> str:
    """The name of the model that is meant when none is named. Raises InvalidRequestError when that is unclear."""
    if len(served) != 1:
        names = ", ".join(model.id for model in served) or "none"
        raise InvalidRequestError(f"name a model; the server has {names}", param="model")
    return served[0].id


def _choice(message: pb.Choice) -> Choice:
    return Choice(
        message.index,
        message.text,
        tuple(message.token_ids),
        _reason(message.finish_reason),
        tuple(map(_logprob, message.logprobs)),
        tuple(message.prompt_token_ids),
        tuple(map(_logprob, message.prompt_logprobs)),
    )


def _reason(number: int) -> str:
    return FINISH_REASONS.get(number, str(number)) if number else ""


def _usage(message: pb.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.completion_tokens, message.total_tokens, message.cached_tokens)


def _logprob(message: pb.TokenLogprob) -> TokenLogprob:
    top = tuple(TopLogprob(likely.token_id, likely.token, likely.bytes, likely.logprob) for likely in message.top)
    return TokenLogprob(message.token_id, message.token, message.bytes, message.logprob, top)
