"""Stand-ins for vLLM's configuration and scheduler objects: only the attributes that kvstrata looks at."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvstrata.config import config_from_dict
from kvstrata.integrations.vllm.scheduler import SchedulerSide
from kvstrata.integrations.vllm.settings import VllmSettings
from kvstrata.integrations.vllm.shapes import EngineShape, engine_shape
from kvstrata.integrations.vllm.stack import Stack

HOME = "vllm.v1.kv_cache_interface"


def spec(name: str, home: str = HOME, **fields: Any) -> Any:
    """An instance of a class of that exact name and module."""
    kind = type(name, (SimpleNamespace,), {"__module__": home})
    return kind(**{"block_size": 16, "page_size_bytes": 256, **fields})


def full(**fields: Any) -> Any:
    return spec("FullAttentionSpec", **fields)


def sliding(window: int, **fields: Any) -> Any:
    return spec("SlidingWindowSpec", sliding_window=window, **fields)


def mamba(mode: str = "align", **fields: Any) -> Any:
    return spec("MambaSpec", mamba_cache_mode=mode, state_content_size_bytes=96, **fields)


def group(one: Any, layers: int = 2, **fields: Any) -> Any:
    names = [f"layer.{id(one) % 997}.{i}" for i in range(layers)]
    return SimpleNamespace(kv_cache_spec=one, layer_names=names, is_eagle_group=False, **fields)


def caches(*groups: Any, **fields: Any) -> Any:
    return SimpleNamespace(
        kv_cache_groups=list(groups), num_blocks=64, hash_block_size=16, prefix_cache_retention_interval=None, **fields
    )


def engine(tensor: int = 1, **parallel: Any) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor, rank=0, **parallel),
        cache_config=SimpleNamespace(block_size=16),
    )


def shape_of(*groups: Any, blocks_per_chunk: int = 1, tensor: int = 1) -> EngineShape:
    return engine_shape(engine(tensor), caches(*groups), blocks_per_chunk, 16)


@dataclass
class FakeRequest:
    """A request whose blocks are hashed in a chain."""

    request_id: str
    tokens: list[int]
    prompt: int = -1
    num_computed_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.prompt < 0:
            self.prompt = len(self.tokens)
        self.hash_up()

    def hash_up(self) -> None:
        parent = self.block_hashes[-1] if self.block_hashes else b""
        for at in range(16 * len(self.block_hashes), len(self.tokens) - 15, 16):
            parent = hashlib.sha256(parent + str(self.tokens[at : at + 16]).encode()).digest()
            self.block_hashes.append(parent)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt


@dataclass
class FakeBlock:
    block_id: int
    is_null: bool = False
    block_hash: object = None


def blocks(*ids: int) -> list[FakeBlock]:
    return [FakeBlock(i, is_null=i == 0) for i in ids]


def side(
    shape: EngineShape, size: int = 1 << 20, tiers: tuple[dict[str, Any], ...] = (), **settings: Any
) -> SchedulerSide:
    """A scheduler side with its stack open and no thread running."""
    config = config_from_dict({"primary": {"size": size}, "tiers": list(tiers)})
    chosen = VllmSettings(config, **settings)
    stack = Stack(shape.layout(), chosen, bytes(16), ranks=shape.ranks).open()
    return SchedulerSide(shape, chosen, stack, lambda request: b"")


def output(scheduled: dict[str, int], tables: dict[str, Any], states: dict[str, Any] | None = None) -> Any:
    """The part of a scheduler's output that is looked at."""
    state = SimpleNamespace(boundary_state_offloads=states or {}, get_block_ids=tables.get)
    return SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)
