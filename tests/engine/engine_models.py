"""Small models with random weights that show a wrong restore: python engine_models.py FOLDER [NAME...]

Weights have a standard deviation of 0.15 and the head is untied: with smaller or tied ones a model gives the same
tokens whatever its KV cache holds. Everything is seeded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DEVIATION = 0.15
COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LFM2_EXTRA = {
    "conv_dim": 256,
    "conv_dim_out": 256,
    "block_dim": 256,
    "block_ff_dim": 512,
    "block_multiple_of": 64,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "conv_use_xavier_init": True,
    "block_use_swiglu": True,
    "theta": 10000.0,
}


def _config(name: str, transformers: Any) -> Any:
    """The configuration of one of the models."""
    if name == "llama":  # one group of full attention
        return transformers.LlamaConfig(num_hidden_layers=4, head_dim=64, **COMMON)
    if name == "single":  # one head of keys and values: with two ranks both have the same bytes
        return transformers.LlamaConfig(num_hidden_layers=4, head_dim=64, **{**COMMON, "num_key_value_heads": 1})
    if name == "gemma3":  # two groups of sliding windows and one of full attention
        kinds = (["sliding_attention"] * 2 + ["full_attention"]) * 2
        return transformers.Gemma3TextConfig(
            num_hidden_layers=6, head_dim=64, sliding_window=128, layer_types=kinds, **COMMON
        )
    if name == "lfm2":  # one recurrent group (short convolution) and one of full attention
        kinds = ["conv", "full_attention"] * 2
        return transformers.Lfm2Config(num_hidden_layers=4, layer_types=kinds, conv_L_cache=3, **COMMON)
    if name == "qwen3next":  # three recurrent groups (gated delta net) and one of full attention
        return transformers.Qwen3NextConfig(
            num_hidden_layers=4,
            head_dim=64,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=128,
            decoder_sparse_step=1,
            **COMMON,
        )
    if name == "mid":  # prefill of 4000 tokens costs seconds on two cores
        large = {
            **COMMON,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
        }
        return transformers.LlamaConfig(num_hidden_layers=16, head_dim=64, **large)
    raise ValueError(f"no model {name}")


NAMES = ("llama", "gemma3", "lfm2", "qwen3next")


def make(folder: Path, name: str, seed: int = 7) -> Path:
    """Write the model `name` below `folder`, if it is not there; returns its directory."""
    import torch
    import transformers

    path = folder / name
    if (path / "ready").exists():
        return path
    config = _config(name, transformers)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, DEVIATION, generator=generator)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.fill_(-6.0)  # states that fade at once would hide a wrong one
    model.to(torch.bfloat16).save_pretrained(path, safe_serialization=True)
    if name == "lfm2":
        written = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**written, **LFM2_EXTRA}))
    (path / "ready").write_text("")
    return path


if __name__ == "__main__":
    for wanted in sys.argv[2:] or NAMES:
        print(make(Path(sys.argv[1]), wanted))
