"""What a model looks like: the numbers that shape its layers, wherever they were read from.

What is fixed by its family is in `families.py`, the code that computes it in `engine/models/`. This module imports
no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched; which fields count depends on ``kind``.

    ``kind``: none, linear, dynamic (nothing changes within the original context, which is all that is
    served), llama3, yarn, longrope (each frequency divided by its own factor: ``factors`` where no more than the
    original context is served, ``long_factors`` where more is), or factors (GGUF: the same without the long ones).
    """

    kind: str = "none"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Rotary:
    """One rotary embedding. It turns the first ``dim`` components of each head."""

    theta: float
    dim: int
    scaling: RopeScaling = RopeScaling()


@dataclass(frozen=True, slots=True)
class Experts:
    """Of the layers where ``sparse[layer]``. Each token goes to ``top_k`` of ``count`` experts with an inner size of
    ``inner_size``, weighted by their ``scoring`` (softmax over all of them, or sigmoid of each); ``normalised``:
    those weights are made to sum to 1. Then they are multiplied by ``scale``.

    ``groups``: only experts of the ``top_groups`` best of so many equal groups are chosen. ``corrected``: for the
    choice, not for the weights, each expert's score has a bias. ``shared_size``: inner size of an MLP that all tokens
    go through beside their experts, 0 for none.
    """

    count: int
    top_k: int
    inner_size: int
    normalised: bool
    sparse: tuple[bool, ...]
    scoring: str = "softmax"
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    corrected: bool = False
    shared_size: int = 0


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): of each token the cache holds one
    vector of ``rank`` numbers, from which every head's keys and values follow, and ``rope_dim`` numbers of a rotated
    key that all heads share.

    ``query_rank``: size of the vector from which queries follow, 0 when they come from the hidden state itself.
    ``plain_dim``: components of a head's key that are not rotated. ``interleaved``: the rotated ones are stored
    in pairs that turn together.
    """

    rank: int
    query_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """A decoder-only transformer in numbers. ``context_limit`` is in tokens; ``dtype`` is how the
    checkpoint stores its weights. ``end_token_ids`` end an answer, in ascending order.

    ``windows[layer]``: how many positions a row sees there, its own included; 0 for all before it. ``rope`` is for
    all layers unless there is a ``local_rope`` for those with a window. ``attention_scale`` multiplies the products of
    queries and keys. A ``softcap`` c turns x into c * tanh(x / c); 0 for none.
    """

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_eps: float
    rope: Rotary
    local_rope: Rotary | None
    context_limit: int
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    end_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    windows: tuple[int, ...]
    activation: str = "silu"
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    experts: Experts | None = None
    latent: Latent | None = None
    extra_layers: int = 0
    """Layers behind the last one that a checkpoint may have for guessing tokens ahead; not used."""

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


ROPE_KINDS = ("none", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")
DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("silu", "gelu_tanh")


def checked(architecture: ModelArchitecture) -> ModelArchitecture:
    """``architecture`` itself, or a ConfigError that names what does not fit together."""
    a = architecture
    if a.num_heads % a.num_kv_heads:
        raise ConfigError(f"model config: {a.num_heads} heads cannot share {a.num_kv_heads} key/value heads evenly")
    for rope in (a.rope, a.local_rope):
        if rope is not None:
            _check_rope(rope, a.head_dim)
    if a.activation not in ACTIVATIONS:
        raise ConfigError(f"model config: activation {a.activation!r} is not supported, only {listed(ACTIVATIONS)}")
    if len(a.windows) != a.num_layers:
        raise ConfigError(f"model config: {len(a.windows)} layers have a kind of attention, there are {a.num_layers}")
    if a.experts is not None:
        _check_experts(a.experts)
    if a.dtype not in DTYPES:
        raise ConfigError(f"model config: dtype {a.dtype!r} is not supported, only {listed(DTYPES)}")
    return a


def _check_experts(experts: Experts) -> None:
    if experts.count % experts.groups:
        raise ConfigError(f"model config: {experts.count} experts do not make {experts.groups} equal groups")
    choice = experts.count // experts.groups * experts.top_groups
    if not 1 <= experts.top_k <= choice or experts.top_groups > experts.groups:
        raise ConfigError(
            f"model config: a token cannot go to {experts.top_k} of {experts.count} experts"
            + (f" in {experts.top_groups} of {experts.groups} groups" if experts.groups > 1 else "")
        )


def _check_rope(rope: Rotary, head_dim: int) -> None:
    if rope.dim % 2 or not 0 < rope.dim <= head_dim:
        raise ConfigError(
            f"model config: rotary embedding turns an even number of a head's {head_dim} components, not {rope.dim}"
        )
    scaling = rope.scaling
    if scaling.kind not in ROPE_KINDS:
        raise ConfigError(f"model config: rope scaling {scaling.kind!r} is not supported, only {listed(ROPE_KINDS)}")
    if scaling.kind in ("llama3", "yarn", "longrope") and scaling.original_context < 1:
        raise ConfigError(f"model config: rope scaling {scaling.kind} needs original_max_position_embeddings")
    found = {"factors": (scaling.factors,), "longrope": (scaling.factors, scaling.long_factors)}.get(scaling.kind, ())
    for factors in found:
        if len(factors) != rope.dim // 2:
            raise ConfigError(
                f"model config: rope scaling has {len(factors)} factors, {rope.dim} turned components need "
                f"{rope.dim // 2}"
            )


def listed(names: Iterable[str]) -> str:
    return ", ".join(names)
