"""The cost of the core in operations, not seconds: what a poll, a resolve, a store and a load may look at.

Counted are Python calls inside the core (with what it calls of layout and policy), calls of C functions (numpy,
dictionaries, lists) and keys handed to the index. Limits are a quarter above what was counted when they were set.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from kvstrata.bench.resolve import Engine, Prepared
from kvstrata.bench.steady import SteadyMix
from kvstrata.bench.tiers import IndexTier
from kvstrata.bench.workloads import Workload
from kvstrata.core.grants import Grants
from kvstrata.core.index import KeyIndex
from kvstrata.core.manager import TieringOffloadingManager
from kvstrata.core.messages import Answer
from kvstrata.core.residency import Residency
from kvstrata.types import OffloadKey

BATCH = 64


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Python and C calls made inside the `with`."""
    calls: Counter[str] = Counter()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            calls[event] += 1

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def calls_of(work: Callable[[], object]) -> int:
    with counting() as calls:
        work()
    return calls["call"] + calls["c_call"]


@contextmanager
def keys_looked_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Keys handed to the index of primary."""
    looked: Counter[str] = Counter()
    find, lacks = KeyIndex.find, KeyIndex.lacks

    def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
        def look(self: KeyIndex, keys: Any) -> Any:
            looked["keys"] += len(keys)
            return plain(self, keys)

        return look

    with monkeypatch.context() as patch:
        patch.setattr(KeyIndex, "find", counted(find))
        patch.setattr(KeyIndex, "lacks", counted(lacks))
        yield looked


def waiting(requests: int, tokens: int) -> Engine:
    """Requests whose fetches are submitted and do not end."""
    engine = Engine(Prepared(Workload("plain", "all", requests, tokens)), sync_probe=True)
    engine.step_waiting()
    assert len(engine.waiting) == requests
    return engine


def step_calls(engine: Engine) -> int:
    engine.step(engine.names)
    return calls_of(lambda: engine.step(engine.names))


# -- a waiting step


def test_a_waiting_step_costs_the_same_whatever_the_length_of_the_prompts() -> None:
    assert step_calls(waiting(10, 1024)) == step_calls(waiting(10, 16_384))


def test_a_waiting_step_grows_by_a_few_calls_per_request() -> None:
    few, many = step_calls(waiting(20, 512)), step_calls(waiting(220, 512))
    assert (many - few) / 200 <= 5


def test_a_waiting_step_looks_up_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = waiting(20, 1024)
    with keys_looked_up(monkeypatch) as looked:
        engine.step(engine.names)
    assert not looked


def test_a_poll_that_scans_its_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard can fail: a poll that looks at every key of its request, as peers do."""
    plain = TieringOffloadingManager.standing

    def scans(self: TieringOffloadingManager, request_id: str, computed: int, total: int) -> Answer | None:
        for key in self._core.requests.require(request_id).keys[0]:
            self.residency.slot_of(key)
        return plain(self, request_id, computed, total)

    monkeypatch.setattr(TieringOffloadingManager, "standing", scans)
    assert step_calls(waiting(10, 1024)) != step_calls(waiting(10, 16_384))


def test_statistics_do_not_grow_with_requests() -> None:
    few, many = waiting(2, 512), waiting(60, 512)
    assert calls_of(few.core.statistics) == calls_of(many.core.statistics)


# -- a first resolve


