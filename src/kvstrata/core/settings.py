"""Settings of the core: every number that a scheduling or residency decision depends on.

`config.py` builds a `CoreConfig` from a user's file; tests build it directly. Values are checked once, here, so that
the core never meets an impossible one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstrata.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """What the core may hold, for how long, and how often it tries. Seconds and bytes unless said otherwise.

    Raises `ConfigError`, naming the field, for a value out of range.
    """

    capacity_bytes: int = 0
    """Bytes of primary that the core may divide into slots."""
    alignment: int = 1
    """Every slot starts at a multiple of this many bytes."""
    tail_room: int = 0
    """Every slot has at least this many bytes behind its chunk, for one tier (`tiers.base.TierContext.tail_room`)."""
    policy: str = "lru"
    """Name of the eviction policy of primary."""

    promotion_share: float = 0.5
    """Share of primary that waiting requests may hold together, rounded up to whole chunks."""
    store_reserve: float = 0.1
    """Share of primary that waiting requests must leave to running requests' stores, rounded down to whole chunks."""
    inflight_share: float = 0.25
    """Share of primary that one tier's unfinished loads may cover, at least one chunk; also the bound on overdue slots
    of all tiers together, and on what handed-over cascades of one tier may pin."""

    stall_s: float = 2.0
    """Longest wait of a request without an answered probe or a landed chunk. 0: the job bounds rule instead."""
    total_s: float = 2.0
    """Longest wait of a request in all, on top of its first plan's bytes at `min_rate_bytes_per_s`. 0: the job bounds
    rule instead."""
    tier_stall_s: Mapping[str, float] = field(default_factory=dict)
    """The same for requests that wait for the tier of this name; of several tiers the longest counts."""
    tier_total_s: Mapping[str, float] = field(default_factory=dict)
    """The same for `total_s`. Once there is a plan, only the tiers that it reads count."""
    min_rate_bytes_per_s: float = 1e9
    """Rate at which the bytes of a request's first plan extend `total_s`."""
    silence_s: float = 30.0
    """A waiting request that is not polled for this long gives everything back."""
    poll_gap_s: float = 0.1
    """Most that one gap between two polls counts while a request waits for room."""
    job_idle_s: float = 10.0
    """Longest time of a job or probe without a finished key; then it is overdue."""
    job_total_s: float = 60.0
    """Longest time of a job or probe in all; then it is overdue."""
    max_fetch_rounds: int = 3
    """After this many fetch rounds a request is answered with what is ready in primary."""

    max_verdicts: int = 65_536
    """Most verdicts on failed keys that are remembered; the oldest is forgotten first."""
    max_requests: int = 100_000
    """Most request records that are kept; the longest silent goes first."""
    no_cascade: frozenset[str] = frozenset()
    """Names of tiers that are only read: nothing is cascaded to them."""
    cascade_queue: int = 1024
    """Most chunks that wait for one tier's store; above it a cascade is dropped and counted."""

    breaker_errors: int = 3
    """Consecutive errors that open a tier's breaker."""
    breaker_open_s: float = 1.0
    """How long a breaker stays open the first time; doubles up to `breaker_open_max_s`."""
    breaker_open_max_s: float = 60.0
    """Longest time that a breaker stays open before a trial."""
    backoff_s: float = 1.0
    """First back-off of a key whose transfer failed; doubles up to `backoff_max_s`."""
    backoff_max_s: float = 60.0
    """Longest back-off of one key."""

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str) or not self.policy:
            raise ConfigError(f"policy: expected the name of an eviction policy, got {self.policy!r}")
        if not isinstance(self.no_cascade, frozenset) or not all(isinstance(name, str) for name in self.no_cascade):
            raise ConfigError(f"no_cascade: expected a set of tier names, got {self.no_cascade!r}")
        for name in _SHARES:
            _check_number(name, getattr(self, name), low=0.0, high=1.0)
        for name in _SECONDS:
            _check_number(name, getattr(self, name), low=0.0)
        for name in ("tier_stall_s", "tier_total_s"):
            by_tier = getattr(self, name)
            if not isinstance(by_tier, Mapping):
                raise ConfigError(f"{name}: expected seconds by tier name, got {by_tier!r}")
            for tier, seconds in by_tier.items():
                _check_number(f"{name}.{tier}", seconds, low=0.0)
        for name in _POSITIVE:
            _check_number(name, getattr(self, name), low=0.0, above=True)
        for name, low in _COUNTS.items():
            _check_count(name, getattr(self, name), low)
        for first, last in (("breaker_open_s", "breaker_open_max_s"), ("backoff_s", "backoff_max_s")):
            if getattr(self, first) > getattr(self, last):
                raise ConfigError(f"{first}: {getattr(self, first)} is above {last} ({getattr(self, last)})")


_SHARES = ("promotion_share", "store_reserve", "inflight_share")
_SECONDS = ("stall_s", "total_s", "poll_gap_s")
_POSITIVE = (
    "min_rate_bytes_per_s",
    "silence_s",
    "job_idle_s",
    "job_total_s",
    "breaker_open_s",
    "breaker_open_max_s",
    "backoff_s",
    "backoff_max_s",
)
_COUNTS = {
    "capacity_bytes": 0,
    "alignment": 1,
    "tail_room": 0,
    "max_fetch_rounds": 1,
    "max_verdicts": 1,
    "max_requests": 1,
    "cascade_queue": 1,
    "breaker_errors": 1,
}


def _check_number(name: str, value: object, *, low: float, high: float = math.inf, above: bool = False) -> None:
    """Refuse what is not a finite number in [low, high], or in (low, high] with `above`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name}: expected a finite number, got {value!r}")
    if value < low or (above and value == low):
        raise ConfigError(f"{name}: {value} must be {'above' if above else 'at least'} {low:g}")
    if value > high:
        raise ConfigError(f"{name}: {value} must be at most {high:g}")


def _check_count(name: str, value: object, low: int) -> None:
    """Refuse what is not a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: expected a whole number, got {value!r}")
    if value < low:
        raise ConfigError(f"{name}: {value} must be at least {low}")
