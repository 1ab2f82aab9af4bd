"""What a tokenizer is made of, whatever kind of file it came from.

`router/hf_tokenizer.py` and `router/gguf_tokenizer.py` make these, `router/tokenizer.py` uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers
from tokenizers.processors import TemplateProcessing

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that have a role. Chat templates see each one that the model has, by this name."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """``backend`` splits and joins, and adds BOS or EOS itself where the model wants that.

    ``vocab_size`` is one more than the largest id. ``named_tokens`` maps of `NAMED_TOKENS` those that
    the model has to their text. ``templates`` maps names (``default``, ``tool_use``, …) to the source
    of chat templates; it is empty for a model without.
    """

    backend: tokenizers.Tokenizer
    vocab_size: int
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)


def add_ends(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes ``backend`` put ``bos`` before and ``eos`` behind every text (None: nothing there)."""
    front, back = ([bos] if bos else []), ([eos] if eos else [])
    special = {token: backend.token_to_id(token) for token in front + back}
    backend.post_processor = TemplateProcessing(
        single=[*front, "$A", *back],
        pair=[*front, "$A", *back, *front, "$B", *back],
        special_tokens=list(special.items()),
    )
