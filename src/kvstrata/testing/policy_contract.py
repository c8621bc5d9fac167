"""The suite that every eviction policy must pass.

Subclass `PolicyContract`, say how to make one, and let pytest collect it:

    class TestMyPolicy(PolicyContract):
        def make(self) -> EvictionPolicy:
            return MyPolicy()

Nothing here asks which slot goes first among unrelated ones: that is what policies differ in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvstrata.policy.base import EvictionPolicy


def key_of_slot(slot: int) -> bytes:
    """Some key, always the same for one number."""
    return slot.to_bytes(32, "big") + bytes(4)


class ChainModel:
    """What a policy should hold: slots, who descends from whom, and what is hidden."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}
        self.hidden: set[int] = set()

    def insert(self, slots: Sequence[int], anchor: int = -1) -> None:
        parent = anchor if anchor in self.parent else -1
        for slot in slots:
            self.parent[slot] = parent
            parent = slot

    def remove(self, slots: Iterable[int]) -> None:
        for slot in slots:
            del self.parent[slot]
            self.hidden.discard(slot)
        for slot, parent in self.parent.items():
            if parent not in self.parent:
                self.parent[slot] = -1

    def check(self, policy: EvictionPolicy) -> list[int]:
        """Compares membership and order; returns the victims in order."""
        held = self.parent
        assert len(policy) == len(held)
        assert all(slot in policy for slot in held)
        order = list(policy.victims())
        assert len(set(order)) == len(order), "a slot was offered twice"
        assert set(held) - self.hidden <= set(order) <= set(held)
        at = {slot: place for place, slot in enumerate(order)}
        for slot in held:
            if slot in at and slot not in self.hidden:
                above = self.parent[slot]
                while above >= 0:
                    assert above not in at or at[above] > at[slot], f"{above} was offered before {slot}"
                    above = self.parent[above]
        assert list(policy.victims()) == order, "looking at victims changed their order"
        lists = list(policy.victim_lists(3))
        assert all(lists), "a list of victims is empty"
        assert [slot for some in lists for slot in some] == order, "victims are others some at a time"
        return order


