"""Least recently used, with the prefix order of chains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

from kvstrata.policy.base import EvictionPolicy
from kvstrata.policy.chains import _QUEUE, _WAITING, ChainQueues
from kvstrata.types import OffloadKey


class LRU(ChainQueues, EvictionPolicy):
    """The slot whose last insert or touch is longest ago goes first; of one call, the last named.

    A slot that others descend from waits for them, however old it is.
    """

    def __init__(self) -> None:
        super().__init__(queues=1)

    def fresh(self) -> Self:
        return type(self)()

    def insert(self, slots: Sequence[int], anchor: int = -1, keys: Sequence[OffloadKey] = ()) -> None:
        if not slots:
            return
        self._grow(slots)
        self._adopt(slots, anchor)
        self._push(slots)

    def touch(self, slots: Sequence[int]) -> None:
        if self._are_hottest(slots):
            return  # a request that ends touches again what its load has just touched
        nexts, prevs, where = self._next, self._prev, self._where
        for slot in slots:
            node = slot + 1
            if where[node] >= _QUEUE:  # as `_unlink`, inline: this is the hot path
                prev, following = prevs[node], nexts[node]
                nexts[prev] = following
                prevs[following] = prev
            else:
                self._unlink(node)
        self._push(slots)

    def _are_hottest(self, slots: Sequence[int]) -> bool:
        """Whether `slots` are what a touch of them would make them: the hot end, in this order."""
        prevs, node = self._prev, 0
        for slot in slots:
            node = prevs[node]
            if node != slot + 1:
                return False
        return True

    def _push(self, slots: Sequence[int]) -> None:
        """Links `slots`, which are in no queue, at the hot end: the last one first."""
        nexts, prevs, where = self._next, self._prev, self._where
        last = prevs[0]
        for slot in reversed(slots):
            node = slot + 1
            nexts[last] = node
            prevs[node] = last
            where[node] = _QUEUE
            last = node
        nexts[last] = 0
        prevs[0] = last

    def evicted(self, slots: Sequence[int]) -> None:
        self.remove(slots)

    def victims(self) -> Iterator[int]:
        nexts, children, parents, where = self._next, self._children, self._parent, self._where
        gone: dict[int, int] = {}
        at = 0
        while node := nexts[at]:
            if (count := children[node]) and count > gone.get(node, 0):
                self._park(node, _WAITING)
                continue
            at = node
            yield node - 1
            parent = parents[node]
            if parent < 0:
                continue
            if where[parent] == _WAITING:
                yield from self._ripe(node, gone)
            else:
                gone[parent] = gone.get(parent, 0) + 1
        yield from self._blocked(gone)
