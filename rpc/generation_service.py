"""What a router offers to clients over gRPC, as the wire sees it. The other end is `router/generation.py`.

Requests are fields: names and values as in the JSON body of the HTTP endpoint that serves the same, so
that one validation stands behind both. Refusals and failures are raised as BatonError.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """Tokens of all answers of one request together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class LikelyToken:
    """``token`` is its text; ``data`` its bytes, which may be a part of a character."""

    token_id: int
    token: str
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class ChosenToken(LikelyToken):
    """``top``: the likeliest tokens at this place, likeliest first."""

    top: tuple[LikelyToken, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """What one event adds to answer ``index``. ``finish_reason`` is set in the answer's last chunk,
    ``usage`` in the last of all; ``prompt_token_ids`` in the answer's first, if they are wanted, and there
    ``prompt_logprobs``, from the prompt's second token on.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[ChosenToken, ...] = ()
    finish_reason: str | None = None
    usage: AnswerUsage | None = None
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[ChosenToken, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenizedText:
    tokens: Sequence[int]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    """``max_model_len`` is 0 as long as no worker has told it."""

    id: str
    max_model_len: int
    owned_by: str


class GenerationService(Protocol):
    def draw_id(self) -> str:
        """A new request id."""
        ...

    async def open(
        self, request_id: str, fields: Fields, *, chat: bool, deadline_s: float | None
    ) -> AsyncGenerator[AnswerChunk, None]:
        """Checks everything that can be checked, then the answers as they come; closing them cancels.

        ``chat``: the fields are those of a chat completion. ``deadline_s``: the caller's patience.
        """
        ...

    async def tokenize(self, fields: Fields) -> TokenizedText: ...

    async def detokenize(self, fields: Fields) -> str: ...

    def models(self) -> Sequence[ServedModel]: ...

    async def is_ready(self) -> bool:
        """A request would get through, now."""
        ...

    @property
    def model_name(self) -> str: ...
