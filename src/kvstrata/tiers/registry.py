"""Tiers by name. Naming a tier imports nothing of it; making one imports its module."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from kvstrata.errors import ConfigError
from kvstrata.tiers.base import Tier

TIERS: dict[str, str] = {
    "memory": "kvstrata.tiers.memory:MemoryTier",
    "fs": "kvstrata.tiers.fs:make",
    "disk": "kvstrata.tiers.disk:DiskTier",
    "mooncake": "kvstrata.tiers.mooncake:MooncakeTier",
    "object": "kvstrata.tiers.object:ObjectTier",
    "redis": "kvstrata.tiers.redis:RedisTier",
}
"""Name of each built-in tier, and where its class is, or what makes it."""


_ALWAYS_SHARED = frozenset({"mooncake", "object", "redis"})


def is_shared(name: str, options: Mapping[str, object]) -> bool:
    """Whether a built-in tier with these options is one that several engines write, each its own part."""
    return name in _ALWAYS_SHARED or bool(options.get("part"))


def make_tier(name: str, /, **settings: object) -> Tier:
    """A tier that is not open yet. `name`: a built-in one, or "package.module:Class" of an outside author.

    Raises `ConfigError` for an unknown name, a module that cannot be imported, or settings that the tier lacks.
    """
    where = TIERS.get(name, name)
    module_name, _, class_name = where.partition(":")
    if not class_name:
        raise ConfigError(f"tier {name!r} is not known; there are {', '.join(sorted(TIERS))}, or package.module:Class")
    try:
        make = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"tier {name!r} cannot be imported: {error}") from error
    try:
        tier = make(**settings)
    except TypeError as error:
        raise ConfigError(f"tier {name!r}: {error}") from error
    if not isinstance(tier, Tier):
        raise ConfigError(f"tier {name!r}: {where} is not a tier")
    return tier
