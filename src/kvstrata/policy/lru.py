"""Least recently used, with the prefix order of chains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Self

import numpy as np

from kvstrata.policy.base import VICTIMS_AT_ONCE, EvictionPolicy
from kvstrata.policy.chains import _OUT, _QUEUE, _WAITING, ChainQueues
from kvstrata.types import I64, OffloadKey


class _Front(NamedTuple):
    """What a search for victims found at the cold end; true until the next change."""

    slots: list[int]
    """Victims, coldest first, with all that descends from each of them before it."""
    leaves: list[tuple[int, int]]
    """Places in `slots` behind which something else than the parent comes, and that parent."""


class LRU(ChainQueues, EvictionPolicy):
    """The slot whose last insert or touch is longest ago goes first; of one call, the last named.

    A slot that others descend from waits for them, however old it is.
    """

    remembers_keys = False

    def __init__(self) -> None:
        super().__init__(queues=1)
        self._front: _Front | None = None
        self._hot: list[int] = []
        """What was put at the hot end last, if nothing has changed since."""

    def fresh(self) -> Self:
        return type(self)()

    def insert(self, slots: Sequence[int], anchor: int = -1, keys: Sequence[OffloadKey] = ()) -> None:
        if not slots:
            return
        self._front = None
        self._grow(slots)
        nodes = self._nodes(slots) if len(slots) >= self.wide else None
        self._adopt(slots, anchor, nodes)
        self._push(slots, nodes)
        self._hot = list(slots)

    def touch(self, slots: Sequence[int]) -> None:
        self._front = None
        if self._hot == slots or self._are_hottest(slots):
            return  # a request that ends touches again what its load has just touched
        self._hot = list(slots)
        if len(slots) >= self.wide and self._touch_run(self._nodes(slots)):
            return
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

    def _touch_run(self, nodes: I64) -> bool:
        """`touch` for nodes that follow each other in the queue, the last one coldest; False if they do not."""
        columns = self._columns()
        if columns.where[nodes].tobytes().count(_QUEUE) != len(nodes):
            return False
        if np.count_nonzero(columns.nexts[nodes[1:]] == nodes[:-1]) != len(nodes) - 1:
            return False
        nexts, prevs = self._next, self._prev
        head, tail = int(nodes[0]), int(nodes[-1])
        prev, following = prevs[tail], nexts[head]
        nexts[prev] = following
        prevs[following] = prev
        self._join_hot(head, tail)
        return True

    def _join_hot(self, head: int, tail: int) -> None:
        """Puts linked nodes, `tail` the coldest of them, at the hot end."""
        nexts, prevs = self._next, self._prev
        last = prevs[0]
        nexts[last], prevs[tail] = tail, last
        nexts[head], prevs[0] = 0, head

    def _are_hottest(self, slots: Sequence[int]) -> bool:
        """Whether `slots` are what a touch of them would make them: the hot end, in this order."""
        prevs, node = self._prev, 0
        for slot in slots:
            node = prevs[node]
            if node != slot + 1:
                return False
        return True

    def _push(self, slots: Sequence[int], nodes: I64 | None = None) -> None:
        """Links `slots`, which are in no queue, at the hot end: the last one first. `nodes`: theirs, if known."""
        if len(slots) >= self.wide:
            columns, nodes = self._columns(), self._nodes(slots) if nodes is None else nodes
            links = nodes.astype(np.int32)  # what columns take at once
            columns.nexts[nodes[1:]] = links[:-1]
            columns.prevs[nodes[:-1]] = links[1:]
            columns.where[nodes] = _QUEUE
            self._join_hot(int(nodes[0]), int(nodes[-1]))
            return
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

    def remove(self, slots: Sequence[int]) -> None:
        self._front, self._hot = None, []
        super().remove(slots)

    def hide(self, slots: Sequence[int]) -> None:
        self._front, self._hot = None, []
        super().hide(slots)

    def show(self, slots: Sequence[int]) -> None:
        self._front, self._hot = None, []
        super().show(slots)

    def evicted(self, slots: Sequence[int]) -> None:
        front, self._front, self._hot = self._front, None, []
        if front is not None and len(slots) >= self.wide and slots == front.slots[: len(slots)]:
            self._drop_front(front, slots)
        else:
            self.remove(slots)

    def _drop_front(self, front: _Front, slots: Sequence[int]) -> None:
        """`remove` for the first of what the search that has just ended has found."""
        nexts, children, parents, where = self._next, self._children, self._parent, self._where
        last = len(slots) - 1
        following = nexts[slots[last] + 1]
        nexts[0] = following
        self._prev[following] = 0
        leaves = [parent for at, parent in front.leaves if at < last]
        if parents[slots[last] + 1] >= 0:
            leaves.append(parents[slots[last] + 1])
        columns, nodes = self._columns(), self._nodes(slots)
        columns.where[nodes] = _OUT
        columns.parents[nodes] = -1
        for parent in leaves:
            children[parent] -= 1
            if not children[parent] and where[parent] == _WAITING:
                self._return(parent)
        columns.children[nodes] = 0
        self._held -= len(slots)

    def victims(self) -> Iterator[int]:
        return chain.from_iterable(self.victim_lists())

    def victim_lists(self, most: int = VICTIMS_AT_ONCE) -> Iterator[Sequence[int]]:
        gone: dict[int, int] = {}
        at = 0
        while True:
            found = self._walk(at, gone, most)
            if found.slots:
                self._front = found if not at else self._front
                at = found.slots[-1] + 1
                yield found.slots
                if offered := self._offered(at, gone):
                    yield offered
            elif node := self._next[at]:
                self._hot = []
                self._park(node, _WAITING)
            else:
                break
        yield from ([slot] for slot in self._blocked(gone))

    def _walk(self, at: int, gone: dict[int, int], most: int) -> _Front:
        """The next slots of the queue, `most` at most, from cold to hot, up to one that has to wait for others.

        All but the last are counted as offered in `gone`, as far as anybody will ask.
        """
        nexts, children, parents, where = self._next, self._children, self._parent, self._where
        slots: list[int] = []
        leaves: list[tuple[int, int]] = []
        above = -1  # the parent of the slot before
        for _ in range(most):
            node = nexts[at]
            if not node:
                break
            count = children[node]
            if above == node:  # most nodes: the parent of the one before
                if count > 1 and count > gone.get(node, 0) + 1:
                    break
                slots.append(node - 1)
                above = parents[node]
                at = node
                continue
            if above >= 0:
                if where[above] == _WAITING:
                    break
                gone[above] = gone.get(above, 0) + 1
                leaves.append((len(slots) - 1, above))
            if count and count > gone.get(node, 0):
                if above >= 0:
                    gone[above] -= 1  # `_offered` counts the last one
                break
            slots.append(node - 1)
            above = parents[node]
            at = node
        return _Front(slots, leaves)

    def _offered(self, node: int, gone: dict[int, int]) -> Sequence[int]:
        """The node was offered; the waiting ancestors that come with it."""
        parent = self._parent[node]
        if parent < 0:
            return ()
        if self._where[parent] == _WAITING:
            return self._ripe(node, gone)
        gone[parent] = gone.get(parent, 0) + 1
        return ()
