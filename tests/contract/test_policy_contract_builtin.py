"""LRU, S3-FIFO and a policy from outside pass the contract of policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

from kvstrata.policy.base import EvictionPolicy
from kvstrata.policy.lru import LRU
from kvstrata.policy.registry import make_policy
from kvstrata.policy.s3fifo import S3FIFO
from kvstrata.testing.policy_contract import PolicyContract


class TestLRU(PolicyContract):
    def make(self) -> EvictionPolicy:
        return make_policy("lru")


class TestS3FIFO(PolicyContract):
    def make(self) -> EvictionPolicy:
        return make_policy("s3fifo")


class WideLRU(LRU):
    wide = 1  # also what concerns one slot goes the way of batches


class WideS3FIFO(S3FIFO):
    wide = 1


class TestLRUInBatches(PolicyContract):
    def make(self) -> EvictionPolicy:
        return WideLRU()


class TestS3FIFOInBatches(PolicyContract):
    def make(self) -> EvictionPolicy:
        return WideS3FIFO()


class NewestFirst(EvictionPolicy):
    """The least that a policy from outside needs: chains evicted newest first, hints ignored."""

    def __init__(self) -> None:
        self._held: dict[int, None] = {}

    def fresh(self) -> Self:
        return type(self)()

    def insert(self, slots: Sequence[int], anchor: int = -1, keys: Sequence[bytes] = ()) -> None:
        self._held.update(dict.fromkeys(slots))

    def touch(self, slots: Sequence[int]) -> None:
        pass

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._held[slot]

    def evicted(self, slots: Sequence[int]) -> None:
        self.remove(slots)

    def victims(self) -> Iterator[int]:
        return iter(list(reversed(self._held)))

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, slot: object) -> bool:
        return slot in self._held


class TestFromOutside(PolicyContract):
    def make(self) -> EvictionPolicy:
        return NewestFirst()
