"""Builds both sides from vLLM's configuration."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any

from kvstrata.config import Config, TierConfig
from kvstrata.integrations.vllm import share
from kvstrata.integrations.vllm.identity import engine_identity, namespace_of, scope_of
from kvstrata.integrations.vllm.scheduler import SchedulerSide
from kvstrata.integrations.vllm.settings import VllmSettings, read_settings
from kvstrata.integrations.vllm.shapes import EngineShape, describe_groups, engine_shape
from kvstrata.integrations.vllm.stack import Stack, ladder_doubts, layout_tag, tier_options
from kvstrata.integrations.vllm.worker import WorkerSide
from kvstrata.layout.groups import Layout
from kvstrata.layout.namespace import require_durable
from kvstrata.tiers.common.claims import default_part
from kvstrata.tiers.registry import is_shared
from kvstrata.transfer.torch_copier import make_copier
from kvstrata.types import Medium

_log = logging.getLogger("vllm.kvstrata")

SOURCE_OF_MEDIUM = {
    Medium.CPU: "HOST",
    Medium.NVME: "DISK",
    Medium.SHARED_FS: "DISK",
    Medium.OBJECT: "EXTERNAL_UNSPECIFIED",
    Medium.MEMORY_STORE: "EXTERNAL_UNSPECIFIED",
}
"""What vLLM calls the places that a hit may come from."""


def _settings(vllm_config: Any) -> VllmSettings:
    settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
    parallel = vllm_config.parallel_config
    replicas = int(getattr(parallel, "data_parallel_size", 1) or 1)
    return for_replica(settings, int(getattr(parallel, "data_parallel_index", 0) or 0), replicas)


def for_replica(settings: VllmSettings, index: int, replicas: int) -> VllmSettings:
    """The settings of one of several engines that share a configuration: a folder and a part of each limit of its own.

    In a tier that engines share, a part of its own instead of a folder. The number is the same over restarts, so that
    each finds its own chunks again.
    """
    if replicas <= 1:
        return settings
    tiers = []
    for tier in settings.config.tiers:
        options = tier_options(tier.options, tier.name)
        if is_shared(tier.type, options):
            options["part"] = f"{options.get('part') or default_part()}-{index}"
        elif "path" in options:
            options["path"] = os.path.join(str(options["path"]), f"rank-{index}")
        if options.get("limit") is not None:
            options["limit"] = max(int(options["limit"]) // replicas, 1)
        tiers.append(TierConfig(type=tier.type, name=tier.name, cascade=tier.cascade, options=options))
    config = Config(primary=settings.config.primary, core=settings.config.core, tiers=tuple(tiers))
    return dataclasses.replace(settings, config=config)


def _shape(vllm_config: Any, cache_config: Any, settings: VllmSettings) -> EngineShape:
    tokens = getattr(cache_config, "hash_block_size", None)
    if tokens is None:  # older versions resolve it where it is needed
        module = importlib.import_module("vllm.v1.core.kv_cache_utils")
        helper = getattr(module, "resolve_kv_cache_block_sizes", None)  # glossary: allow
        tokens = vllm_config.cache_config.block_size if helper is None else helper(cache_config, vllm_config)[1]
    return engine_shape(vllm_config, cache_config, settings.blocks_per_chunk, int(tokens))


def _engine_id(vllm_config: Any) -> str:
    """The engine's id; replicas of one configuration must not meet."""
    index = getattr(vllm_config.parallel_config, "data_parallel_index", 0)
    return f"{vllm_config.kv_transfer_config.engine_id}-{index}"


