"""From the engine's cache configuration to kvstrata's layout: kinds by exact type, sizes of pages, ranks.

The engine's objects are only looked at, never imported: their exact type decides by its name, so a subclass with
other rules is refused rather than taken for its parent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata.errors import ConfigError
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import ChunkedLocal, FullAttention, Kind, RecurrentState, SlidingWindow

_HOME = "vllm.v1.kv_cache_interface"
WRAPPER = "UniformTypeKVCacheSpecs"


@dataclass(frozen=True, slots=True)
class LayerPage:
    """One layer of a group and the bytes of one of its blocks on one rank."""

    name: str
    page: int


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """One group of the engine. `index` is the engine's number of it; ours is its place in `EngineShape.groups`."""

    index: int
    kind: Kind
    tokens_per_block: int
    layers: tuple[LayerPage, ...]
    drafter: bool
    replicated: bool
    spec: str
    """Type of the engine's specification and all that it says, for the identity."""

    @property
    def recurrent(self) -> bool:
        """Whether blocks hold states; of a chunk only the last block's is kept."""
        return self.kind.name == RecurrentState.name

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all layers on one rank."""
        return sum(layer.page for layer in self.layers)


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What both sides need to know of the engine's cache."""

    groups: tuple[EngineGroup, ...]
    ranks: int
    tokens_per_hash: int
    blocks_per_chunk: int
    retention_interval: int | None

    def stored_blocks(self, g: int) -> int:
        """How many blocks of a chunk are kept."""
        return 1 if self.groups[g].recurrent else self.blocks_per_chunk

    def rank_bytes(self, g: int) -> int:
        """Bytes of one rank's part of a chunk."""
        return self.groups[g].block_bytes * self.stored_blocks(g)

    def parts(self, g: int) -> int:
        """How many ranks have a part of their own."""
        return 1 if self.groups[g].replicated else self.ranks

    def layout(self) -> Layout:
        """The layout for the core."""
        return Layout(
            tuple(
                Group(
                    group.kind,
                    group.tokens_per_block,
                    drafter=group.drafter,
                    chunk_bytes=self.rank_bytes(g) * self.parts(g),
                    name=f"group {group.index}",
                    replicated=group.replicated,
                )
                for g, group in enumerate(self.groups)
            ),
            blocks_per_chunk=self.blocks_per_chunk,
        )

    @property
    def states_handed_off(self) -> bool:
        """States exist only where the engine hands one off."""
        return any(group.recurrent and group.kind.parameters.get("mode") == "align" for group in self.groups)

    @property
    def impossible(self) -> bool:
        """No boundary exists: every external hit is impossible."""
        return self.layout().kind_step == 0


def engine_shape(vllm_config: Any, cache_config: Any, blocks_per_chunk: int, tokens_per_hash: int) -> EngineShape:
    """The shape of an engine; raises `ConfigError` for what is not supported, by name."""
    parallel = vllm_config.parallel_config
    _refuse_parallel(parallel)
    ranks = int(parallel.tensor_parallel_size)
    replicas = int(getattr(cache_config, "kv_tp_replicas", 1))
    chosen = getattr(cache_config, "prefix_cacheable_group_ids", None)
    indices = range(len(cache_config.kv_cache_groups)) if chosen is None else chosen
    groups = tuple(_group(i, cache_config.kv_cache_groups[i], ranks, replicas) for i in indices)
    if not groups:
        raise ConfigError("the model has no KV cache group that a prefix cache can keep")
    for group in groups:
        if group.tokens_per_block % tokens_per_hash:
            raise ConfigError(
                f"group {group.index}: blocks of {group.tokens_per_block} tokens are no multiple of the engine's "
                f"{tokens_per_hash} tokens per hash; hybrid models need prefix caching switched on"
            )
    interval = getattr(cache_config, "prefix_cache_retention_interval", None)
    return EngineShape(groups, ranks, tokens_per_hash, blocks_per_chunk, interval or None)


def _refuse_parallel(parallel: Any) -> None:
    for name, words in (
        ("pipeline_parallel_size", "pipeline parallelism"),
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
        ("nnodes_within_dp", "ranks on several hosts"),
    ):
        if int(getattr(parallel, name, 1) or 1) > 1:
            raise ConfigError(f"{name}={getattr(parallel, name)}: {words} is not supported by kvstrata yet")


def _group(index: int, group: Any, ranks: int, replicas: int) -> EngineGroup:
    spec = group.kv_cache_spec
    per_layer: Mapping[str, Any] = {}
    if _type_name(spec) == WRAPPER:
        per_layer = spec.kv_cache_specs
        first = next(iter(per_layer.values()))
        kinds = {_kind(index, layer) for layer in per_layer.values()}
        if len(kinds) != 1:
            raise ConfigError(f"group {index}: its layers are attended in different ways; kvstrata cannot keep it")
    else:
        first = spec
    layers = tuple(LayerPage(name, page_bytes(per_layer.get(name, first))) for name in group.layer_names)
    whole = _type_name(first) == "MLAAttentionSpec" and replicas == ranks
    replicated = ranks > 1 and (whole or bool(getattr(first, "tp_replicated", False)))
    return EngineGroup(
        index,
        _kind(index, first),
        int(spec.block_size),
        layers,
        bool(getattr(group, "is_eagle_group", False)),
        replicated,
        f"{_type_name(first)}: {first}",
    )


def _type_name(spec: Any) -> str:
    """The name of the exact type, with its module unless that is where the engine keeps its own ones."""
    kind = type(spec)
    return str(kind.__name__) if kind.__module__ == _HOME else f"{kind.__module__}.{kind.__name__}"


def _kind(index: int, spec: Any) -> Kind:
    match _type_name(spec):
        case "FullAttentionSpec" | "MLAAttentionSpec":
            return FullAttention()
        case "SlidingWindowSpec":
            return SlidingWindow(int(spec.sliding_window), int(getattr(spec, "extra_retained_tokens", 0)))
        case "ChunkedLocalAttentionSpec":
            return ChunkedLocal(int(spec.attention_chunk_size))
        case "MambaSpec":
            mode = str(spec.mamba_cache_mode)
            if mode not in ("align", "all", "none"):
                raise ConfigError(f"group {index}: recurrent state mode {mode!r} is not known to kvstrata")
            if int(getattr(spec, "num_speculative_blocks", 0)):
                raise ConfigError(f"group {index}: recurrent states with speculative decoding are not supported yet")
            return RecurrentState(mode)  # type: ignore[arg-type]
        case other:
            raise ConfigError(f"group {index}: {other} is a kind of KV cache that kvstrata does not support")


def page_bytes(spec: Any) -> int:
    """The bytes of one layer's block that carry something, without padding."""
    if _type_name(spec) == "MambaSpec":
        return int(spec.state_content_size_bytes)
    size = getattr(spec, "unpadded_page_size_bytes", None)
    return int(spec.page_size_bytes if size is None else size)


def describe_groups(shape: EngineShape) -> Sequence[str]:
    """One line per group, for the log."""
    return [
        f"group {group.index}: {group.kind.name}, {len(group.layers)} layers, {group.tokens_per_block} tokens and "
        f"{group.block_bytes} bytes per block and rank" + (", the same on all ranks" if group.replicated else "")
        for group in shape.groups
    ]
