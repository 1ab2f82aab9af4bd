"""Tiny tokenizers, trained on the spot, as the two kinds of model file hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12:45, isn't it? We've 2024 reasons.",
    "def function(argument):\n    return  argument + 1\n\n\n\tif x:\r\n\t\tpass\n",
    "안녕하세요 세계, 한국어 문장입니다. 中文字符。 Привет мир! ไทยภาษา",
    "emoji 👩‍👩‍👧‍👦 and 🏳️‍🌈 and 👍🏽; accents: é e\u0301 ñ ß ſ K",
    "  many   spaces    here 1 22 333 4444 55555",
] * 4

CONTROL_TOKENS = ["<|begin|>", "<|end|>", "<|pad|>"]
USER_TOKEN = "<think>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|begin|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)

LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def pre_tokenizer(family: str) -> Any:
    """What the ``tokenizer.json`` of the family's own models says."""
    if family == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if family == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    regex = {"llama-bpe": LLAMA3_REGEX, "qwen2": QWEN2_REGEX}[family]
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_level(family: str = "smollm", vocab_size: int = 600) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=family == "llama-bpe"))
    if family == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer(family)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(USER_TOKEN, normalized=False)])
    return backend


def byte_fallback(strips: bool = True) -> tokenizers.Tokenizer:
    """In the manner of SentencePiece: spaces as ``▁``, unknown characters as byte tokens.

    ``strips``: a text is given a space at its front, which decoding takes away (Llama 2; not Gemma).
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "▁▁", "a", "b", "▁a", "▁b", "▁ab", "ab", "é", "\n", "\N{REPLACEMENT CHARACTER}"]
    merges = [("▁", "▁"), ("a", "b"), ("▁", "a"), ("▁", "b"), ("▁", "ab")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    front = [normalizers.Prepend("▁")] if strips else []
    backend.normalizer = normalizers.Sequence([*front, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """Spaces as ``▁`` too, by the library's own pair for that, and no byte tokens."""
    backend = byte_fallback()
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return backend


def put_ends(backend: tokenizers.Tokenizer, bos: bool, eos: bool) -> None:
    """Has ``backend`` put BOS before and EOS behind every text, as tokenizer.json says it."""
    single = " ".join([*(["<|begin|>"] if bos else []), "$A", *(["<|end|>"] if eos else [])])
    backend.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<|begin|>", 0), ("<|end|>", 1)]
    )


def write_hf_folder(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**defaults, **config}))
    return folder


def write_gguf(path: Path, backend: tokenizers.Tokenizer, family: str = "smollm", **values: Any) -> Path:
    """``values`` replace metadata by the end of their key; None leaves a key out."""
    tokens = [backend.id_to_token(token_id) for token_id in range(backend.get_vocab_size())]
    kinds = [3 if token in CONTROL_TOKENS else 4 if token == USER_TOKEN else 1 for token in tokens]
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    keys = {
        "model": "gpt2",
        "pre": family,
        "tokens": tokens,
        "token_type": kinds,
        "merges": merges,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "padding_token_id": 2,
        **values,
    }
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, value in keys.items():
        key = name if name.startswith("chat_template") else f"ggml.{name}"
        _add(writer, f"tokenizer.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}[type(value)]
    add(key, value)
