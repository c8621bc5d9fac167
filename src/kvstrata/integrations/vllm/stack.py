"""Primary, tiers, manager and driver of one engine, put together from its settings. Knows nothing of vLLM."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvstrata.config import Config, TierConfig, parse_size
from kvstrata.core.manager import TieringOffloadingManager
from kvstrata.core.tail_room import share_tail_room
from kvstrata.errors import CapacityError, KVStrataError
from kvstrata.integrations.vllm.settings import VllmSettings
from kvstrata.integrations.vllm.trial import try_tier
from kvstrata.layout.groups import Layout
from kvstrata.primary.region import SharedRegion
from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.driver import Driver
from kvstrata.runtime.executor import Signal, ThreadExecutor
from kvstrata.runtime.guard import GuardedTier
from kvstrata.tiers.base import Clock, Tier, TierContext, no_wake
from kvstrata.tiers.registry import make_tier

_log = logging.getLogger(__name__)

TIER_THREADS = 4
YIELDING_THREADS = 2
DRAIN_PAUSE_S = 0.005
SIZES = ("limit", "shared_limit", "min_free", "segment", "segment_bytes", "queue_bytes")
"""Options of tiers that are sizes and may be written as text."""


def slot_alignment(layout: Layout) -> int:
    """Where slots begin: whole pages of the disk for chunks of that size, else whole sectors."""
    return 4096 if min(layout.chunk_bytes) >= 4096 else 512


def layout_tag(layout: Layout, parts: str) -> int:
    """The number that stands for how chunk bytes are laid out."""
    text = f"{layout.tokens_per_chunk} {layout.chunk_bytes} {layout.blocks_per_chunk} {parts}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Stack:
    """What the scheduler side owns. `open` acquires, `close` releases (idempotent).

    `make` makes a tier from its configuration; tests give their own.
    """

    def __init__(
        self,
        layout: Layout,
        settings: VllmSettings,
        namespace: bytes,
        *,
        name: str = "kvstrata-primary",
        tag: int = 0,
        ranks: int = 1,
        events: bool = False,
        clock: Clock | None = None,
        make: Callable[[TierConfig, Layout], Tier] | None = None,
    ) -> None:
        self.layout = layout
        self.settings = settings
        self.clock = SystemClock() if clock is None else clock
        self._namespace = namespace
        self._tag = tag
        self._ranks = ranks
        self._events = events
        self._make = make or tier_of
        self.core_config = dataclasses.replace(
            settings.config.core, capacity_bytes=settings.config.primary.size, alignment=slot_alignment(layout)
        )
        self.region = SharedRegion(settings.config.primary.size, name=name)
        self.tiers: list[GuardedTier] = []
        self.troubles: dict[str, str] = {}
        """Why a configured tier is not used, by its name."""
        self.rates: dict[str, float] = {}
        """Bytes per second that each tier gave back in its trial; 0 where it did not work."""
        self._wake: Callable[[], None] = no_wake
        self.manager: TieringOffloadingManager
        self.driver: Driver[TieringOffloadingManager]
        self._executors: list[ThreadExecutor] = []
        self._opened = False

    def open(self) -> Stack:
        """Back primary, open the tiers, start the driver. A tier that fails is left out and named in `troubles`.

        Raises `CapacityError` if primary cannot be had or is too small for one chunk of each group.
        """
        config = self.settings.config
        least = sum(self.layout.chunk_bytes)
        if config.primary.size < least:
            raise CapacityError(
                f"primary of {config.primary.size} bytes is too small: one chunk of each group takes {least} bytes"
            )
        self.region.open()
        self._opened = True
        made = [tier for entry in config.tiers if (tier := self._tier(entry)) is not None]
        self.core_config, shares = share_tail_room(self.core_config, self.layout.chunk_bytes, made)
        self.tiers = [tier for tier, share in zip(made, shares, strict=True) if self._open_tier(tier, share)]
        self.manager = TieringOffloadingManager(
            self.layout, self.core_config, self.tiers, ranks=self._ranks, events=self._events
        )
        self.driver = Driver(self.manager, self.tiers, self.clock)
        self._wake = self.driver.wake
        return self

    def start(self) -> None:
        """Start the driver's thread."""
        self.driver.start()

    def _tier(self, entry: TierConfig) -> GuardedTier | None:
        try:
            return GuardedTier(self._make(entry, self.layout))
        except KVStrataError:
            raise
        except Exception as error:
            self.troubles[entry.name] = f"{type(error).__name__}: {error}"
            _log.warning("kvstrata: tier %s is not used: %s", entry.name, self.troubles[entry.name])
            return None

    def _open_tier(self, tier: GuardedTier, tail_room: int) -> bool:
        """Open a tier and try it; False if it gives wrong bytes, so that it must not be used."""
        executor = ThreadExecutor(f"kvstrata-{tier.name}", TIER_THREADS)
        yielding = ThreadExecutor(f"kvstrata-{tier.name}-yielding", YIELDING_THREADS, yielding=True)
        self._executors += (executor, yielding)
        tier.open(
            TierContext(
                self.region.view,
                self._namespace,
                self._tag,
                self.clock,
                executor,
                lambda: self._wake(),
                self.region.fileno(),
                tail_room,
                yielding,
            )
        )
        if tier.open_error is not None:
            self.troubles[tier.name] = str(tier.open_error)
            _log.warning("kvstrata: tier %s is not used: %s", tier.name, tier.open_error)
            return True  # it refuses everything by itself
        trial = try_tier(tier, self.region.view, self.layout.chunk_bytes, self.clock, tail_room)
        self.rates[tier.name] = trial.bytes_per_s
        if trial.trouble:
            self.troubles[tier.name] = trial.trouble
            _log.log(
                logging.ERROR if trial.wrong else logging.WARNING, "kvstrata: tier %s %s", tier.name, trial.trouble
            )
        if trial.wrong:
            tier.close()
        return not trial.wrong

    def drain(self, timeout: float) -> bool:
        """Wait until all that was offered is on the tiers; False after `timeout` seconds, also if no clock goes."""
        end, pause = self.clock.monotonic() + timeout, Signal()
        for _ in range(math.ceil(timeout / DRAIN_PAUSE_S) + 1):
            if self.driver.call(lambda manager: manager.idle):
                return True
            left = end - self.clock.monotonic()
            if left <= 0:
                return False
            pause.wait(min(left, DRAIN_PAUSE_S))
        return False

    def close(self, timeout: float = 5.0) -> None:
        """Drain, close tiers, give primary back. Idempotent."""
        if not self._opened:
            return
        self._opened = False
        if hasattr(self, "driver"):
            begun = self.clock.monotonic()
            try:
                self.drain(timeout / 2)
            finally:
                closed = self.driver.close(max(begun + timeout - self.clock.monotonic(), 0.5))
                for executor in self._executors:
                    closed &= executor.close(0.1)
            if not closed:
                return  # something hangs and may still touch primary
        self.region.close()


