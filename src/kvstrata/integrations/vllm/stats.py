"""Statistics into vLLM's own metrics: what happened since the last step, as counters that add up over ranks and time.

The names are those of `METRICS`; in Prometheus they are `vllm:kvstrata_NAME`, with the engine's labels.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from kvstrata.core.statistics import Counters
from kvstrata.integrations.vllm.metadata import StepReport

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"

METRICS: Mapping[str, str] = {
    "stored_chunks": "Chunks copied from the accelerator into primary",
    "stored_bytes": "Bytes of those chunks",
    "store_no_room_chunks": "Chunks that were not stored because primary had no room, or everything pinned",
    "loaded_chunks": "Chunks copied from primary to the accelerator",
    "promoted_chunks": "Chunks brought from a tier into primary",
    "promoted_bytes": "Bytes of those chunks",
    "consumed_chunks": "Promoted chunks that a load used",
    "not_taken_chunks": "Promoted chunks that nobody used while they stayed",
    "cancelled_chunks": "Promoted chunks whose request ended before it used them",
    "expired_chunks": "Promoted chunks that came after their request had stopped waiting",
    "failed_chunks": "Promotions that failed",
    "load_failures": "Loads that failed on a rank; their requests are computed",
    "clock_expired": "Requests that stopped waiting because a clock ran out",
    "evicted_chunks": "Chunks evicted from primary",
    "faults": "Errors inside kvstrata; each is in the log once",
    "load_bytes": "Bytes copied by loads, over all ranks",
    "load_seconds": "Seconds that loads took",
    "store_bytes": "Bytes copied by stores, over all ranks",
    "store_seconds": "Seconds that stores took",
}

HIT_TOKENS = "hit_tokens"
"""Tokens restored, by the place that they came from."""


def totals(c: Counters, traffic: StepReport, faults: int) -> dict[str, float]:
    """All counters at this moment."""
    return {
        "stored_chunks": c.stored,
        "stored_bytes": c.stored_bytes,
        "store_no_room_chunks": c.store_no_room,
        "loaded_chunks": c.loaded,
        "promoted_chunks": c.promoted,
        "promoted_bytes": c.promoted_bytes,
        "consumed_chunks": c.consumed,
        "not_taken_chunks": c.not_taken,
        "cancelled_chunks": c.cancelled,
        "expired_chunks": c.expired,
        "failed_chunks": c.failed,
        "load_failures": c.load_failures,
        "clock_expired": c.clock_expired,
        "evicted_chunks": c.evicted,
        "faults": faults,
        "load_bytes": traffic.load_bytes,
        "load_seconds": traffic.load_seconds,
        "store_bytes": traffic.store_bytes,
        "store_seconds": traffic.store_seconds,
    }


class Meter:
    """Gives what counters have gained since it was last read."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def gains(self, now: Mapping[str, float]) -> dict[str, float]:
        """Counters that have grown, and by how much."""
        gained = {name: value - self._last.get(name, 0) for name, value in now.items()}
        self._last = dict(now)
        return {name: value for name, value in gained.items() if value > 0}


class StatsMethods:
    """The methods of vLLM's statistics object; `data` is a dictionary of numbers."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: StatsMethods) -> StatsMethods:
        """Add another one's numbers."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The numbers, for the log."""
        return {name: round(value, 6) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        """Whether there are none."""
        return not self.data


@functools.cache
def stats_class() -> type:
    """The statistics class for vLLM."""
    base = importlib.import_module(_BASE).KVConnectorStats
    return type("KVStrataStats", (StatsMethods, base), {"__module__": __name__})


class PromMethods:
    """The methods of vLLM's Prometheus object."""

    _counter_cls: Any
    _labelnames: list[str]
    per_engine_labelvalues: dict[int, list[object]]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters = {
            name: self._counter_cls(f"vllm:kvstrata_{name}", text, labelnames=self._labelnames)
            for name, text in METRICS.items()
        }
        self._tokens = self._counter_cls(
            f"vllm:kvstrata_{HIT_TOKENS}",
            "Tokens restored, by the place that they came from",
            labelnames=[*self._labelnames, "place"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one step's gains."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
            elif name.startswith(f"{HIT_TOKENS}."):
                self._tokens.labels(*labels, name.partition(".")[2]).inc(value)


@functools.cache
def prom_class() -> type:
    """The Prometheus class for vLLM."""
    base = importlib.import_module(_BASE).KVConnectorPromMetrics
    return type("KVStrataPromMetrics", (PromMethods, base), {"__module__": __name__})
