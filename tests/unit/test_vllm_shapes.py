"""Layouts from the engine's groups, keys from its hashes, and which of its blocks are touched."""

from __future__ import annotations

import numpy as np
import pytest
import vllm_kit as kit

from kvstrata.core.messages import LoadPlan
from kvstrata.errors import ConfigError
from kvstrata.integrations.vllm.keys import KeyChain
from kvstrata.integrations.vllm.planning import load_copies, misses, store_sources
from kvstrata.integrations.vllm.shapes import engine_shape
from kvstrata.integrations.vllm.sources import tokens_by_source
from kvstrata.types import key_group


def test_kinds_sizes_and_ranks() -> None:
    shape = kit.shape_of(
        kit.group(kit.full()),
        kit.group(kit.sliding(33, extra_retained_tokens=2)),
        kit.group(kit.mamba(block_size=32)),
        kit.group(kit.spec("ChunkedLocalAttentionSpec", attention_chunk_size=64)),
        blocks_per_chunk=2,
        tensor=2,
    )
    layout = shape.layout()
    assert [group.kind.name for group in layout.groups] == ["full", "sliding_window", "recurrent", "chunked_local"]
    assert layout.tokens_per_chunk == (32, 32, 64, 32)
    assert layout.chunk_bytes == (2 * 2 * 2 * 256, 2 * 2 * 2 * 256, 2 * 2 * 96, 2 * 2 * 2 * 256)
    assert shape.states_handed_off
    assert not shape.impossible


def test_groups_that_are_the_same_on_all_ranks_are_stored_once() -> None:
    shape = engine_shape(kit.engine(2), kit.caches(kit.group(kit.spec("MLAAttentionSpec")), kv_tp_replicas=2), 1, 16)
    assert shape.groups[0].replicated
    assert shape.layout().chunk_bytes == (512,)


def test_a_mode_that_keeps_no_states_makes_every_hit_impossible() -> None:
    assert kit.shape_of(kit.group(kit.full()), kit.group(kit.mamba("none"))).impossible


def test_groups_that_no_prefix_cache_keeps_are_left_out() -> None:
    config = kit.caches(kit.group(kit.full()), kit.group(kit.spec("Odd")), prefix_cacheable_group_ids=(0,))
    assert [group.index for group in engine_shape(kit.engine(), config, 1, 16).groups] == [0]


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ((kit.group(kit.spec("SinkFullAttentionSpec")),), "SinkFullAttentionSpec is a kind"),
        ((kit.group(kit.spec("FullAttentionSpec", home="elsewhere")),), "elsewhere.FullAttentionSpec"),
        ((kit.group(kit.full(block_size=24)),), "no multiple of the engine's 16 tokens"),
        ((kit.group(kit.mamba("other")),), "mode 'other'"),
        ((), "no KV cache group"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(groups: tuple[object, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kit.shape_of(*groups)


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "decode_context_parallel_size", "nnodes_within_dp"])
def test_parallelism_that_is_not_supported_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        engine_shape(kit.engine(**{name: 2}), kit.caches(kit.group(kit.full())), 1, 16)


def test_a_wrapper_of_layers_of_one_kind_is_that_kind() -> None:
    layers = {"a": kit.full(page_size_bytes=100), "b": kit.full(page_size_bytes=60)}
    wrapper = kit.spec("UniformTypeKVCacheSpecs", kv_cache_specs=layers)
    shape = kit.shape_of(kit.group(wrapper))
    del shape
    named = kit.group(wrapper)
    named.layer_names = ["a", "b"]
    assert [layer.page for layer in kit.shape_of(named).groups[0].layers] == [100, 60]
    layers["b"] = kit.sliding(8)
    with pytest.raises(ConfigError, match="different ways"):
        kit.shape_of(named)


def test_a_chunk_has_the_hash_of_its_last_block() -> None:
    shape = kit.shape_of(kit.group(kit.full()), kit.group(kit.full(block_size=32)), blocks_per_chunk=2)
    chain = KeyChain(shape, b"")
    hashes = [bytes([i]) * 32 for i in range(9)]
    assert chain.take(hashes[:1]) is None
    first = chain.take(hashes[:5])
    assert first is not None
    assert [key[:1] for key in first[0]] == [b"\x01", b"\x03"]
    assert [key[:1] for key in first[1]] == [b"\x03"]
    assert {key_group(key) for key in first[1]} == {1}
    rest = chain.take(hashes)
    assert rest is not None
    assert [[key[0] for key in keys] for keys in rest] == [[5, 7], [7]]
    assert KeyChain(shape, b"scope").take(hashes) != KeyChain(shape, b"").take(hashes)


def plan(ranges: tuple[tuple[int, int], ...], computed: int, boundary: int) -> LoadPlan:
    count = sum(hi - lo for lo, hi in ranges)
    offsets = 1000 * np.arange(count)
    return LoadPlan(1, "r", computed, boundary, ranges, np.arange(count, dtype=np.int32), offsets, offsets, ())


def test_a_load_fills_only_blocks_of_its_own_range() -> None:
    shape = kit.shape_of(kit.group(kit.full()), blocks_per_chunk=2)
    table = kit.blocks(9, 8, 7, 6, 5)
    (copy,) = load_copies(shape, plan(((0, 3),), 16, 70), [table])
    assert copy.blocks == [8, 7, 6, 5]
    assert copy.chunks == [0, 1000, 1000, 2000]
    assert copy.inside == [1, 0, 1, 0]


def test_a_load_leaves_null_blocks_and_hashed_ones_alone() -> None:
    shape = kit.shape_of(kit.group(kit.sliding(33)))
    table = kit.blocks(0, 0, 7, 6)
    table[3].block_hash = "known"
    (copy,) = load_copies(shape, plan(((1, 4),), 0, 64), [table])
    assert copy.blocks == [7]
    table[2].is_null = True
    nothing = plan(((1, 4),), 0, 64)
    assert load_copies(shape, nothing, [table]) == []
    assert misses(shape, nothing, []) == 0


def test_of_a_recurrent_chunk_only_the_last_block_is_loaded() -> None:
    shape = kit.shape_of(kit.group(kit.mamba()), blocks_per_chunk=2)
    (copy,) = load_copies(shape, plan(((1, 2),), 0, 64), [kit.blocks(0, 0, 0, 6)])
    assert (copy.blocks, copy.chunks, copy.inside) == ([6], [0], [0])


def test_a_store_needs_every_block() -> None:
    shape = kit.shape_of(kit.group(kit.full()), kit.group(kit.mamba()), blocks_per_chunk=2)
    assert store_sources(shape, 0, 1, [1, 2, 3, 4], {}) == [3, 4]
    assert store_sources(shape, 0, 1, [1, 2, 0, 4], {}) is None
    assert store_sources(shape, 0, 1, [1, 2, 3], {}) is None
    assert store_sources(shape, 1, 1, [1, 2, 3, 4], {}) is None
    assert store_sources(shape, 1, 1, [1, 2, 3, 4], {(1, 1): 17}) == [17]


def test_tokens_count_for_the_farthest_place() -> None:
    shape = kit.shape_of(kit.group(kit.full()), kit.group(kit.sliding(17)))
    sources = ((range(4), [-1, 0, -1, -1]), (range(3, 4), [1]))
    found = tokens_by_source(shape.layout(), plan(((0, 4), (3, 4)), 8, 60), sources, ["disk", "far"])
    assert found == {"primary": 24, "disk": 16, "far": 12}
    assert sum(found.values()) == 52
