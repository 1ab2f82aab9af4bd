"""How a model samples when the client does not say: what its makers recommend, or OpenAI's own defaults.

A Hugging Face folder tells it in ``generation_config.json``, a known model in the table of
`common.model_store`. The configuration's ``model.default_sampling`` overrides single values.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from common.config import ModelConfig
from common.errors import ConfigError
from common.model_store import KNOWN_MODELS


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The values that a request without them gets."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


OPENAI_DEFAULTS = SamplingDefaults()


def sampling_defaults(config: ModelConfig, path: Path) -> SamplingDefaults:
    """The defaults of the model at ``path``. Raises ConfigError when its file cannot be understood."""
    defaults = OPENAI_DEFAULTS
    if config.name in KNOWN_MODELS:
        defaults = replace(defaults, temperature=KNOWN_MODELS[config.name].temperature)
    elif (path / "generation_config.json").is_file():
        defaults = _from_file(path / "generation_config.json")
    chosen = config.default_sampling.model_dump(exclude_none=True)
    return replace(defaults, **chosen)


def _from_file(path: Path) -> SamplingDefaults:
    try:
        values = json.loads(path.read_text())
        return SamplingDefaults(
            temperature=float(_or(values.get("temperature"), 1.0)),
            top_p=float(_or(values.get("top_p"), 1.0)),
            top_k=max(0, int(_or(values.get("top_k"), 0))),
        )
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} does not tell sampling defaults: {' '.join(str(error).split())}") from error


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
