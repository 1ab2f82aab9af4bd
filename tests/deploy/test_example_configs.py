"""The example configurations are valid, and all of them are in the table of deploy/README.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import load_config

FOLDER = Path(__file__).parents[2] / "deploy"
EXAMPLES = sorted((FOLDER / "config").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_loads_and_is_listed(path: Path) -> None:
    config = load_config(path)
    assert config.model.name == "smollm2-135m"
    assert f"`config/{path.name}`" in (FOLDER / "README.md").read_text()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2
