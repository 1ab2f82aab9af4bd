"""The model families that Baton runs: the names they go by, and what in them is fixed by the family.

Numbers that differ from one model of a family to the next come from its config (`hf_config.py`, `gguf_config.py`). A
family that the shared decoder can express is added with one entry here. This module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from common.errors import ConfigError

Norms = Literal["before", "after", "around"]
"""Where a layer normalises: what goes into attention and MLP (Llama), what comes out of them (OLMo-2), both (Gemma)."""

QKNorm = Literal["none", "heads", "whole"]
"""What of queries and keys is normalised before rotation: nothing, each head (Qwen3), all heads together (OLMo-2)."""

Windowed = Literal["none", "all", "upper", "alternate", "pattern"]
"""Which layers the config's ``sliding_window`` is for, unless it lists them itself: none, all, those from
``max_window_layers`` on, every other one beginning with the first, all but each ``sliding_window_pattern``-th.
"""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Where a checkpoint keeps a layer's experts: ``<prefix>.gate`` chooses, ``<prefix>.experts.<n>.<part>``
    compute.
    """

    prefix: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of decoder.

    ``qkv_bias``: its query, key and value projections have a bias though its config does not say so.
    ``fused``: queries, keys and values are stored as one tensor, and so are the MLP's gate and up.
    ``latent``: it has multi-head latent attention. ``centred``: its norms' weights are stored minus 1.
    ``scaled_embedding``: token embeddings are multiplied by the root of the hidden size.
    ``permuted``: its GGUF files hold query and key rows in llama.cpp's interleaved order.
    """

    name: str
    architectures: tuple[str, ...]
    gguf_names: tuple[str, ...] = ()
    permuted: bool = False
    qkv_bias: bool = False
    fused: bool = False
    norms: Norms = "before"
    qk_norm: QKNorm = "none"
    latent: bool = False
    centred: bool = False
    scaled_embedding: bool = False
    windowed: Windowed = "none"
    experts: ExpertNames | None = field(default=None)


_MIXTRAL = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
_USUAL = ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj")

FAMILIES: tuple[Family, ...] = (
    Family("llama", ("LlamaForCausalLM",), ("llama",), permuted=True),
    Family("mistral", ("MistralForCausalLM",), windowed="all"),
    Family("qwen2", ("Qwen2ForCausalLM",), ("qwen2",), qkv_bias=True, windowed="upper"),
    Family("qwen3", ("Qwen3ForCausalLM",), ("qwen3",), qk_norm="heads", windowed="upper"),
    Family("phi3", ("Phi3ForCausalLM",), fused=True, windowed="all"),
    Family("olmo2", ("Olmo2ForCausalLM",), norms="after", qk_norm="whole"),
    Family("gemma2", ("Gemma2ForCausalLM",), norms="around", centred=True, scaled_embedding=True, windowed="alternate"),
    Family(
        "gemma3",
        ("Gemma3ForCausalLM",),
        norms="around",
        qk_norm="heads",
        centred=True,
        scaled_embedding=True,
        windowed="pattern",
    ),
    Family("mixtral", ("MixtralForCausalLM",), windowed="all", experts=_MIXTRAL),
    Family("deepseek_v2", ("DeepseekV2ForCausalLM",), latent=True, experts=_USUAL),
    Family("deepseek_v3", ("DeepseekV3ForCausalLM",), latent=True, experts=_USUAL),
    Family("qwen3_moe", ("Qwen3MoeForCausalLM",), qk_norm="heads", windowed="upper", experts=_USUAL),
)


FOREIGN = Family("transformers", ())
"""Any other decoder, which transformers computes (`engine/models/foreign.py`)."""

FOREIGN_ENDINGS = ("ForCausalLM", "LMHeadModel")
"""How the names of decoders end in transformers."""


def family_of(name: str) -> Family:
    """The family called ``name``. Raises ConfigError."""
    for family in (*FAMILIES, FOREIGN):
        if family.name == name:
            return family
    raise ConfigError(f"model family {name!r} is not supported, only {', '.join(f.name for f in FAMILIES)}")
