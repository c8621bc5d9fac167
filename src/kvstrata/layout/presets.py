"""Layouts of well-known models with their real KV bytes, derived from the published configurations.

The numbers are those of each model's `config.json` on its model card (layers, KV heads, head sizes, window, state
sizes), with KV and states in bfloat16 as engines keep them by default. Layers are grouped as vLLM groups them: groups
of equally many layers, so that all groups can share one pool of blocks. A chunk's bytes are those of all its layers
and of all ranks together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import FullAttention, Kind, RecurrentState, SlidingWindow
from kvstrata.layout.kinds.base import require_count

BFLOAT16 = 2
BLOCK_TOKENS = 16
DEFAULT_CHUNK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one group. `token_bytes`: KV bytes of one token in one layer; `state_bytes`: one layer's state."""

    name: str
    kind: Kind
    layers: int
    token_bytes: int = 0
    state_bytes: int = 0

    def chunk_bytes(self, tokens: int) -> int:
        """Payload bytes of a chunk of `tokens` tokens; of a state, only the one at its end is stored."""
        return self.layers * (self.token_bytes * tokens + self.state_bytes)


@dataclass(frozen=True, slots=True)
class Preset:
    """A model's cache, free of a chunk size."""

    name: str
    model: str
    description: str
    groups: tuple[LayerGroup, ...] = field(repr=False)

    @property
    def bytes_per_token(self) -> int:
        """KV bytes that one more token takes in all groups, states and windows left aside."""
        return sum(group.layers * group.token_bytes for group in self.groups)

    def layout(self, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> Layout:
        """The layout with chunks of `chunk_tokens` in every group, a state at the end of each in recurrent ones.

        Blocks have 16 tokens where that divides the chunk, else the largest common divisor.
        """
        require_count("chunk_tokens", chunk_tokens, 1, 1 << 20)
        block = math.gcd(chunk_tokens, BLOCK_TOKENS)
        groups = tuple(
            Group(group.kind, block, chunk_bytes=group.chunk_bytes(chunk_tokens), name=group.name)
            for group in self.groups
        )
        return Layout(groups, blocks_per_chunk=chunk_tokens // block)


def attention_bytes(kv_heads: int, head_size: int) -> int:
    """Bytes of one token's keys and values in one layer."""
    return 2 * kv_heads * head_size * BFLOAT16


def latent_bytes(latent: int, rope: int) -> int:
    """Bytes of one token in one MLA layer: one compressed vector and the decoupled RoPE key, for all heads."""
    return (latent + rope) * BFLOAT16


def delta_net_bytes(key_heads: int, value_heads: int, key_size: int, value_size: int, kernel: int) -> int:
    """Bytes of the state of one gated delta net layer: a matrix per value head, and the convolution's last inputs."""
    matrices = value_heads * key_size * value_size
    convolution = (2 * key_heads * key_size + value_heads * value_size) * (kernel - 1)
    return (matrices + convolution) * BFLOAT16


def _plain() -> Preset:
    layers = LayerGroup("attention", FullAttention(), 32, attention_bytes(kv_heads=8, head_size=128))
    text = "grouped-query attention in 32 layers, 8 KV heads of 128"
    return Preset("plain", "meta-llama/Llama-3.1-8B", text, (layers,))


def _sliding() -> Preset:
    size = attention_bytes(kv_heads=8, head_size=64)
    groups = (
        LayerGroup("full", FullAttention(), 12, size),
        LayerGroup("window", SlidingWindow(128), 12, size),
    )
    text = "24 layers, full attention and a window of 128 in turn, 8 KV heads of 64"
    return Preset("sliding", "openai/gpt-oss-20b", text, groups)


def _five_to_one() -> Preset:
    size = attention_bytes(kv_heads=8, head_size=256)
    windows = tuple(LayerGroup(f"window{i}", SlidingWindow(1024), 8, size) for i in range(5))
    text = "48 layers, five with a window of 1024 to one of full attention, 8 KV heads of 256"
    return Preset("five-to-one", "google/gemma-3-12b", text, (LayerGroup("full", FullAttention(), 8, size), *windows))


def _mla() -> Preset:
    layers = LayerGroup("latent", FullAttention(), 61, latent_bytes(latent=512, rope=64))
    text = "multi-head latent attention in 61 layers, 512 + 64 values per token"
    return Preset("mla", "deepseek-ai/DeepSeek-V3", text, (layers,))


def _recurrent() -> Preset:
    state = delta_net_bytes(key_heads=16, value_heads=32, key_size=128, value_size=128, kernel=4)
    states = tuple(LayerGroup(f"state{i}", RecurrentState(), 12, state_bytes=state) for i in range(3))
    full = LayerGroup("full", FullAttention(), 12, attention_bytes(kv_heads=2, head_size=256))
    text = "48 layers, three gated delta nets to one of full attention, 2 KV heads of 256"
    return Preset("recurrent", "Qwen/Qwen3-Next-80B-A3B-Instruct", text, (full, *states))


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {preset.name: preset for preset in (_plain(), _sliding(), _five_to_one(), _mla(), _recurrent())}
)
"""All presets by name."""