def tier_of(entry: TierConfig, layout: Layout) -> Tier:
    """A tier that is not open yet, from its configuration."""
    options: dict[str, Any] = tier_options(entry.options, entry.name)
    if entry.type == "disk":
        options.setdefault("largest_chunk", max(layout.chunk_bytes))
    if isinstance(options.get("path"), str):
        with contextlib.suppress(OSError):  # the tier says what is wrong with its folder
            Path(options["path"]).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return make_tier(entry.type, name=entry.name, **options)


def ladder_doubts(config: Config) -> list[str]:
    """One line for each tier that is smaller than what lies above it: everything in it is above it too."""
    lines: list[str] = []
    above, size = "primary", int(config.primary.size)
    for tier in config.tiers:
        limit = tier_options(tier.options, tier.name).get("limit")
        if not isinstance(limit, int):
            continue
        if limit < size:
            lines.append(f"{tier.name} may hold {limit} bytes, less than {above} above it ({size}): it adds little")
        above, size = tier.name, limit
    return lines


def tier_options(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A tier's options with sizes as numbers, and `dir` as what tiers call `path`."""
    table = dict(options)
    if "dir" in table and "path" not in table:
        table["path"] = table.pop("dir")
    for option in SIZES:
        if isinstance(table.get(option), str):
            table[option] = parse_size(table[option], f"tiers.{name}.{option}")
    return table
