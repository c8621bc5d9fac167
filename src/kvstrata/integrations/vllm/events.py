"""KV cache events for vLLM's publisher: which chunks appeared at, or left, which place."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvstrata.core.messages import CacheEvent, EventKind
from kvstrata.integrations.vllm.shapes import EngineShape
from kvstrata.types import key_group

PLACES: Mapping[str, str] = {"primary": "CPU"}
"""What vLLM calls our places; a tier is called by its name, in capitals."""


@functools.cache
def _vllm_events() -> Any:
    return importlib.import_module("vllm.distributed.kv_events")


@functools.cache
def _published() -> Callable[[bytes], Any]:
    """How vLLM publishes a block hash: as a number of 64 bits unless it is told otherwise."""
    try:
        utilities = importlib.import_module("vllm.v1.core.kv_cache_utils")  # glossary: allow
    except ImportError:
        return lambda hashed: hashed
    convert: Callable[[bytes], Any] = utilities.maybe_convert_block_hash
    return convert


def engine_events(shape: EngineShape, events: Iterable[CacheEvent]) -> list[Any]:
    """vLLM's events for ours. Tokens are never told: a consumer knows a chunk by its block hash."""
    module = _vllm_events()
    made = []
    for event in events:
        medium = PLACES.get(event.place, event.place.upper())
        for group, hashes in _by_group(event).items():
            index = shape.groups[group].index
            if event.kind is EventKind.STORED:
                made.append(
                    module.BlockStored(
                        block_hashes=hashes,
                        parent_block_hash=None,
                        token_ids=[],
                        block_size=shape.groups[group].tokens_per_block * shape.blocks_per_chunk,
                        lora_id=None,
                        medium=medium,
                        lora_name=None,
                        group_idx=index,
                    )
                )
            else:
                made.append(module.BlockRemoved(block_hashes=hashes, medium=medium, group_idx=index))
    return made


def _by_group(event: CacheEvent) -> dict[int, list[Any]]:
    groups: dict[int, list[Any]] = {}
    for key in event.keys:
        groups.setdefault(key_group(key), []).append(_published()(key[:-4]))
    return groups
