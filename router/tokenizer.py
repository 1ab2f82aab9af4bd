"""Text to tokens and back, for the model that is served.

Everything here is over the `tokenizers` library, from either kind of model file; no torch and no
transformers in the router. Methods change nothing, so one `Tokenizer` serves a whole thread pool
(encoding lets go of the GIL).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError, InvalidRequestError
from router.detokenizer import DetokenizerStream
from router.gguf_tokenizer import load_gguf_tokenizer
from router.hf_tokenizer import load_hf_tokenizer
from router.templates import ChatTemplate
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
        self.vocab_size = parts.vocab_size
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")

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
        second BOS before one that ``text`` starts with (chat templates put their own).
        """
        try:
            ids = list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:  # half of a surrogate pair, which JSON can spell
            raise InvalidRequestError("the text must be valid Unicode, it holds a lone surrogate") from error
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos] and self._starts_with_bos(text):
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``. Bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def stream(self) -> DetokenizerStream:
        """A new stream of text pieces which, joined, are ``decode(ids)``."""
        return DetokenizerStream(self._backend, self._special_ids, self._has_byte_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation in the model's own format (see `ChatTemplate.render`).

        Raises InvalidRequestError when the model has no template, or its template refuses.
        """
        template = self._templates.get("tool_use") if tools is not None else None
        template = template or self._templates.get("default")
        if template is None:
            raise InvalidRequestError("the model has no chat template; ask for a completion instead", param="messages")
        return template.render(messages, tools, add_generation_prompt, **{**self._named_tokens, **variables})

    def _id_of(self, name: str) -> int | None:
        token = self._named_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _starts_with_bos(self, text: str) -> bool:
        return text.startswith(self._named_tokens["bos_token"])
