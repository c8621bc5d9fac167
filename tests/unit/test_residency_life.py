"""Residency: states, pins, holds, room, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvstrata.core.residency import Residency, SlotState
from kvstrata.errors import InternalError
from kvstrata.policy.lru import LRU
from kvstrata.policy.s3fifo import S3FIFO


def keys(start: int, count: int) -> list[bytes]:
    return [b"%036d" % number for number in range(start, start + count)]


def stored(residency: Residency, start: int, groups: Sequence[int]) -> list[int]:
    taken = residency.reserve(keys(start, len(groups)), groups)
    assert taken is not None
    residency.publish(taken[0])
    return taken[0].tolist()


def four() -> Residency:
    return Residency(400, [100], LRU())


def test_a_chunk_goes_from_absent_to_ready_and_back() -> None:
    residency = four()
    key = keys(0, 1)[0]
    assert residency.slot_of(key) == -1
    taken = residency.reserve([key], [0])
    assert taken is not None
    slot = int(taken[0][0])
    assert residency.slot_of(key) == slot
    assert residency.states([slot]).tolist() == [SlotState.RESERVED]
    assert (residency.reserved_bytes, residency.resident_bytes, residency.free_bytes) == (100, 0, 300)
    residency.publish([slot])
    assert residency.states([slot]).tolist() == [SlotState.READY]
    assert (residency.reserved_bytes, residency.resident_bytes, residency.free_bytes) == (0, 100, 300)
    assert residency.evict([slot]) == [key]
    assert residency.states([slot]).tolist() == [SlotState.FREE]
    assert residency.key_of(slot) is None
    assert residency.free_bytes == 400
    residency.check()


def test_find_answers_a_batch_in_order() -> None:
    residency = four()
    slots = stored(residency, 0, [0, 0])
    assert residency.find([*keys(0, 3), keys(1, 1)[0]]).tolist() == [*slots, -1, slots[1]]
    assert residency.find([]).tolist() == []
    assert residency.keys_of(slots) == keys(0, 2)
    assert residency.key_of(slots[0]) == keys(0, 1)[0]
    assert residency.key_of(-1) is None
    assert residency.key_of(99) is None
    assert residency.job[slots].tolist() == [0, 0]
    assert residency.tag.tolist() == residency.holds.tolist() == residency.pins.tolist() == [0] * len(residency.group)


def test_released_and_quarantined_slots() -> None:
    residency = four()
    taken = residency.reserve(keys(0, 4), [0] * 4)
    assert taken is not None
    slots = taken[0]
    residency.publish(slots[2:])
    residency.pin(slots[2:3])
    residency.release(slots[:1])
    residency.quarantine(slots[1:])
    assert (residency.quarantined_bytes, residency.free_bytes, residency.stuck_bytes) == (300, 100, 300)
    assert residency.find(keys(0, 4)).tolist() == [-1] * 4
    assert not residency.can_place([0, 0])
    residency.check()
    with pytest.raises(InternalError, match="cannot requite slot 2, which is pinned"):
        residency.requite(slots[1:])
    residency.unpin(slots[2:3])
    residency.requite(slots[1:])
    assert residency.free_bytes == 400
    residency.check()


def test_reserved_is_never_evicted_and_ready_only_without_pins() -> None:
    residency = four()
    taken = residency.reserve(keys(0, 2), [0, 0])
    assert taken is not None
    ready = stored(residency, 2, [0, 0])
    residency.pin(ready[:1])
    assert residency.reserve(keys(10, 2), [0, 0]) is None
    assert residency.statistics().refused == 1
    assert residency.statistics().evicted == 0
    again = residency.reserve(keys(10, 1), [0])
    assert again is not None
    assert again[1] == keys(3, 1)
    residency.check()


def test_kept_slots_survive_one_call_and_are_not_pinned_after_it() -> None:
    residency = four()
    slots = stored(residency, 0, [0])
    stored(residency, 1, [0, 0, 0])
    assert residency.reserve(keys(10, 4), [0] * 4, keep=slots) is None
    taken = residency.reserve(keys(10, 3), [0] * 3, keep=[*slots, *slots])
    assert taken is not None
    assert sorted(taken[1]) == keys(1, 3)
    assert residency.pinned_bytes == 0
    residency.check()
    assert residency.reserve(keys(20, 1), [0]) is not None


def test_a_slot_counts_once_however_many_pin_it() -> None:
    residency = four()
    slots = stored(residency, 0, [0, 0])
    residency.pin([slots[0], slots[0], slots[1]])
    residency.hold([slots[0], slots[0]])
    assert (residency.pinned_bytes, residency.held_bytes, residency.pinned_ready_bytes) == (200, 100, 200)
    assert residency.pins[slots].tolist() == [4, 1]
    assert residency.holds[slots].tolist() == [2, 0]
    residency.check()
    residency.unpin([slots[0], slots[1], slots[0]])
    assert residency.pinned_bytes == 100
    residency.unhold([slots[0], slots[0]])
    assert (residency.pinned_bytes, residency.held_bytes) == (0, 0)
    residency.check()


def test_pins_on_a_reserved_slot_hold_after_publishing() -> None:
    residency = four()
    taken = residency.reserve(keys(0, 4), [0] * 4)
    assert taken is not None
    residency.hold(taken[0][:2])
    assert (residency.stuck_bytes, residency.pinned_ready_bytes) == (400, 0)
    residency.publish(taken[0])
    assert (residency.stuck_bytes, residency.pinned_ready_bytes) == (200, 200)
    assert not residency.can_place([0, 0, 0])
    assert residency.can_place([0, 0])
    assert residency.can_place([0, 0, 0], free_of=taken[0][:1])
    assert residency.can_place({0: 4}, free_of=taken[0])
    assert not residency.can_place({0: 5}, free_of=taken[0])
    residency.check()


def test_empty_calls_do_nothing() -> None:
    residency = four()
    for call in (
        residency.publish,
        residency.release,
        residency.evict,
        residency.quarantine,
        residency.requite,
        residency.pin,
        residency.unpin,
        residency.hold,
        residency.unhold,
        residency.touch,
    ):
        call([])
    taken = residency.reserve([], [])
    assert taken is not None
    assert len(taken[0]) == 0
    residency.check()


def snapshot(residency: Residency) -> object:
    columns = (residency.state, residency.pins, residency.holds, residency.length)
    return residency.statistics(), [column.tolist() for column in columns], dict(residency.index.slots)


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (lambda r, ready, reserved: r.unpin([ready[1], ready[0]]), "unpinned more often"),
        (lambda r, ready, reserved: r.unpin([ready[1], ready[1]]), "unpinned more often"),
        (lambda r, ready, reserved: r.unpin([ready[2]]), "unpinned more often"),
        (lambda r, ready, reserved: r.unhold([ready[1]]), "let go more often"),
        (lambda r, ready, reserved: r.unhold([ready[2], ready[2]]), "let go more often"),
        (lambda r, ready, reserved: r.publish(ready[:1]), "cannot publish slot 0, which is READY"),
        (lambda r, ready, reserved: r.publish([reserved[0], reserved[0]]), "one slot twice"),
        (lambda r, ready, reserved: r.release(ready[:1]), "cannot release"),
        (lambda r, ready, reserved: r.evict(reserved), "cannot evict"),
        (lambda r, ready, reserved: r.evict([ready[0], ready[1]]), "cannot evict slot 1, which is pinned"),
        (lambda r, ready, reserved: r.requite(reserved), "cannot requite"),
        (lambda r, ready, reserved: r.quarantine([-1]), "cannot quarantine slot -1"),
        (lambda r, ready, reserved: r.pin([-1]), "cannot pin"),
        (lambda r, ready, reserved: r.pin([5]), "cannot pin"),
        (lambda r, ready, reserved: r.keys_of([5]), "without a key"),
        (lambda r, ready, reserved: r.reserve(keys(0, 1), [0]), "in primary already"),
        (lambda r, ready, reserved: r.reserve(keys(50, 1) * 2, [0, 0]), "twice"),
        (lambda r, ready, reserved: r.reserve(keys(50, 2), [0]), "2 keys were reserved with 1 groups"),
    ],
)
def test_a_broken_duty_changes_nothing(broken: Callable[[Residency, list[int], list[int]], object], what: str) -> None:
    residency = Residency(600, [100], LRU())
    ready = stored(residency, 0, [0, 0, 0])
    taken = residency.reserve(keys(3, 2), [0, 0])
    assert taken is not None
    spare = residency.reserve(keys(5, 1), [0])
    assert spare is not None
    residency.release(spare[0])
    residency.pin([ready[1]])
    residency.hold([ready[2]])
    before = snapshot(residency)
    with pytest.raises(InternalError, match=what):
        broken(residency, ready, taken[0].tolist())
    assert snapshot(residency) == before
    residency.check()


def test_whole_pages_go_coldest_first() -> None:
    residency = Residency(400, [100, 20], LRU())
    assert residency.geometry.page_bytes == 100
    pages = [stored(residency, start, [1] * 5) for start in (0, 5, 10, 15)]
    residency.touch(pages[0][:1])  # one hot chunk makes its page the hottest
    taken = residency.reserve(keys(100, 1), [0])
    assert taken is not None
    assert set(taken[1]) == set(keys(5, 5))
    residency.publish(taken[0])
    residency.pin(pages[2][4:])  # a pinned chunk keeps its page
    taken = residency.reserve(keys(101, 1), [0])
    assert taken is not None
    assert set(taken[1]) == set(keys(15, 5))
    residency.check()


def test_a_class_with_few_slots_takes_cold_pages_of_others() -> None:
    residency = Residency(100 * 1000, [1000, 100], LRU())
    for start in range(0, 980, 20):
        stored(residency, start, [1] * 20)
    for start in range(2000, 2050):
        stored(residency, start, [0])
    # All but two pages held the small class, and it has not been used since.
    kinds = residency.table.page_class[: residency.table.carved]
    assert np.count_nonzero(kinds == residency.geometry.class_of[0]) * residency.geometry.page_bytes >= 50_000
    assert (residency.find(keys(2000, 50)) >= 0).all()
    residency.check()


def test_a_class_evicts_its_own_when_those_are_colder() -> None:
    residency = Residency(400, [100, 20], LRU())
    stored(residency, 0, [0])
    stored(residency, 1, [0])
    stored(residency, 10, [1] * 10)
    taken = residency.reserve(keys(50, 1), [0])
    assert taken is not None
    assert taken[1] == keys(0, 1)
    residency.publish(taken[0])
    small = residency.find(keys(10, 10))
    residency.touch(residency.find(keys(1, 1)))
    residency.touch(residency.find(keys(50, 1)))
    taken = residency.reserve(keys(51, 1), [0])
    assert taken is not None
    assert len(taken[1]) == 5
    assert set(taken[1]) <= set(keys(10, 10))
    assert (residency.find(keys(10, 10)) >= 0).sum() == len(small) - 5
    residency.check()


def test_fits_by_bytes_but_not_by_shape() -> None:
    residency = Residency(200, [100, 20], LRU())
    small = stored(residency, 0, [1] * 10)
    residency.pin([small[0], small[5]])
    assert residency.capacity_bytes - residency.stuck_bytes == 160
    assert not residency.can_place([0])
    assert residency.reserve(keys(20, 1), [0]) is None
    assert residency.can_place([1] * 8)
    assert not residency.can_place([1] * 9)
    assert residency.can_place([0], free_of=[small[0]])
    residency.check()


def test_a_page_that_another_class_needs_is_left_alone() -> None:
    residency = Residency(200, [100, 20], LRU())
    small = stored(residency, 0, [1] * 5)
    stored(residency, 5, [1] * 4)
    residency.pin(small[:1])
    residency.touch(small)  # the second page is colder, but the large chunk can go nowhere else
    taken = residency.reserve(keys(20, 2), [0, 1])
    assert taken is not None
    assert set(taken[1]) == {*keys(5, 4), *keys(4, 1)}
    residency.check()


def test_own_victims_go_first_until_a_page_of_others_is_colder() -> None:
    residency = Residency(400, [100, 20], LRU())
    stored(residency, 0, [0])
    stored(residency, 10, [1] * 5)
    stored(residency, 1, [0])
    stored(residency, 20, [1] * 5)
    residency.touch(residency.find(keys(20, 5)))
    taken = residency.reserve(keys(50, 2), [0, 0])
    assert taken is not None
    assert set(taken[1]) == {*keys(0, 1), *keys(10, 5)}
    residency.publish(taken[0])
    taken = residency.reserve(keys(60, 3), [0, 0, 0], keep=residency.find(keys(1, 1)))
    assert taken is not None
    assert set(taken[1]) == {*keys(50, 2), *keys(20, 5)}
    residency.check()


def test_chains_of_several_groups_in_one_call_are_apart() -> None:
    residency = Residency(1200, [100, 100], LRU())
    first = residency.reserve(keys(0, 4), [0, 1, 0, 1])
    assert first is not None
    residency.publish(first[0])
    second = residency.reserve(keys(4, 2), [0, 1])
    assert second is not None
    residency.publish(second[0], anchor=int(first[0][2]))
    order = [residency.key_of(slot) for slot in residency.policies[0].victims()]
    expected = keys(0, 6)
    assert order.index(expected[2]) < order.index(expected[0])
    assert order.index(expected[3]) < order.index(expected[1])
    assert order.index(expected[4]) < order.index(expected[2])


@pytest.mark.parametrize("policy", [LRU, S3FIFO])
def test_pins_at_the_cold_end_are_walked_over_once(policy: type[LRU] | type[S3FIFO]) -> None:
    residency = Residency(2000 * 10, [10], policy())
    slots = [stored(residency, start, [0] * 10) for start in range(0, 2000, 10)]
    residency.pin([slot for chain in slots[:150] for slot in chain])
    stored(residency, 5000, [0])
    looked_at = 0
    inner = residency.policies[0]
    original = inner.victim_lists

    def counting(most):  # type: ignore[no-untyped-def]
        nonlocal looked_at
        for some in original(most):
            looked_at += len(some)
            yield some

    inner.victim_lists = counting  # type: ignore[method-assign]
    for start in range(6000, 6300, 10):
        stored(residency, start, [0] * 10)
    assert 30 * 10 <= looked_at < 30 * 50
    residency.unpin([slot for chain in slots[:150] for slot in chain])
    residency.check()
    taken = residency.reserve(keys(9000, 10), [0] * 10)
    assert taken is not None
    assert set(taken[1]) <= set(keys(0, 1500))


def test_evictions_are_told_while_columns_stand() -> None:
    residency = four()
    told: list[tuple[list[int], list[bytes], list[int]]] = []
    residency.on_evict = lambda slots, gone: told.append((slots.tolist(), list(gone), residency.tag[slots].tolist()))
    slots = stored(residency, 0, [0] * 4)
    residency.tag[slots] = 7
    assert residency.reserve(keys(10, 1), [0]) is not None
    residency.evict(slots[:1])
    assert told == [([slots[3]], keys(3, 1), [7]), ([slots[0]], keys(0, 1), [7])]


def test_the_index_is_copied_when_a_third_of_it_is_dead() -> None:
    residency = Residency(3000 * 10, [10], LRU())
    stored(residency, 0, [0] * 3000)
    before = residency.index.slots
    stored(residency, 5000, [0] * 1600)
    assert residency.index.slots is not before
    assert (residency.find(keys(5000, 1600)) >= 0).all()
    residency.check()


def test_check_finds_what_does_not_add_up() -> None:
    def spoiled(spoil: Callable[[Residency], object]) -> Residency:
        residency = Residency(400, [100, 20], LRU())
        slots = stored(residency, 0, [0, 1, 1])
        residency.pin(slots[:1])
        residency.check()
        spoil(residency)
        return residency

    cases: list[tuple[Callable[[Residency], object], str]] = [
        (lambda r: setattr(r, "resident_bytes", 1), "resident bytes: kept 1, counted 140"),
        (lambda r: r.index.slots.pop(keys(0, 1)[0]), "keys in the index"),
        (lambda r: r.policies[1].remove([int(r.find(keys(0, 1))[0])]), "slots in the policy of class 1"),
        (lambda r: r.table.hidden.__setitem__(int(r.find(keys(1, 1))[0]), True), "hidden from eviction"),
        (lambda r: r.table.used_slots.__setitem__(0, 9), "free bytes"),
        (lambda r: r.table.stuck_pages.__setitem__(0, 9), "stuck pages"),
        (lambda r: r.pins.__setitem__(int(r.find(keys(1, 1))[0]), 1), "pinned bytes"),
    ]
    for spoil, what in cases:
        with pytest.raises(InternalError, match=what):
            spoiled(spoil).check()


def test_a_policy_that_forgets_its_slots_is_found_out() -> None:
    class Forgetful(LRU):
        def victim_lists(self, most=64):  # type: ignore[no-untyped-def]
            return iter(())

    residency = Residency(200, [100], Forgetful())
    stored(residency, 0, [0, 0])
    with pytest.raises(InternalError, match="promised and cannot be found"):
        residency.reserve(keys(5, 1), [0])