class PolicyContract:
    """Override `make`; every test starts from a new policy."""

    def make(self) -> EvictionPolicy:
        raise NotImplementedError

    def filled(self, *chains: Sequence[int]) -> tuple[EvictionPolicy, ChainModel]:
        policy, model = self.make(), ChainModel()
        for chain in chains:
            policy.insert(chain, keys=[key_of_slot(slot) for slot in chain])
            model.insert(chain)
        return policy, model

    def test_starts_empty(self) -> None:
        policy = self.make()
        assert len(policy) == 0
        assert 0 not in policy
        assert list(policy.victims()) == []

    def test_empty_calls_do_nothing(self) -> None:
        policy, model = self.filled([1, 2])
        policy.insert([])
        for call in (policy.touch, policy.renew, policy.remove, policy.evicted, policy.hide, policy.show):
            call([])
        model.check(policy)

    def test_holds_what_was_inserted_and_nothing_else(self) -> None:
        policy, model = self.filled([3, 1], [7])
        model.check(policy)
        assert all(slot not in policy for slot in (-1, 0, 2, 4, 6, 8, 1000, "1", None))

    def test_tail_before_head(self) -> None:
        policy, _ = self.filled([5, 6, 7, 8])
        assert list(policy.victims()) == [8, 7, 6, 5]

    def test_tail_before_head_when_only_the_tail_is_used(self) -> None:
        policy, model = self.filled([1, 2, 3], [4, 5, 6])
        for _ in range(5):
            policy.touch([3])
            policy.touch([5, 6])
        model.check(policy)

    def test_a_chain_that_continues_in_a_later_insert(self) -> None:
        policy, model = self.filled([1, 2], [8, 9])
        for slots, anchor in (([3, 4], 2), ([10], 9), ([5], 4), ([11, 12], 10)):
            policy.insert(slots, anchor)
            model.insert(slots, anchor)
            model.check(policy)

    def test_chains_that_share_a_head(self) -> None:
        policy, model = self.filled([1, 2])
        for slots, anchor in (([3, 4], 1), ([5, 6], 2), ([7], 1)):
            policy.insert(slots, anchor)
            model.insert(slots, anchor)
        policy.touch([1, 2, 5, 6])
        model.check(policy)

    def test_an_anchor_that_is_not_held_is_ignored(self) -> None:
        policy, model = self.filled([1])
        policy.insert([2, 3], 40)
        model.insert([2, 3], 40)
        model.check(policy)

    def test_evicting_all_in_order_empties_it(self) -> None:
        policy, model = self.filled([1, 2, 3], [4, 5])
        while len(policy):
            victim = next(policy.victims())
            policy.evicted([victim])
            model.remove([victim])
            model.check(policy)

    def test_a_batch_of_victims_leaves_the_rest_in_order(self) -> None:
        policy, model = self.filled([1, 2, 3], [4, 5, 6], [7, 8, 9])
        policy.touch([1, 2, 3])
        order = model.check(policy)
        policy.evicted(order[:4])
        model.remove(order[:4])
        assert set(model.check(policy)) == set(order[4:])

    def test_a_slot_number_is_used_again_without_its_past(self) -> None:
        policy, model = self.filled([1, 2, 3])
        policy.remove([1])
        model.remove([1])
        policy.insert([1])
        model.insert([1])
        model.check(policy)
        policy.remove([2, 3])
        model.remove([2, 3])
        policy.insert([2, 3], 1)
        model.insert([2, 3], 1)
        model.check(policy)

    def test_a_head_may_go_before_its_tail(self) -> None:
        policy, model = self.filled([1, 2, 3, 4])
        policy.remove([1, 3])
        model.remove([1, 3])
        assert set(model.check(policy)) == {2, 4}

    def test_hidden_slots_stay_held_and_come_back(self) -> None:
        policy, model = self.filled([1, 2, 3], [4, 5])
        policy.hide([2, 3, 4])
        model.hidden |= {2, 3, 4}
        model.check(policy)
        policy.show([2, 3, 4])
        model.hidden.clear()
        assert set(model.check(policy)) == {1, 2, 3, 4, 5}

    def test_a_head_is_offered_when_all_its_children_are_hidden(self) -> None:
        policy, model = self.filled([1, 2, 3, 4])
        policy.hide([4])
        model.hidden.add(4)
        order = [slot for slot in model.check(policy) if slot != 4]
        assert order == [3, 2, 1]
        policy.evicted(order)
        model.remove(order)
        policy.show([4])
        model.hidden.clear()
        assert model.check(policy) == [4]

    def test_show_of_what_is_not_hidden_does_nothing(self) -> None:
        policy, model = self.filled([1, 2], [3])
        order = model.check(policy)
        policy.show([1, 2, 3])
        assert model.check(policy) == order

    def test_fresh_is_empty_and_apart(self) -> None:
        policy, model = self.filled([1, 2])
        other = policy.fresh()
        assert type(other) is type(policy)
        assert len(other) == 0
        other.insert([2])
        model.check(policy)

    def test_random_life(self) -> None:
        for seed in range(12):
            self._live(np.random.default_rng(seed))

    def _live(self, rng: np.random.Generator) -> None:
        policy, model = self.filled()
        for _ in range(120):
            held = sorted(model.parent)
            unused = sorted(set(range(24)) - set(held))
            some = rng.permutation(held)[: rng.integers(0, 4)].tolist()
            action = rng.integers(0, 6)
            if action <= 1 and unused:
                slots = rng.permutation(unused)[: rng.integers(1, 6)].tolist()
                anchor = int(rng.choice(held)) if held and rng.integers(0, 2) else -1
                policy.insert(slots, anchor, [key_of_slot(slot) for slot in slots])
                model.insert(slots, anchor)
            elif action == 2:
                policy.touch(some)
            elif action == 3:
                victims = [slot for slot in policy.victims() if slot not in model.hidden][: len(some)]
                policy.evicted(victims)
                model.remove(victims)
            elif action == 4:
                policy.hide(some)
                model.hidden.update(some)
            else:
                shown = sorted(model.hidden)[: rng.integers(0, 6)]
                policy.show(shown)
                model.hidden.difference_update(shown)
                policy.remove(some)
                model.remove(some)
            model.check(policy)
