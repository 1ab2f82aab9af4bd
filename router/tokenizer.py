"""Text to tokens and back, for the model that is served.

Everything here is over the `tokenizers` library, from either kind of model file; no torch and no
transformers in the router. Methods change nothing, so one `Tokenizer` serves a whole thread pool
(encoding lets go of the GIL).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from common.errors import ConfigError, InvalidRequestError
from router.detokenizer import DetokenizerStream
from router.gguf_tokenizer import load_gguf_tokenizer
from router.hf_tokenizer import load_hf_tokenizer
from router.templates import ChatTemplate
from router.token_text import TokenTexts
from router.tokenizer_parts import TokenizerParts


class Tokenizer:
    """``vocab_size`` is one more than the largest id. The ids of BOS and EOS are None where the model
    has no such token. (Which tokens end an answer is the model's own list, `ModelInfo.eos_token_ids`.)
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._named_tokens = dict(parts.named_tokens)
        self._templates = {name: ChatTemplate(source) for name, source in parts.templates.items()}
        self._special_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self._has_byte_tokens = self._backend.token_to_id("<0x00>") is not None
        self._token_texts = TokenTexts(self._backend)
        self.vocab_size = parts.vocab_size
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        around_nothing = self._backend.encode("", add_special_tokens=True).ids
        self._adds_bos = self.bos_token_id is not None and around_nothing[:1] == [self.bos_token_id]

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """From a Hugging Face folder or a ``.gguf`` file. Takes a moment and reads files: call it from a
        thread. Raises ConfigError when there is no tokenizer, or one of a kind that is not served.
        """
        if path.is_dir():
            return cls(load_hf_tokenizer(path))
        if path.suffix == ".gguf":
            return cls(load_gguf_tokenizer(path))
        raise ConfigError(f"a tokenizer comes from a model folder or a .gguf file, {path} is neither")

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of ``text``; special tokens that are spelled out in it become their ids.

        ``add_special_tokens`` adds BOS or EOS where the model wants them around a text, but never a
        second BOS before one that ``text`` starts with (chat templates put their own). What the text
        itself spells out stays, also twice.
        """
        try:
            ids = list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:  # half of a surrogate pair, which JSON can spell
            raise InvalidRequestError("the text must be valid Unicode, it holds a lone surrogate") from error
        if add_special_tokens and self._adds_bos and ids[:2] == [self.bos_token_id] * 2:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``. Bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> DetokenizerStream:
        """A new stream of text pieces which, joined, are ``decode(ids, skip_special_tokens)``."""
        hidden = self._special_ids if skip_special_tokens else None
        return DetokenizerStream(self._backend, hidden, self._has_byte_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text, also a special one; none for an id that is no token."""
        return self._token_texts.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """The same as text, with U+FFFD for what is no whole character."""
        return self._token_texts.text_of(token_id)

    def render_chat(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation in the model's own format (see `ChatTemplate.render`).

        With ``tools`` it is that of the template named ``tool_use``, where the model has one. A prompt
        has the BOS that its template writes; encode it with ``add_special_tokens=False``.

        Raises InvalidRequestError when the model has no template, or its template refuses.
        """
        template = self._templates.get("tool_use") if tools is not None else None
        template = template or self._templates.get("default")
        if template is None:
            raise InvalidRequestError(self._no_template(), param="messages")
        variables = {**self._named_tokens, **variables}
        return template.render(messages, tools, add_generation_prompt, continue_final_message, **variables)

    def _no_template(self) -> str:
        if self._templates:
            names = ", ".join(sorted(self._templates))
            return f"the model has no default chat template, it has only: {names}"
        return "the model has no chat template; ask for a completion instead"

    def _id_of(self, name: str) -> int | None:
        token = self._named_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def truncated(
    ids: Sequence[int], limit: int, side: Literal["left", "right"], bos_token_id: int | None = None
) -> list[int]:
    """At most ``limit`` of ``ids``, cut on the named side: ``left`` keeps the end of a prompt.

    A BOS (``bos_token_id``) at the front stays there and counts, since models behave oddly without it.
    Raises ValueError for a negative limit.
    """
    if limit < 0:
        raise ValueError(f"cannot keep {limit} tokens")
    if len(ids) <= limit:
        return list(ids)
    if side == "right":
        return list(ids[:limit])
    front = [ids[0]] if limit and bos_token_id is not None and ids[0] == bos_token_id else []
    return [*front, *ids[len(ids) - limit + len(front) :]]
