"""Reads a model's description before any process is started for it: what it lacks is then said at once.

Looks at headers, config and tokenizer, not at weights; what only loading can show, workers say.
"""

from __future__ import annotations

import math
from pathlib import Path

from safetensors import SafetensorError, safe_open

from common.config import Config
from common.errors import ConfigError
from engine.checkpoint import Checkpoint, find_checkpoint, read_architecture
from router.tokenizer import Tokenizer

BYTES_OF_DTYPE = {"auto": 4, "float32": 4, "bfloat16": 2, "float16": 2}
"""On a CPU, where ``auto`` is float32. Quantised weights are computed in this dtype too."""


def check_model(config: Config, path: Path) -> int:
    """The bytes that the weights at ``path`` take in one worker on a CPU, at least.

    Raises ConfigError or EngineError for what Baton cannot serve, or not with this configuration.
    """
    checkpoint = find_checkpoint(path)
    architecture = read_architecture(checkpoint)
    wanted = config.model.max_model_len
    if wanted is not None and wanted > architecture.context_limit:
        raise ConfigError(f"model.max_model_len {wanted} exceeds the model's limit of {architecture.context_limit}")
    num_weights = _count_gguf(checkpoint) if checkpoint.kind == "gguf" else _count_safetensors(checkpoint)
    Tokenizer.load(path)
    return num_weights * BYTES_OF_DTYPE[config.model.dtype]


def _count_gguf(checkpoint: Checkpoint) -> int:
    return sum(int(tensor.n_elements) for tensor in checkpoint.gguf.tensors)


def _count_safetensors(checkpoint: Checkpoint) -> int:
    """A file that is cut short is refused here: its header says how long it must be."""
    total = 0
    for path in checkpoint.weight_files:
        try:
            with safe_open(path, framework="numpy") as file:
                shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} is not a safetensors file that can be read: {error}") from error
        total += sum(math.prod(shape) for shape in shapes)
    return total
