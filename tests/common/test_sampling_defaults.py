"""What a request that gives no sampling values gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.config import load_config
from common.errors import ConfigError
from common.sampling_defaults import SamplingDefaults, sampling_defaults


def test_a_folder_tells_its_own(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9, "top_k": None}))
    config = load_config(None, [f"model.name={tmp_path}"]).model
    assert sampling_defaults(config, tmp_path) == SamplingDefaults(0.6, 0.9, 0)


def test_without_a_word_they_are_openais(tmp_path: Path) -> None:
    config = load_config(None, [f"model.name={tmp_path}"]).model
    assert sampling_defaults(config, tmp_path) == SamplingDefaults(1.0, 1.0, 0)


def test_the_small_known_model_is_greedy_and_the_configuration_has_the_last_word(tmp_path: Path) -> None:
    assert sampling_defaults(load_config().model, tmp_path).temperature == 0.0
    config = load_config(None, ["model.default_sampling.temperature=0.7"]).model
    assert sampling_defaults(config, tmp_path) == SamplingDefaults(0.7, 1.0, 0)


@pytest.mark.parametrize("content", ["[]", "{", '{"temperature": "warm"}'])
def test_a_file_that_makes_no_sense_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        sampling_defaults(load_config(None, [f"model.name={tmp_path}"]).model, tmp_path)
