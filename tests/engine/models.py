"""Tiny random-weight models of the families the engine serves; only shapes and attention kinds matter here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

VOCAB = 512

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

SERVED: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SIZES),
    "qwen2": Qwen2Config(**_SIZES),
    "qwen3": Qwen3Config(**_SIZES, head_dim=16),
    "mistral-sliding": MistralConfig(**_SIZES, sliding_window=24),
    "gemma2-sliding-softcap": Gemma2Config(
        **_SIZES, head_dim=16, sliding_window=24, attn_logit_softcapping=5.0, query_pre_attn_scalar=16
    ),
    "gemma3-sliding": Gemma3TextConfig(**_SIZES, head_dim=16, sliding_window=24, query_pre_attn_scalar=16),
    "phi3": Phi3Config(**_SIZES),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2
    ),
}

REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "bloom": (
        BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
        "AttentionInterface",
    ),
    "mamba": (MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2), "AttentionInterface"),
    "t5": (T5Config(vocab_size=VOCAB, d_model=32, num_layers=2, num_heads=2, d_kv=16, d_ff=32), "encoder-decoder"),
    "phi3-longrope": (
        Phi3Config(
            **_SIZES,
            original_max_position_embeddings=256,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 256,
            },
        ),
        "set [model].max_model_len to 256 or less",
    ),
}


def save_model(config: PreTrainedConfig, folder: Path, seed: int = 0) -> Path:
    """Write a random model of the config, in float32, weights spread widely so that greedy answers vary."""
    torch.manual_seed(seed)
    if config.model_type == "t5":
        from transformers import T5ForConditionalGeneration

        model: Any = T5ForConditionalGeneration(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.0 if any(part in name for part in ("embed", "wte", "wpe")) else 0.25)
    model.save_pretrained(folder)
    return folder
