"""The tokenizer of a Hugging Face model folder: tokenizer.json and the small files beside it.

Which file wins when two say different things is as in transformers: ``chat_template.jinja`` over
``tokenizer_config.json``, and that over ``special_tokens_map.json``; what tokenizer.json puts around a
text over the configuration's ``add_bos_token`` and ``add_eos_token``, which mean nothing beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from common.errors import ConfigError
from router.tokenizer_parts import NAMED_TOKENS, TokenizerParts


def load_hf_tokenizer(folder: Path) -> TokenizerParts:
    """Raises ConfigError when the folder has no tokenizer.json, or a file in it cannot be read."""
    backend = _backend(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    named = _named_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in named.values() if token not in known]
    )
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return TokenizerParts(backend, vocab_size, named, _templates(folder, config))


def _backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ConfigError(f"{path.parent} has no tokenizer.json; convert its tokenizer with transformers first")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"{path} cannot be read: {error}") from error
    # Some files carry the settings of their last training run; a server must never cut or pad a prompt.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    for name in NAMED_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            named[name] = token
    return named


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    listed = config.get("chat_template")
    if isinstance(listed, str):
        templates["default"] = listed
    elif isinstance(listed, list):
        templates |= {entry["name"]: entry["template"] for entry in listed}
    legacy = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        templates["default"] = legacy
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    newest = folder / "chat_template.jinja"
    if newest.is_file():
        templates["default"] = newest.read_text(encoding="utf-8")
    return templates


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, it holds a {type(content).__name__}")
    return content
