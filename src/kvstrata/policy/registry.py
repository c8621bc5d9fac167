"""Eviction policies by name, as configuration names them."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.errors import ConfigError
from kvstrata.policy.base import EvictionPolicy
from kvstrata.policy.lru import LRU
from kvstrata.policy.s3fifo import S3FIFO

PolicyFactory = Callable[[], EvictionPolicy]

_FACTORIES: dict[str, PolicyFactory] = {"lru": LRU, "s3fifo": S3FIFO}


def policy_names() -> tuple[str, ...]:
    """The known names, sorted."""
    return tuple(sorted(_FACTORIES))


def make_policy(name: str) -> EvictionPolicy:
    """A new policy; an unknown name is a `ConfigError` that lists the known ones."""
    factory = _FACTORIES.get(name)
    if factory is None:
        raise ConfigError(f"unknown eviction policy {name!r}; known: {', '.join(policy_names())}")
    return factory()


def register_policy(name: str, factory: PolicyFactory) -> None:
    """Adds a policy from outside; a name that is taken is refused."""
    if name in _FACTORIES:
        raise ConfigError(f"eviction policy {name!r} is registered already")
    _FACTORIES[name] = factory
