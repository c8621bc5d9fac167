"""The index does what a dictionary does, whatever is inserted and deleted."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.testing.tier_harness import chunk_keys
from kvstrata.tiers.disk.index import Index, hashes_of, words_of
from kvstrata.tiers.disk.planning import (
    batch_room,
    even_batches,
    even_parts,
    even_size,
    even_slots,
    is_straight,
    packed_place,
    part_of_slots,
    places_of,
    plan_batches,
    plan_units,
)
from kvstrata.tiers.disk.tasks import ReadEven, WriteBatch
from kvstrata.tiers.disk.work import BATCH_BYTES, UNIT_BYTES

KEYS = chunk_keys(120)
MIB = 1 << 20


ACTIONS = st.sampled_from(["insert", "reserve", "reserve_absent", "fill", "delete"])


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.tuples(ACTIONS, st.sets(st.integers(0, 119), max_size=40)), max_size=25))
def test_the_index_equals_a_dictionary(steps: list[tuple[str, set[int]]]) -> None:
    """A key has the mark of its record, or is being written (None)."""
    index, twin = Index(16), dict[bytes, int | None]()
    number = 0
    for action, picked in steps:
        keys = [KEYS[n] for n in sorted(picked)]
        absent = [key for key in keys if key not in twin]
        marks = list(range(number, number + len(keys)))
        number += len(keys)
        words, digests = words_of(absent), np.zeros((len(keys), 2), np.uint64)
        if action == "insert":
            index.insert(words, digests[: len(absent)], 3, marks[: len(absent)], 7)
            twin.update(zip(absent, marks, strict=False))
        elif action == "reserve":
            index.reserve(words, 7)
            twin.update(dict.fromkeys(absent))
        elif action == "reserve_absent" and keys:
            rows = index.reserve_absent(words_of(keys), 7, hashes_of(words_of(keys)))
            assert (rows is None) == (len(absent) < len(keys))
            if rows is not None:
                assert index.find(words_of(keys)).tolist() == rows.tolist()
                twin.update(dict.fromkeys(keys))
        elif action == "fill":
            keys = [key for key in keys if twin.get(key, 0) is None]
            rows = index.find(words_of(keys))
            index.fill(rows, np.full(len(keys), 3, np.int32), marks[: len(keys)], digests[: len(keys)])
            twin.update(zip(keys, marks, strict=False))
        else:
            rows = index.find(words_of(keys))
            index.delete(rows[rows >= 0])
            for key in keys:
                twin.pop(key, None)
        found, held = index.find(words_of(KEYS)), index.find_held(words_of(KEYS))
        records = {key: mark for key, mark in twin.items() if mark is not None}
        assert {KEYS[n] for n, row in enumerate(found) if row >= 0} == set(twin)
        assert {KEYS[n]: int(index.offset[row]) for n, row in enumerate(held) if row >= 0} == records
        assert (len(index), index.pending, index.taken) == (len(records), len(twin) - len(records), len(twin))
        assert sorted(index.offset[index.live_rows()].tolist()) == sorted(records.values())
        deleted = index._table == 1
        assert int(deleted.sum()) == index._deleted
        assert not (deleted & (np.roll(index._table, -1) == 0)).any()  # it would be kept for nothing


SIZES = st.one_of(st.integers(0, 9000), st.sampled_from([512, 4096, 8192, 32_768, 262_144, UNIT_BYTES, 3 * UNIT_BYTES]))


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.lists(SIZES, min_size=1, max_size=150), st.integers(0, 3))
def test_batches_hold_every_chunk_once_and_stay_in_bounds(sizes: list[int], skew: int) -> None:
    largest = 4 * UNIT_BYTES
    lengths = np.array(sizes, np.int64)
    memory = np.arange(len(sizes), dtype=np.int64) * 4 * UNIT_BYTES + skew
    plans = plan_batches(np.arange(len(sizes)), memory, lengths, largest)
    assert sorted(pick for plan in plans for pick in plan.picks) == list(range(len(sizes)))
    for plan in plans:
        assert len(plan.picks) <= 64
        assert plan.span % 4096 == 0
        assert plan.span <= largest
        end = 4096
        for pick, place in zip(plan.picks, plan.places, strict=True):
            assert place >= end
            assert place == packed_place(end, sizes[pick]) or plan.straight
            end = place + sizes[pick]
            if plan.straight:
                assert place % 512 == 0
                assert sizes[pick] % 512 == 0
        assert end <= plan.span
        assert plan.span <= BATCH_BYTES + 8192 or len(plan.picks) == 1


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(1, 150), st.sampled_from([4096, 32_768, 262_144, 9 * UNIT_BYTES]), st.integers(3, 1 << 18))
def test_even_batches_leave_little_of_a_segment_unused(count: int, size: int, segment_blocks: int) -> None:
    room = batch_room(segment_blocks * 4096)
    assert room <= max(BATCH_BYTES, segment_blocks * 4096 // 64)
    plans = even_batches(range(count), size, room)
    assert [pick for plan in plans for pick in plan.picks] == list(range(count))
    for plan in plans:
        assert len(plan.picks) <= 64
        assert len(plan.picks) * size <= room or len(plan.picks) == 1
        assert list(plan.places) == [4096 + at * size for at in range(len(plan.picks))]
        assert plan.span == 4096 + len(plan.picks) * size


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    st.lists(st.sampled_from([512, 4096, 5000, 32_768]), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from([0, 0, 0, 400, 412])), min_size=1, max_size=12),
    st.booleans(),
    st.sampled_from([0, 0, 100, 512]),
    st.tuples(st.integers(0, 11), st.integers(1, 12)),
)
def test_slots_of_one_size_are_told_by_the_first_one_if_they_follow_each_other(
    sizes: list[int], spots: list[tuple[int, int]], follow: bool, address: int, cut: tuple[int, int]
) -> None:
    count, size = len(spots), sizes[0]
    lengths = (sizes * count)[:count]
    offsets = [(spots[0][0] + at) * size if follow else spots[at][0] * size + spots[at][1] for at in range(count)]
    assert even_size(lengths) == (size if len(set(lengths)) == 1 else 0)
    slots = even_slots(offsets, size, address)
    straight = is_straight(np.array(offsets) + address, np.array([size] * count)).all()
    assert bool(slots) == straight or (address % 512 and not slots)
    if not slots:
        return
    begin, end = min(cut[0], count - 1), min(max(cut[1], cut[0] + 1), count)
    for first, last in ((0, count), (begin, end)):
        part, run = part_of_slots(slots, size, first, last), last - first
        assert follow <= (len(part) == 1)
        batch = WriteBatch(1, 0, b"", 0, 0, 0, 1, b"", 0, 0, bytes(36 * run), [], [size], part, b"", True)
        assert batch.slots([size] * run) == offsets[first:last]
        units = ReadEven(9, 0, size, list(range(0, run * size, size)), part, bytes(16 * run), True).units(UNIT_BYTES)
        assert [at for unit in units for at in unit.memory] == offsets[first:last]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 70), st.sets(st.integers(0, 69))), min_size=1, max_size=6))
def test_the_places_of_several_batches_are_those_of_each(batches: list[tuple[bool, int, set[int]]]) -> None:
    plans, wanted = [], []
    for number, (even, count, left) in enumerate(batches):
        made = (
            even_batches(range(count), 4096, 1 << 20)
            if even
            else plan_batches(np.arange(count), np.zeros(count, np.int64), np.full(count, 700), 1 << 20)
        )
        plan = made[0]
        alive = sorted(left.intersection(range(len(plan.picks))))
        if alive:
            part = plan.part(alive)
            assert [list(part.picks), list(part.places)] == [
                [plan.picks[at] for at in alive],
                [plan.places[at] for at in alive],
            ]
            plan = part
        plans.append(plan)
        wanted += [number * MIB + place for place in plan.places]
    assert places_of(plans, [number * MIB for number in range(len(plans))]).tolist() == wanted


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), SIZES), min_size=1, max_size=60), st.integers(0, 1))
def test_units_hold_every_record_once_and_only_neighbours(rows: list[tuple[int, int, int]], skew: int) -> None:
    segments = np.array([row[0] for row in rows], np.int64)
    places = np.array([8192 + row[1] * 4096 for row in rows], np.int64)
    lengths = np.array([row[2] for row in rows], np.int64)
    memory = np.arange(len(rows), dtype=np.int64) * 4 * UNIT_BYTES + skew * 8
    plans = plan_units(segments, places, lengths, memory)
    assert sorted(pick for plan in plans for pick in plan.picks) == list(range(len(rows)))
    for plan in plans:
        assert {int(segments[pick]) for pick in plan.picks} == {plan.segment}
        total = sum(int(lengths[pick]) for pick in plan.picks)
        assert total <= UNIT_BYTES or len(plan.picks) == 1
        for before, after in zip(plan.picks, plan.picks[1:], strict=False):
            gap = int(places[after] - places[before] - lengths[before])
            assert gap == 0 if plan.straight else 0 <= gap < 512


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), min_size=1, max_size=60),
    st.booleans(),
    st.sampled_from([4096, 262_144, 3 * UNIT_BYTES]),
    st.integers(1, 20),
)
def test_even_loads_hold_every_record_once_in_order_and_only_of_one_segment(
    rows: list[tuple[int, int]], ordered: bool, size: int, most: int
) -> None:
    if ordered:
        rows = sorted(rows)
    homes, places = [row[0] for row in rows], [4096 + row[1] * size for row in rows]
    parts = even_parts(homes, places, most)
    if parts is None:
        assert not ordered
        return
    assert [at for begin, end in parts for at in range(begin, end)] == list(range(len(rows)))
    for begin, end in parts:
        assert end - begin <= most
        assert len(set(homes[begin:end])) == 1
        task = ReadEven(9, 0, size, places[begin:end], list(range(begin, end)), bytes(range(16)) * (end - begin), True)
        units = task.units(UNIT_BYTES)
        assert [unit.first + index for unit in units for index in range(len(unit.places))] == list(range(end - begin))
        assert [at for unit in units for at in unit.places] == task.places
        assert [at for unit in units for at in unit.memory] == task.memory
        assert b"".join(unit.digests for unit in units) == task.digests
        for unit in units:
            assert sum(unit.lengths) <= UNIT_BYTES or len(unit.places) == 1
            assert unit.places == list(range(unit.places[0], unit.places[0] + size * len(unit.places), size))
