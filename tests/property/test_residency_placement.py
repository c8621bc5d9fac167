"""Residency against brute force and against a plain dict, on tiny primaries.

The brute force gives every page that could be emptied to every class in turn; the model is a dict of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstrata.core.residency import Residency, SlotState
from kvstrata.policy.registry import make_policy

SIZES = (10, 16, 30, 40, 100)


def brute_force_fits(residency: Residency, groups: list[int], keep: set[int], loose: set[int]) -> bool:
    """Whether some gift of the flexible pages to classes has room, by the columns alone."""
    geometry = residency.geometry
    needs = [0] * len(geometry.classes)
    for group in groups:
        needs[geometry.class_of[group]] += 1
    stuck_in: dict[int, int] = {}
    kind_of: dict[int, int] = {}
    for slot in np.flatnonzero(residency.state != SlotState.FREE).tolist():
        page = int(residency.offset[slot]) // geometry.page_bytes
        kind_of[page] = geometry.class_of[int(residency.group[slot])]
        evictable = residency.state[slot] == SlotState.READY and not residency.pins[slot] and slot not in keep
        stuck_in[page] = stuck_in.get(page, 0) + (not evictable and slot not in loose)
    room = [0] * len(geometry.classes)
    flexible = geometry.pages
    for page, stuck in stuck_in.items():
        if stuck:
            flexible -= 1
            room[kind_of[page]] += geometry.classes[kind_of[page]].per_page - stuck
    for gift in product(range(len(geometry.classes)), repeat=min(flexible, len(groups))):
        given_room = list(room)
        for kind in gift:
            given_room[kind] += geometry.classes[kind].per_page
        if all(have >= need for have, need in zip(given_room, needs, strict=True)):
            return True
    return False


@dataclass
class Chunk:
    """What the model knows of one chunk."""

    slot: int
    group: int
    ready: bool = False
    pins: int = 0
    holds: int = 0


@dataclass
class Model:
    """Residency and its twin; every step is one call on both."""

    residency: Residency
    rng: np.random.Generator
    chunks: dict[bytes, Chunk] = field(default_factory=dict)
    quarantined: dict[int, Chunk] = field(default_factory=dict)
    made: int = 0

    def pick(self, keys: list[bytes], most: int) -> list[bytes]:
        return [keys[i] for i in self.rng.permutation(len(keys))[: self.rng.integers(0, most + 1)]]

    def slots(self, keys: list[bytes]) -> list[int]:
        return [self.chunks[key].slot for key in keys]

    def ready(self, pinned: bool | None = None) -> list[bytes]:
        return [k for k, c in self.chunks.items() if c.ready and pinned in (None, c.pins > 0)]

    def reserved(self) -> list[bytes]:
        return [k for k, c in self.chunks.items() if not c.ready and not c.pins]

    def step_reserve(self) -> None:
        residency = self.residency
        count = int(self.rng.integers(1, 7))
        groups = self.rng.integers(0, len(residency.geometry.lengths), count).tolist()
        keep = self.slots(self.pick(list(self.chunks), 3))
        loose = self.slots(self.pick(list(self.chunks), 3))
        fits = brute_force_fits(residency, groups, set(), set())
        assert residency.can_place(groups) == fits
        assert residency.can_place(groups, free_of=loose) == brute_force_fits(residency, groups, set(), set(loose))
        counts = {group: groups.count(group) for group in groups}
        assert residency.can_place(counts) == fits
        keys = [b"key %06d" % (self.made + i) for i in range(count)]
        self.made += count
        fits = brute_force_fits(residency, groups, set(keep), set())
        before = residency.state.tobytes()
        taken = residency.reserve(keys, groups, keep=keep)
        assert (taken is not None) == fits
        if taken is None:
            assert residency.state.tobytes() == before
            return
        kept = set(keep)
        for key in taken[1]:
            gone = self.chunks.pop(key)
            assert gone.ready
            assert not gone.pins
            assert gone.slot not in kept
        for key, slot, group in zip(keys, taken[0].tolist(), groups, strict=True):
            self.chunks[key] = Chunk(slot, group)

    def step_publish(self) -> None:
        chosen = self.pick([k for k, c in self.chunks.items() if not c.ready], 4)
        above = self.ready()
        anchor = self.chunks[above[0]].slot if above and self.rng.integers(0, 2) else -1
        self.residency.publish(self.slots(chosen), anchor)
        for key in chosen:
            self.chunks[key].ready = True

    def step_pin(self) -> None:
        keys = self.pick(list(self.chunks), 4)
        keys += keys[:1]
        hold = bool(self.rng.integers(0, 2))
        (self.residency.hold if hold else self.residency.pin)(self.slots(keys))
        for key in keys:
            self.chunks[key].pins += 1
            self.chunks[key].holds += hold

    def step_unpin(self) -> None:
        held = [k for k, c in self.chunks.items() if c.holds]
        plain = [k for k, c in self.chunks.items() if c.pins > c.holds]
        if self.rng.integers(0, 2):
            keys = self.pick(held, 5)
            self.residency.unhold(self.slots(keys))
            for key in keys:
                self.chunks[key].holds -= 1
                self.chunks[key].pins -= 1
        else:
            keys = self.pick(plain, 5)
            self.residency.unpin(self.slots(keys))
            for key in keys:
                self.chunks[key].pins -= 1

    def step_leave(self) -> None:
        keys = self.pick(self.ready(pinned=False), 2)
        assert self.residency.evict(self.slots(keys)) == self._by_class(keys)
        for key in keys:
            del self.chunks[key]
        keys = self.pick(self.reserved(), 2)
        self.residency.release(self.slots(keys))
        for key in keys:
            del self.chunks[key]

    def _by_class(self, keys: list[bytes]) -> list[bytes]:
        return sorted(keys, key=lambda key: self.residency.geometry.class_of[self.chunks[key].group])

    def step_quarantine(self) -> None:
        keys = self.pick(list(self.chunks), 2)
        self.residency.quarantine(self.slots(keys))
        for key in keys:
            chunk = self.chunks.pop(key)
            self.quarantined[chunk.slot] = chunk
        loose = [slot for slot, chunk in self.quarantined.items() if not chunk.pins][:2]
        self.residency.requite(loose)
        for slot in loose:
            del self.quarantined[slot]
        for slot, chunk in self.quarantined.items():
            self.residency.unhold([slot] * chunk.holds)
            self.residency.unpin([slot] * (chunk.pins - chunk.holds))
            chunk.pins = chunk.holds = 0

    def step_touch(self) -> None:
        self.residency.touch(self.slots(self.pick(list(self.chunks), 5)))

    def compare(self) -> None:
        residency = self.residency
        residency.check()
        keys = list(self.chunks)
        assert residency.find(keys).tolist() == self.slots(keys)
        assert len(residency.index) == len(keys)
        for chunk in self.chunks.values():
            expected = SlotState.READY if chunk.ready else SlotState.RESERVED
            assert residency.state[chunk.slot] == expected
            assert (residency.pins[chunk.slot], residency.holds[chunk.slot]) == (chunk.pins, chunk.holds)
            assert residency.group[chunk.slot] == chunk.group
        live = sorted(
            (int(residency.offset[c.slot]), residency.geometry.lengths[c.group])
            for c in [*self.chunks.values(), *self.quarantined.values()]
        )
        end = 0
        for offset, length in live:
            assert offset >= end, "two chunks share bytes"
            end = offset + length
        assert end <= residency.geometry.region_bytes <= residency.capacity_bytes
        statistics = residency.statistics()
        parts = (
            statistics.free_bytes,
            statistics.reserved_bytes,
            statistics.resident_bytes,
            statistics.quarantined_bytes,
            statistics.waste_bytes,
        )
        assert sum(parts) == statistics.capacity_bytes
        assert min(parts) >= 0


STEPS = (
    Model.step_reserve,
    Model.step_reserve,
    Model.step_reserve,
    Model.step_publish,
    Model.step_publish,
    Model.step_pin,
    Model.step_unpin,
    Model.step_leave,
    Model.step_quarantine,
    Model.step_touch,
)


@settings(max_examples=120, derandomize=True, deadline=None)
@given(
    sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=4),
    chunks=st.integers(1, 6),
    extra=st.integers(0, 60),
    policy=st.sampled_from(["lru", "s3fifo"]),
    seed=st.integers(0, 1 << 32),
    steps=st.lists(st.sampled_from(STEPS), min_size=10, max_size=50),
)
@example(sizes=[100, 10], chunks=1, extra=0, policy="lru", seed=1, steps=list(STEPS) * 8)
@example(sizes=[10, 16, 30, 100], chunks=4, extra=9, policy="s3fifo", seed=2, steps=list(STEPS) * 12)
def test_every_call_equals_brute_force_and_the_model(
    sizes: list[int], chunks: int, extra: int, policy: str, seed: int, steps: list
) -> None:
    residency = Residency(max(sizes) * chunks + extra, sizes, make_policy(policy))
    model = Model(residency, np.random.default_rng(seed))
    for step in steps:
        step(model)
        model.compare()


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=3),
    chunks=st.integers(1, 5),
    seed=st.integers(0, 1 << 32),
)
def test_an_idle_primary_can_give_all_of_itself_to_any_class(sizes: list[int], chunks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    residency = Residency(max(sizes) * chunks, sizes, make_policy("lru"))
    made = 0
    for _ in range(12):
        group = int(rng.integers(0, len(sizes)))
        count = residency.geometry.pages * residency.geometry.classes[residency.geometry.class_of[group]].per_page
        keys = [b"key %06d" % (made + i) for i in range(count)]
        made += count
        assert not residency.can_place([group] * (count + 1))
        taken = residency.reserve(keys, [group] * count)
        assert taken is not None
        residency.publish(taken[0])
        residency.check()