def scheduler_side(vllm_config: Any, cache_config: Any, version: str) -> SchedulerSide:
    """The scheduler side of an engine, with its stack open and running.

    Sets vLLM's policy for failed loads, which would otherwise end requests with an error; the scheduler reads it after
    this. Raises `ConfigError` or `CapacityError` for a configuration that cannot work.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        _log.info("kvstrata: kv_load_failure_policy is now 'recompute': a failed load is computed, not an error")
    settings = _settings(vllm_config)
    shape = _shape(vllm_config, cache_config, settings)
    identity = engine_identity(vllm_config, cache_config, shape, version)
    if settings.config.tiers:
        require_durable(identity)
    layout = shape.layout()
    engine_id = _engine_id(vllm_config)
    stack = Stack(
        layout,
        settings,
        namespace_of(identity),
        name=share.region_name(engine_id),
        tag=layout_tag(layout, identity.kv_layout),
        ranks=shape.ranks,
        events=_events_wanted(vllm_config),
    ).open()
    share.publish(engine_id, stack.region)
    side = SchedulerSide(shape, settings, stack, scope_of)
    _tell(side, shape, stack, vllm_config)
    stack.start()
    return side


def _events_wanted(vllm_config: Any) -> bool:
    config = getattr(vllm_config, "kv_events_config", None)
    return config is not None and bool(config.enable_kv_cache_events)


def _tell(side: SchedulerSide, shape: EngineShape, stack: Stack, vllm_config: Any) -> None:
    """Say what was found and what it is good for."""
    for line in describe_groups(shape):
        _log.info("kvstrata: %s", line)
    names = ", ".join(tier.name for tier in stack.tiers) or "none"
    _log.info("kvstrata: primary of %d bytes, tiers: %s", stack.region.size, names)
    for doubt in ladder_doubts(stack.settings.config):
        _log.warning("kvstrata: %s", doubt)
    for line, good in outlook(stack, int(vllm_config.model_config.max_model_len)):
        _log.log(logging.INFO if good else logging.WARNING, "kvstrata: %s", line)
    if shape.impossible:
        side.switch_off(
            "the model's recurrent states are not kept by this engine, so that no prefix can ever be restored; switch "
            "prefix caching on"
        )


def outlook(stack: Stack, longest: int) -> list[tuple[str, bool]]:
    """What one restore can bring for a context of `longest` tokens, and whether each line is good news."""
    layout, core = stack.layout, stack.core_config
    if layout.kind_step == 0:
        return []
    room = core.capacity_bytes - int(core.store_reserve * core.capacity_bytes)
    tokens = largest_restore(layout, longest, room)
    lines = [
        (
            f"one restore can bring {tokens} of {longest} tokens"
            + (
                ""
                if tokens >= longest - layout.kind_step
                else f"; a larger primary than {core.capacity_bytes} would bring more"
            ),
            tokens >= longest - layout.kind_step,
        )
    ]
    size = restore_bytes(layout, tokens)
    bound = core.total_s + size / core.min_rate_bytes_per_s
    for name, rate in stack.rates.items():
        if rate and tokens:
            seconds = size / rate
            words = (
                ""
                if seconds <= bound
                else f", more than the {bound:.1f} s that a request waits: core.min_rate_bytes_per_s"
            )
            lines.append(
                (f"that takes {seconds:.2f} s from {name} ({rate / 1e6:.0f} MB/s measured){words}", seconds <= bound)
            )
    return lines


def restore_bytes(layout: Layout, tokens: int) -> int:
    """Bytes that a boundary of so many tokens consumes."""
    if tokens <= 0:
        return 0
    return sum(
        (hi - lo) * size for (lo, hi), size in zip(layout.consumed_ranges(tokens, 0), layout.chunk_bytes, strict=True)
    )


def largest_restore(layout: Layout, longest: int, room: int) -> int:
    """The largest boundary up to `longest` whose chunks fit into `room` bytes."""
    step = max(layout.kind_step, 1)
    low, high = 0, longest // step
    while low < high:
        middle = (low + high + 1) // 2
        if restore_bytes(layout, middle * step) <= room:
            low = middle
        else:
            high = middle - 1
    return low * step


def worker_side(vllm_config: Any, cache_config: Any) -> WorkerSide:
    """The worker side of one rank."""
    settings = _settings(vllm_config)
    shape = _shape(vllm_config, cache_config, settings)
    helper = getattr(importlib.import_module("vllm.v1.kv_cache_interface"), "group_kernel_blocks", None)
    return WorkerSide(
        shape,
        int(vllm_config.parallel_config.rank),
        _engine_id(vllm_config),
        canary=settings.canary,
        regroup=(lambda cache, blocks: cache) if helper is None else helper,
        make=functools.partial(make_copier, launch=_launch(vllm_config)),
    )


def _launch(vllm_config: Any) -> Any:
    """vLLM's operation that queues many copies at once; None where KV lies in host memory."""
    if vllm_config.device_config.device_type == "cpu":
        return None
    return importlib.import_module("vllm._custom_ops").swap_blocks_batch


@functools.cache
def _source_names() -> Any:
    return importlib.import_module("vllm.v1.metrics.cache_hit_source").CacheHitSource


def hit_sources(side: SchedulerSide | None, request_id: str, tokens: int) -> Mapping[Any, int]:
    """The tokens of a load by vLLM's names of places; they add up to `tokens`."""
    if side is None or tokens == 0:
        return {}
    sources = _source_names()
    media = {tier.name: tier.medium for tier in side.stack.tiers}
    found: dict[Any, int] = {}
    for name, count in side.sources_of(request_id).items():
        source = getattr(sources, SOURCE_OF_MEDIUM[media[name]] if name in media else "HOST")
        found[source] = found.get(source, 0) + count
    return found if sum(found.values()) == tokens else {sources.EXTERNAL_UNSPECIFIED: tokens}
