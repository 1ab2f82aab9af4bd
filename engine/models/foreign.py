"""Decoders that Baton has no code for: transformers computes them, on Baton's paged KV.

    TransformersModel.forward ──▶ transformers' layers ──▶ their attention interface ──▶ `_attend`
                                                                                            │
                                              KV cache and attention of the step ◀──────────┘

transformers hands every layer's queries, keys and values to the function that is registered under a model's attention
implementation. Ours writes keys and values into the pool and lets queries attend to all that lies there; masks are
Baton's own. What a layer's attention is like is found out with a forward pass without weights (`probe`). Slower than
a family of Baton's own, and never batch-invariant. Needs the package transformers.

Legend: N rows, R rows whose logits are wanted, Hq and H query and key/value heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.errors import ConfigError, EngineError
from engine.attention import AttentionShape
from engine.batch import StepBatch
from engine.kernels import ORDINARY
from engine.kv_cache import KVCache
from engine.model_config import ModelArchitecture
from engine.models.attending import LayerWritten, StepCache

_IMPLEMENTATION = "baton"
_UNKNOWN_TO_US = ("s_aux", "position_bias", "alibi", "head_mask", "encoder_hidden_states")
"""What models hand to attention that ours does not do."""


@dataclass(frozen=True, slots=True)
class _LayerAttention:
    """What one layer asked of attention."""

    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float


class _Recorder:
    """Takes the place of attention where there are no weights: notes what each layer asks for."""

    def __init__(self) -> None:
        self.layers: dict[int, _LayerAttention] = {}

    def __call__(
        self, layer: int, asked: _LayerAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if layer in self.layers:
            raise ConfigError(f"layer {layer} attends more than once")
        self.layers[layer] = asked
        return torch.empty_like(q)


_Attend = Callable[[int, _LayerAttention, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, what it asks for, q [N, Hq, D], k and v [N, H, D]) → [N, Hq, D]."""

_attending: ContextVar[_Attend] = ContextVar("attending")


@contextmanager
def _attended(attend: _Attend) -> Iterator[None]:
    token = _attending.set(attend)
    try:
        yield
    finally:
        _attending.reset(token)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: q [1, Hq, N, D], k and v [1, H, N, D] of one layer; gives [1, N, Hq, D]."""
    strange = [name for name in _UNKNOWN_TO_US if others.get(name) is not None]
    if attention_mask is not None:
        strange.append("a mask of its own")
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        strange.append("a view of later tokens")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        strange.append(f"heads of {query.shape[-1]}, {key.shape[-1]} and {value.shape[-1]} components")
    if strange:
        raise ConfigError(f"its attention has {', '.join(strange)}, which is not supported")
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if scaling is None else float(scaling)
    asked = _LayerAttention(key.shape[1], head_dim, scale, int(sliding_window or 0), float(softcap or 0.0))
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    return _attending.get()(module.layer_idx, asked, q, k, v)[None], None


def probe(folder: Path, architecture: ModelArchitecture) -> ModelArchitecture:
    """``architecture`` with what its layers' attention is really like. Raises ConfigError for what ours cannot do."""
    transformers = _transformers()
    try:
        layers = _asked_for(transformers, folder, architecture.num_layers)
    except Exception as error:  # the top of what transformers may raise
        reason = error.message if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"the model at {folder} cannot be run by way of transformers: {reason}") from error
    first = layers[0]
    return dataclasses.replace(
        architecture,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        attention_scale=first.scale,
        attention_softcap=first.softcap,
        windows=tuple(layer.window for layer in layers),
    )


def _asked_for(transformers: Any, folder: Path, num_layers: int) -> list[_LayerAttention]:
    """What each layer asks of attention; alike but for windows. Raises ConfigError, and what transformers raises."""
    recorder = _Recorder()
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"), _attended(recorder):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=_IMPLEMENTATION)
        _run(_without_padding(model), torch.zeros(3, dtype=torch.int64), torch.arange(3), torch.arange(1))
    layers = [recorder.layers[layer] for layer in sorted(recorder.layers)]
    if sorted(recorder.layers) != list(range(num_layers)):
        raise ConfigError(f"{len(layers)} of its {num_layers} layers use the attention interface")
    if any(dataclasses.replace(layer, window=layers[0].window) != layers[0] for layer in layers):
        raise ConfigError("its layers' attention differs in more than windows")
    if hidden := _hidden_by_masks(config, layers):
        raise ConfigError(f"{hidden}, which is not supported")
    return layers


def _hidden_by_masks(config: Any, layers: Sequence[_LayerAttention]) -> str:
    """What of its attention a model leaves to masks, of which ours hears nothing: then its layers must not be taken
    for ones that see everything. Empty if there is nothing.
    """
    for name in ("attention_chunk_size", "alibi", "use_bidirectional_attention"):
        if getattr(config, name, None):
            return f"its config has {name}"
    window = getattr(config, "sliding_window", None) or 0
    windows = {"full_attention": 0, "sliding_attention": window}
    for number, (kind, layer) in enumerate(zip(getattr(config, "layer_types", None) or (), layers, strict=False)):
        if windows.get(kind) != layer.window:
            return f"layer {number} has {kind}, and asks for a window of {layer.window or 'everything'}"
    return ""


class TransformersModel:
    """Tokens in, logits out, as `Decoder`. ``architecture`` is what `probe` gave."""

    def __init__(self, folder: Path, architecture: ModelArchitecture, dtype: torch.dtype, device: torch.device) -> None:
        a = architecture
        try:
            model = _transformers().AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=_IMPLEMENTATION, use_safetensors=True
            )
        except Exception as error:  # the top of what transformers may raise
            raise EngineError(f"transformers cannot load {folder}: {type(error).__name__}: {error}") from error
        self._model = _without_padding(model.to(device))
        self._shape = AttentionShape(a.num_kv_heads, a.attention_scale, a.windows, a.attention_softcap)

    def forward(self, batch: StepBatch, cache: KVCache, written: LayerWritten | None = None) -> torch.Tensor:
        """Logits [R, V] in float32 of the batch's ``logit_rows``."""
        kept = StepCache(batch, cache, ORDINARY, self._shape, written)

        def attend(layer: int, _: _LayerAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return kept.attend(layer, q.contiguous(), k, v).view(q.shape)

        with _attended(attend):
            return _run(self._model, batch.token_ids, batch.positions, batch.logit_rows).float()


def _without_padding(model: Any) -> Any:
    """``model``, which need not look for padding in what it is given: there is none."""
    model.config.pad_token_id = None
    return model.eval()


def _run(model: Any, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
    out = model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=logit_rows)
    logits: torch.Tensor = out.logits[0]
    if len(logits) != len(logit_rows):
        raise ConfigError(f"it gives {len(logits)} rows of logits where {len(logit_rows)} are wanted")
    return logits


def _transformers() -> Any:
    """The package, with our attention registered. Raises ConfigError when it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"this model needs the package transformers: {error}") from error
    functions: Mapping[str, Any] = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    if _IMPLEMENTATION not in functions:
        transformers.AttentionInterface.register(_IMPLEMENTATION, _attend)
    return transformers
