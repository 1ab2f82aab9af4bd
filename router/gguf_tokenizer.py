"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library.

A GGUF file lists tokens and merges, and names the family of its pre-tokenizer (``tokenizer.ggml.pre``):
the rule that cuts a text into words before merges apply. The rule itself is not in the file, so each
family that is served stands in `FAMILIES`; an unknown one is refused, because a wrong rule gives
plausible, slightly wrong tokens. The rules are those of the models' own tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from common.errors import ConfigError
from common.gguf_metadata import read_metadata
from router.tokenizer_parts import TokenizerParts, add_ends

CONTROL, USER_DEFINED = 3, 4
"""Values of ``tokenizer.ggml.token_type`` for tokens that are found whole in a text, before any merge.
Control tokens (``<|im_end|>``) are left out of decoded text, user-defined ones (``<think>``) are not."""

MODEL_KEY, PRE_KEY = "tokenizer.ggml.model", "tokenizer.ggml.pre"

NAMED_TOKEN_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3_WORDS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class Family:
    """How one family of byte-level BPE tokenizers cuts text into words.

    ``words``: the regular expression, None for GPT-2's. ``single_digits``: every digit is a word of
    its own, before ``words`` applies. ``whole_words``: a word that is a token needs no merges.
    ``add_bos``: what a file means that does not say whether texts start with BOS.
    """

    words: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


GPT2 = Family()
SMOLLM = Family(single_digits=True)
LLAMA3 = Family(words=LLAMA3_WORDS, whole_words=True, add_bos=True)
QWEN2 = Family(words=QWEN2_WORDS, nfc=True)

FAMILIES: dict[str, Family] = {
    "gpt-2": GPT2,
    "smollm": SMOLLM,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
}
"""``tokenizer.ggml.pre`` → family."""


def load_gguf_tokenizer(path: Path) -> TokenizerParts:
    """Raises ConfigError when the file holds no tokenizer, or one of a kind that is not served."""
    metadata = read_metadata(path, ("tokenizer.",))
    family = _family(path, metadata)
    tokens: list[str] = _required(path, metadata, "tokenizer.ggml.tokens")
    backend = _byte_level_bpe(path, metadata, tokens, family)
    named = _named_tokens(path, metadata, tokens)
    _add_whole_tokens(backend, metadata, tokens, named)
    bos = named.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", family.add_bos) else None
    eos = named.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    add_ends(backend, bos, eos)
    return TokenizerParts(backend, len(tokens), named, _templates(metadata))


def _family(path: Path, metadata: Mapping[str, Any]) -> Family:
    model = _required(path, metadata, MODEL_KEY)
    if model != "gpt2":
        raise ConfigError(f"{path}: {MODEL_KEY} is {model!r}, only 'gpt2' (byte-level BPE) is served")
    pre = _required(path, metadata, PRE_KEY)
    if pre not in FAMILIES:
        raise ConfigError(f"{path}: {PRE_KEY} is {pre!r}, served are {', '.join(FAMILIES)}")
    return FAMILIES[pre]


def _byte_level_bpe(path: Path, metadata: Mapping[str, Any], tokens: list[str], family: Family) -> tokenizers.Tokenizer:
    merges: list[str] = _required(path, metadata, "tokenizer.ggml.merges")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    # A merge joins two known tokens into a third; the library's own message would not name the file.
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise ConfigError(f"{path}: the merge {merge!r} needs a token that the vocabulary lacks")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=family.whole_words))
    if family.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(family)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(family: Family) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if family.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if family.words is not None:
        steps.append(pre_tokenizers.Split(Regex(family.words), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family.words is None))
    return pre_tokenizers.Sequence(steps)


def _named_tokens(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for name, key in NAMED_TOKEN_KEYS.items():
        token_id = metadata.get(key)
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ConfigError(f"{path}: {key} is {token_id}, the vocabulary has {len(tokens)} tokens")
        named[name] = tokens[token_id]
    return named


def _add_whole_tokens(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: list[str], named: Mapping[str, str]
) -> None:
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    control = [token for token, kind in zip(tokens, types, strict=False) if kind == CONTROL]
    # Some files mark BOS and EOS as normal tokens; they have a role, so they are special all the same.
    control += [token for token in named.values() if token not in control]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    user_defined = [token for token, kind in zip(tokens, types, strict=False) if kind == USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False) for token in user_defined])


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    names = {"default": prefix}
    for name in metadata.get(f"{prefix}s", []):
        names[name] = f"{prefix}.{name}"
    return {name: metadata[key] for name, key in names.items() if key in metadata}


def _required(path: Path, metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ConfigError(f"{path} has no {key}, so its tokenizer cannot be rebuilt")
    return metadata[key]
