"""Statistics, Prometheus counters and cache events, against doubles of vLLM's classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import vllm_kit as kit

from kvstrata.core.messages import CacheEvent, EventKind
from kvstrata.integrations.vllm import events
from kvstrata.integrations.vllm.stats import METRICS, Meter, PromMethods, StatsMethods
from kvstrata.types import make_key


class Counter:
    made: ClassVar[dict[str, Counter]] = {}

    def __init__(self, name: str, text: str, labelnames: list[str]) -> None:
        self.names, self.values = labelnames, {}  # type: ignore[var-annotated]
        Counter.made[name] = self

    def labels(self, *values: object) -> Any:
        assert len(values) == len(self.names)

        def inc(by: float) -> None:
            self.values[values] = self.values.get(values, 0) + by

        return SimpleNamespace(inc=inc)


class Base:
    def __init__(self) -> None:
        self._counter_cls = Counter
        self._labelnames = ["model", "engine"]
        self.per_engine_labelvalues = {0: ["m", "0"], 1: ["m", "1"]}


class Prom(PromMethods, Base):
    """As the plug-in makes it."""


class Stats(StatsMethods):
    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data


def test_gains_are_added_up_per_engine_and_place() -> None:
    prom = Prom()
    prom.observe({"stored_chunks": 3, "hit_tokens.disk": 64, "unheard_of": 1}, 1)
    prom.observe({"stored_chunks": 2}, 1)
    assert Counter.made["vllm:kvstrata_stored_chunks"].values == {("m", "1"): 5}
    assert Counter.made["vllm:kvstrata_hit_tokens"].values == {("m", "1", "disk"): 64}
    assert set(Counter.made) == {f"vllm:kvstrata_{name}" for name in (*METRICS, "hit_tokens")}


def test_statistics_add_up() -> None:
    first = Stats({"a": 1})
    assert first.aggregate(Stats({"a": 2, "b": 0.5})).data == {"a": 3, "b": 0.5}
    assert first.reduce() == {"a": 3, "b": 0.5}
    first.reset()
    assert first.is_empty()


def test_a_meter_tells_only_what_grew() -> None:
    meter = Meter()
    assert meter.gains({"a": 3, "b": 0}) == {"a": 3}
    assert meter.gains({"a": 3, "b": 2}) == {"b": 2}


def test_events_by_group_and_place_without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        BlockStored=lambda **fields: ("stored", fields), BlockRemoved=lambda **fields: ("removed", fields)
    )
    monkeypatch.setattr(events, "_vllm_events", lambda: module)
    monkeypatch.setattr(events, "_published", lambda: lambda hashed: hashed[0])
    shape = kit.shape_of(kit.group(kit.full()), kit.group(kit.sliding(33)), blocks_per_chunk=2)
    a, b = bytes(32), b"\x01" * 32
    made = events.engine_events(
        shape,
        [
            CacheEvent(EventKind.STORED, "primary", (make_key(a, 0), make_key(b, 1))),
            CacheEvent(EventKind.REMOVED, "disk", (make_key(b, 0),)),
        ],
    )
    assert [(kind, f["block_hashes"], f["medium"], f["group_idx"]) for kind, f in made] == [
        ("stored", [0], "CPU", 0),
        ("stored", [1], "CPU", 1),
        ("removed", [1], "DISK", 0),
    ]
    assert made[0][1]["token_ids"] == []
    assert made[0][1]["block_size"] == 32