@pytest.mark.parametrize("layout", ["plain", "sliding", "five-to-one"])
def test_a_first_resolve_looks_up_each_key_once_at_most(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = Prepared(Workload(layout, "all", 1, 16_384))
    engine = Engine(prepared, sync_probe=True)
    with keys_looked_up(monkeypatch) as looked:
        engine.step_waiting()
    assert looked["keys"] <= prepared.workload.keys_per_request


def resolve_calls(tokens: int, presence: str = "all") -> int:
    engine = Engine(Prepared(Workload("sliding", presence, 1, tokens)), sync_probe=True)
    return calls_of(engine.step_waiting)


def test_a_first_resolve_makes_no_call_per_key() -> None:
    short, long = resolve_calls(16_384), resolve_calls(65_536)
    assert (long - short) / (2 * (65_536 - 16_384) // 16) <= 0.1


def test_a_first_resolve_is_cheap_also_for_few_keys() -> None:
    assert resolve_calls(2048) <= 1000


@pytest.mark.parametrize("layout", ["sliding", "mla-windows", "recurrent"])
def test_a_tier_is_asked_once_for_the_chunks_of_all_small_windows(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Prepared(Workload(layout, "all", 1, 8192)), sync_probe=True)
    asked: list[int] = []
    probe = IndexTier.probe

    def counted(self: IndexTier, keys: Sequence[OffloadKey]) -> Any:
        asked.append(len(keys))
        return probe(self, keys)

    monkeypatch.setattr(IndexTier, "probe", counted)
    engine.step_waiting()
    assert len(asked) == 2  # the prefix group, and what its end leaves of all the others
    assert sum(asked) == engine.core.statistics().tiers["index"].probed


# -- stores and loads at a full primary


def mix(slots: int, tiers: int = 2) -> SteadyMix:
    """A steady mix whose primary is full."""
    steady = SteadyMix(slots, tiers, BATCH, "lru")
    steady.run(4)
    return steady


def store_calls(steady: SteadyMix) -> int:
    keys = [steady.next_keys() for _ in range(3)]
    steady.store_batch(keys[0])
    return min(calls_of(lambda: steady.store_batch(keys[1])), calls_of(lambda: steady.store_batch(keys[2])))


def load_calls(steady: SteadyMix) -> int:
    keys = steady.next_keys()
    steady.store_batch(keys)
    steady.load_batch(keys)
    return calls_of(lambda: steady.load_batch(keys))


def test_a_store_costs_the_same_whatever_the_slots() -> None:
    small, large = store_calls(mix(1024)), store_calls(mix(16_384))
    assert abs(small - large) <= 0.1 * small


def test_the_calls_of_a_store_and_of_each_further_tier() -> None:
    one, two, three = (store_calls(mix(2048, tiers)) for tiers in (1, 2, 3))
    assert two / BATCH <= 13.2
    assert (three - two) / BATCH <= 3
    assert abs((three - two) - (two - one)) <= 0.1 * one


def test_the_calls_of_a_load() -> None:
    assert load_calls(mix(2048)) / BATCH <= 7.3


def test_what_a_batch_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    steady = mix(2048, tiers=2)
    keys = steady.next_keys()
    with keys_looked_up(monkeypatch) as looked:
        steady.store_batch(keys)
    assert looked["keys"] == BATCH  # is it there; tiers, and the ended request, know where it lies
    with keys_looked_up(monkeypatch) as looked:
        steady.load_batch(keys)
    assert looked["keys"] == BATCH  # resolve; what the ended request leaves is what its load read


def test_a_store_that_scans_the_slots_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard can fail: a store that walks over all slots to find room."""
    plain = Residency.reserve

    def scans(self: Residency, *args: Any, **kwargs: Any) -> object:
        for slot in range(self.table.rows):
            self.key_of(slot)
        return plain(self, *args, **kwargs)

    small, large = mix(1024), mix(4096)
    monkeypatch.setattr(Residency, "reserve", scans)
    assert abs(store_calls(small) - store_calls(large)) > 0.1 * store_calls(small)


def test_a_plan_that_is_made_again_at_placing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard can fail: placing that looks its keys up once more."""
    plain = Grants._chunks

    def again(self: Grants, request):  # type: ignore[no-untyped-def]
        request.found = None
        return plain(self, request)

    monkeypatch.setattr(Grants, "_chunks", again)
    prepared = Prepared(Workload("plain", "all", 1, 16_384))
    engine = Engine(prepared, sync_probe=True)
    with keys_looked_up(monkeypatch) as looked:
        engine.step_waiting()
    assert looked["keys"] > prepared.workload.keys_per_request


# -- memory


def test_objects_that_a_waiting_request_adds_do_not_grow_with_its_keys() -> None:
    """No object per key: what the collector tracks and the tables of the core stay as many."""

    def tables(engine: Engine) -> int:
        (record,) = engine.core._core.requests.values()
        waits = engine.core._promotions.waiters
        return len(waits._crowds) + len(record.answers) + len(record.key_slots) + len(engine.core._presence.probes)

    assert tables(waiting(1, 1024)) == tables(waiting(1, 32_768)) == 1
