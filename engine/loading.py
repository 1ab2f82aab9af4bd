"""From a checkpoint on disk to a model, its KV pool and its description. Knows no plan and no thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.config import EngineConfig
from common.errors import ConfigError
from common.handoff import KVLayout
from common.workers import ModelInfo
from engine.checkpoint import find_checkpoint, read_architecture, weights_fingerprint
from engine.families import FOREIGN
from engine.kernels import BATCH_INVARIANT, ORDINARY, Kernels
from engine.kv_cache import KVCache, pool_blocks
from engine.model_config import ModelArchitecture
from engine.models.decoder import Decoder
from engine.models.foreign import TransformersModel, probe
from engine.native import NativeError, check_suits, native_kernels
from engine.numerics import check_batch_invariance
from engine.rope import uses_long_factors
from engine.weights import open_weights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """``info.fingerprint`` is also the ``model`` of the cache's layout."""

    model: Decoder | TransformersModel
    architecture: ModelArchitecture
    cache: KVCache
    info: ModelInfo


def load_model(
    path: Path,
    config: EngineConfig,
    dtype: str,
    threads: int,
    name: str | None,
    max_model_len: int | None,
    tell: Callable[[str], None],
) -> LoadedModel:
    """Reads the checkpoint at ``path``, makes the model and its KV pool, and, in batch-invariant mode,
    checks the platform. To be called on the thread that will run the model: it sets that thread's number
    of compute threads. ``tell`` hears what is being done. Raises ConfigError or EngineError.
    """
    torch.set_num_threads(threads)
    device = _device(config.device)
    checkpoint = find_checkpoint(path)
    architecture = read_architecture(checkpoint)
    is_foreign = architecture.family == FOREIGN.name
    if is_foreign:
        if config.batch_invariant:
            raise ConfigError("engine.batch_invariant is not possible for a model that transformers computes")
        architecture = probe(checkpoint.path, architecture)
    dtype = _dtype(dtype, architecture, device, config.batch_invariant)
    if is_foreign and config.quantization != "none":
        raise ConfigError("engine.quantization is not possible for a model that transformers computes")
    kernels = ORDINARY if is_foreign else _kernels(config, architecture, dtype, device, threads, tell)
    limit = _context_limit(max_model_len, architecture)
    fingerprint = weights_fingerprint(path, dtype)
    layout = KVLayout(
        # Keys that were turned by other angles are of another kind.
        model=f"{fingerprint}-long" if uses_long_factors(architecture.rope, limit) else fingerprint,
        num_layers=architecture.num_layers,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        block_size=config.block_size,
        dtype=dtype,
        total_kv_heads=architecture.num_kv_heads,
        kind="mla" if architecture.latent is not None else "gqa",
    )
    if config.pool_bytes is not None:
        pool_blocks(config.pool_bytes, layout, device)  # too small: said now, not after minutes of reading
    tell(f"reading weights from {path} as {dtype} onto {device}, for {kernels.name} kernels")
    with torch.inference_mode():
        model: Decoder | TransformersModel
        if is_foreign:
            model = TransformersModel(checkpoint.path, architecture, getattr(torch, dtype), device)
        else:
            as_stored = config.quantization == "stored"
            weights = open_weights(checkpoint, architecture, getattr(torch, dtype), device, as_stored=as_stored)
            packed: list[torch.Tensor] = []

            def noted(weight: torch.Tensor) -> torch.Tensor:
                packed.append(weight)
                return weight

            if kernels is BATCH_INVARIANT:
                kernels = replace(kernels, pack=noted, pack_head=noted, pack_exactly=noted)
            model = Decoder(architecture, weights, kernels, limit)
            weights.finish()
            if packed:
                tell("checking that results do not depend on the batch")
                check_batch_invariance(packed, architecture.head_dim)
    num_blocks = pool_blocks(config.pool_bytes, layout, device)
    tell(f"making a KV pool of {num_blocks} blocks, {num_blocks * layout.block_bytes >> 20} MiB")
    # Not in inference mode: other threads write into the pool, and such tensors would refuse them.
    cache = KVCache(layout, num_blocks, device)
    info = ModelInfo(
        name=name or path.name,
        fingerprint=fingerprint,
        vocab_size=architecture.vocab_size,
        max_model_len=limit,
        eos_token_ids=architecture.end_token_ids,
    )
    return LoadedModel(model, architecture, cache, info)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"engine.device {name!r} is not a device") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"engine.device {name!r} is not available here")
    return device


def _dtype(wanted: str, architecture: ModelArchitecture, device: torch.device, batch_invariant: bool) -> str:
    if wanted == "auto":
        return architecture.dtype if device.type == "cuda" and not batch_invariant else "float32"
    return wanted


def _kernels(
    config: EngineConfig,
    architecture: ModelArchitecture,
    dtype: str,
    device: torch.device,
    threads: int,
    tell: Callable[[str], None],
) -> Kernels:
    """Those that the configuration asks for, or the best that there are here. Raises ConfigError."""
    if config.kernels != "torch" and device.type == "cpu":
        try:
            check_suits(architecture.head_dim, dtype)
            return native_kernels(threads, config.quantization)
        except NativeError as error:
            reason = f"no native kernels: {error}"
        if config.kernels == "native":
            raise ConfigError(f"engine.kernels is native, and {reason}")
        if config.quantization != "none":
            raise ConfigError(f"engine.quantization {config.quantization} needs native kernels, and {reason}")
        tell(f"{reason}; torch's are used, which are slower")
    elif config.kernels == "native":
        raise ConfigError(f"engine.kernels native is for the CPU, the device is {device}")
    if config.quantization != "none":
        raise ConfigError(f"engine.quantization {config.quantization} needs native kernels (engine.kernels)")
    if not config.batch_invariant:
        return ORDINARY
    if dtype != "float32":
        raise ConfigError(f"engine.batch_invariant needs model.dtype float32 with torch's kernels, it is {dtype}")
    return BATCH_INVARIANT


def _context_limit(wanted: int | None, architecture: ModelArchitecture) -> int:
    if wanted is not None and wanted > architecture.context_limit:
        raise ConfigError(f"model.max_model_len {wanted} exceeds the model's limit of {architecture.context_limit}")
    return wanted or architecture.context_limit
