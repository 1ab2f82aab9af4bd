"""Builds tiny random Llama checkpoints, with a real tokenizer, for tests of any part.

Imports torch and transformers only when a model is built.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
BOS, EOS = "<|start|>", "<|end|>"
BOS_ID, EOS_ID = 256, 257

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def build_tiny_llama(folder: Path | str, seed: int = 0, **overrides: Any) -> Path:
    """A random Llama in ``folder``: config.json, model.safetensors, tokenizer.json, tokenizer_config.json.

    Two layers, four heads of 16, two key/value heads, 512 tokens, a context of 512. ``overrides`` go to
    transformers' LlamaConfig; ``max_shard_size`` (say "100KB") splits the weights over files.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(folder)
    shard = overrides.pop("max_shard_size", "5GB")
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        # Wider than the usual 0.02: random logits then lie far enough apart to be told from rounding.
        "initializer_range": 0.3,
    }
    config = LlamaConfig(**(settings | overrides))
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).float().eval()
    if config.attention_bias or config.mlp_bias:
        # transformers starts biases at zero, which would hide a bias that is not added.
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                torch.nn.init.normal_(parameter, std=0.3)
    torch.set_rng_state(generator_state)
    model.save_pretrained(folder, max_shard_size=shard)
    write_tiny_tokenizer(folder)
    return folder


def write_tiny_tokenizer(folder: Path | str) -> None:
    """A byte-level BPE of 512 tokens without merges: every byte is a token, the rest are fillers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [BOS, EOS, *(f"<|filler-{index}|>" for index in range(VOCAB_SIZE - len(alphabet) - 2))]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    folder = Path(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": 512,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
