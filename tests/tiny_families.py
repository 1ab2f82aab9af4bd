"""Builds tiny random checkpoints of all families that Baton runs, and of their variants.

Imports torch and transformers only when a model is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny_model import write_tiny_tokenizer

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SLIDING, FULL = "sliding_attention", "full_attention"
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.0 + 0.9 * i for i in range(8)],
}
EXPERTS = {"num_experts_per_tok": 2}
LATENT = EXPERTS | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window": ("Mistral", {"sliding_window": 37}),
    "qwen2": ("Qwen2", {}),
    "qwen2, upper window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3, tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "phi3": ("Phi3", {"sliding_window": 50}),
    "phi4, partly turned": ("Phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "phi3, longrope": ("Phi3", {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE}),
    "olmo2": ("Olmo2", {}),
    "gemma2": ("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 40}),
    "gemma2, low caps": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 16,
            "sliding_window": 33,
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "mixtral": ("Mixtral", EXPERTS | {"num_local_experts": 4}),
    "qwen3 moe": (
        "Qwen3Moe",
        EXPERTS | {"num_experts": 6, "moe_intermediate_size": 48, "norm_topk_prob": True, "head_dim": 16},
    ),
    "qwen3 moe, some layers dense": (
        "Qwen3Moe",
        EXPERTS | {"num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [0], "head_dim": 16},
    ),
    "deepseek v2": ("DeepseekV2", LATENT | {"n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1}),
    "deepseek v2, groups": (
        "DeepseekV2",
        LATENT
        | {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
            "q_lora_rank": None,
        },
    ),
    "deepseek v3": (
        "DeepseekV3",
        LATENT
        | {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "attention_bias": True,
        },
    ),
    "deepseek v3, yarn": (
        "DeepseekV3",
        LATENT
        | {
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
            },
        },
    ),
}


def build_tiny(folder: Path, variant: str) -> Path:
    """The model of this name in ``folder``, with a tokenizer."""
    import torch
    import transformers

    family, settings = FAMILIES[variant]

    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**(COMMON | settings))
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias") or "norm" in name:
            # transformers starts biases at zero and norms at one: one that is left out would not be seen.
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder
