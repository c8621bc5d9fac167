"""A policy that works on batches orders and forgets exactly as one that goes slot by slot."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from kvstrata.policy.lru import LRU


class OnePiece(LRU):
    wide = 1


class Mixed(LRU):
    wide = 4


class SlotBySlot(LRU):
    wide = 1 << 30


class Walk:
    """The same calls to all of them, drawn from a seed; `held` in no order."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.policies = [SlotBySlot(), OnePiece(), Mixed()]
        self.held: list[int] = []
        self.free = list(range(40))
        self.chains: list[list[int]] = []

    def insert(self) -> None:
        count = min(len(self.free), self.draw.randint(1, 9))
        if self.draw.random() < 0.5:
            self.draw.shuffle(self.free)
        new = [self.free.pop(0) for _ in range(count)]
        anchor = self.draw.choice(self.held) if self.held and self.draw.random() < 0.4 else -1
        for policy in self.policies:
            policy.insert(new, anchor)
        self.held += new
        self.chains.append(new)

    def touch(self) -> None:
        some = [slot for slot in self.draw.choice(self.chains) if slot in self.held]
        if self.draw.random() < 0.4:
            some = self.some()
        for policy in self.policies:
            policy.touch(some)

    def evict(self) -> None:
        count = self.draw.randint(1, len(self.held))
        found = [list(islice(policy.victims(), count)) for policy in self.policies]
        assert found[1:] == found[:-1]
        gone = found[0] if self.draw.random() < 0.7 else self.some()
        if self.draw.random() < 0.3:  # what was found is out of date
            self.touch()
        for policy in self.policies:
            policy.evicted(gone)
        self.held = [slot for slot in self.held if slot not in gone]
        self.free += gone

    def hide(self) -> None:
        some, hidden = self.some(), self.draw.random() < 0.5
        for policy in self.policies:
            (policy.hide if hidden else policy.show)(some)

    def some(self) -> list[int]:
        return self.draw.sample(self.held, self.draw.randint(1, len(self.held)))

    def step(self) -> None:
        if not self.held:
            self.chains.clear()
        moves = [self.insert] if self.free else []
        moves += [self.touch, self.evict, self.hide] if self.held else []
        self.draw.choice(moves)()

    def check(self) -> None:
        orders = [list(policy.victims()) for policy in self.policies]
        assert orders[1:] == orders[:-1]
        first = self.policies[0]
        for policy in self.policies:
            assert len(policy) == len(self.held)
            assert bytes(policy._where) == bytes(first._where)
            assert list(policy._children) == list(first._children)
            assert list(policy._parent) == list(first._parent)


@pytest.mark.parametrize("seed", range(150))
def test_batches_and_single_slots_give_the_same_order(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(40):
        walk.step()
        walk.check()
