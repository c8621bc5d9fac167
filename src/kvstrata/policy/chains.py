"""Prefix order: queues of slots in which nothing is offered before what descends from it.

Shared ground of the policies. A slot is a node of one linked queue, and of a forest: each node knows its parent (the
slot before it in its chain) and how many held children it has. A node that comes up while it still has children is
parked outside the queues and returns to the cold end when its last child has gone, so that protected heads are walked
over once and not by every search. Hidden nodes are parked the same way.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from kvstrata.types import I32, I64

# Where a node is. Values below _HIDDEN + 1 are not queues; queue q is kept as _QUEUE + q.
_OUT = 0
_WAITING = 1  # came up while it had children
_HIDDEN = 2
_QUEUE = 3


class _Columns(NamedTuple):
    """The links as arrays over the same memory: for a batch a few calls instead of a loop."""

    nexts: I32
    prevs: I32
    parents: I32
    children: I32
    where: np.typing.NDArray[np.uint8]


class ChainQueues:
    """`queues` doubly linked queues over one set of nodes, with parents.

    Node numbers are slot + `shift`; the first `shift` nodes are the sentinels of the queues. `_next` leads from cold
    to hot. Int arrays hold four bytes per link and no object; rows exist up to the largest slot seen.
    """

    wide: ClassVar[int] = 12
    """From so many slots on a call works on columns: a batch that lies in its queue in one piece moves in one piece."""

    def __init__(self, queues: int) -> None:
        self._shift = queues
        self._next = array("i", range(queues))
        self._prev = array("i", range(queues))
        self._parent = array("i", [-1] * queues)
        self._children = array("i", [0] * queues)
        self._where = bytearray(queues)
        self._home = bytearray(queues)  # the queue a parked node returns to, where there are several
        self._waiting: dict[int, None] = {}
        self._held = 0
        self._seen: _Columns | None = None

    def __len__(self) -> int:
        return self._held

    def __contains__(self, slot: object) -> bool:
        return (
            isinstance(slot, int)
            and 0 <= slot < len(self._where) - self._shift
            and (self._where[slot + self._shift] != _OUT)
        )

    def _columns(self) -> _Columns:
        """The links as arrays; not to be kept over `_grow`."""
        if self._seen is None:
            self._seen = _Columns(
                np.frombuffer(self._next, np.int32),
                np.frombuffer(self._prev, np.int32),
                np.frombuffer(self._parent, np.int32),
                np.frombuffer(self._children, np.int32),
                np.frombuffer(self._where, np.uint8),
            )
        return self._seen

    def _grow(self, slots: Sequence[int]) -> None:
        missing = max(slots) + self._shift + 1 - len(self._where)
        if missing > 0:
            self._seen = None  # memory that is looked at cannot move
            missing += len(self._where) // 16
            zeros = bytes(4 * missing)
            self._next.frombytes(zeros)
            self._prev.frombytes(zeros)
            self._parent.frombytes(b"\xff" * (4 * missing))
            self._children.frombytes(zeros)
            self._where.extend(bytes(missing))
            if self._shift > 1:
                self._home.extend(bytes(missing))

    def _adopt(self, slots: Sequence[int], anchor: int, nodes: I64 | None = None) -> None:
        """Makes `slots` one chain below `anchor`. `nodes`: those of the slots, if known."""
        shift, parents, children = self._shift, self._parent, self._children
        parent = anchor + shift if anchor >= 0 and anchor in self else -1
        if len(slots) >= self.wide:
            columns, nodes = self._columns(), self._nodes(slots) if nodes is None else nodes
            columns.parents[nodes[1:]] = nodes[:-1].astype(np.int32)
            columns.children[nodes[:-1]] = 1  # new nodes have no children yet
            slots = slots[:1]
            self._held += len(nodes) - 1
        for slot in slots:
            node = slot + shift
            if parent >= 0:
                parents[node] = parent
                children[parent] += 1
            parent = node
        self._held += len(slots)

    def _nodes(self, slots: Sequence[int]) -> I64:
        return np.array(slots, np.int64) + self._shift

    def _link_hot(self, node: int, queue: int) -> None:
        prev = self._prev[queue]
        self._next[prev] = node
        self._prev[node] = prev
        self._next[node] = queue
        self._prev[queue] = node
        self._where[node] = _QUEUE + queue

    def _link_cold(self, node: int, queue: int) -> None:
        following = self._next[queue]
        self._prev[following] = node
        self._next[node] = following
        self._prev[node] = queue
        self._next[queue] = node
        self._where[node] = _QUEUE + queue

    def _unlink(self, node: int) -> int:
        """Takes a node out of its queue, if it is in one; returns the queue it belongs to."""
        where = self._where[node]
        if where >= _QUEUE:
            prev, following = self._prev[node], self._next[node]
            self._next[prev] = following
            self._prev[following] = prev
            return where - _QUEUE
        if where == _WAITING:
            del self._waiting[node]
        return self._home[node] if self._shift > 1 else 0

    def _park(self, node: int, why: int) -> None:
        queue = self._unlink(node)
        if self._shift > 1:
            self._home[node] = queue
        self._where[node] = why
        if why == _WAITING:
            self._waiting[node] = None

    def _return(self, node: int) -> None:
        """Brings a parked node back: to the cold end, or to wait for its children."""
        if self._children[node]:
            self._park(node, _WAITING)
        else:
            self._link_cold(node, self._unlink(node))

    def hide(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._park(slot + self._shift, _HIDDEN)

    def show(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if self._where[slot + self._shift] == _HIDDEN:
                self._return(slot + self._shift)

    def remove(self, slots: Sequence[int]) -> None:
        if len(slots) >= self.wide and self._remove_run(self._nodes(slots)):
            return
        shift, where, children, parents = self._shift, self._where, self._children, self._parent
        nexts, prevs = self._next, self._prev
        orphans = False
        for slot in slots:
            node = slot + shift
            place = where[node]
            if place >= _QUEUE:  # as `_unlink`, inline: this is the hot path
                prev, following = prevs[node], nexts[node]
                nexts[prev] = following
                prevs[following] = prev
            elif place == _WAITING:
                del self._waiting[node]
            where[node] = _OUT
            parent = parents[node]
            if parent >= 0:
                parents[node] = -1
                left = children[parent] - 1
                children[parent] = left
                if not left and where[parent] == _WAITING:
                    self._return(parent)
            if children[node]:
                orphans = True
        self._held -= len(slots)
        if orphans:
            self._disown([slot + shift for slot in slots if children[slot + shift]])

    def _remove_run(self, nodes: I64) -> bool:
        """`remove` for nodes that follow each other in a queue, coldest first; False if they do not."""
        nexts, _, parents, children, where = self._columns()
        places = where[nodes].tobytes()
        if places[0] < _QUEUE or places.count(places[0]) != len(nodes):
            return False
        if np.count_nonzero(nexts[nodes[:-1]] == nodes[1:]) != len(nodes) - 1:
            return False
        first, last = int(nodes[0]), int(nodes[-1])
        prev, following = self._prev[first], self._next[last]
        self._next[prev] = following
        self._prev[following] = prev
        where[nodes] = _OUT
        above = parents[nodes]
        parents[nodes] = -1
        inside = above[:-1] == nodes[1:]
        children[nodes[1:][inside]] -= 1
        for parent in (*above[:-1][~inside].tolist(), int(above[-1])):
            if parent >= 0:
                self._children[parent] -= 1
                if not self._children[parent] and self._where[parent] == _WAITING:
                    self._return(parent)
        self._held -= len(nodes)
        left = children[nodes]
        if np.count_nonzero(left):
            self._disown(nodes[left > 0].tolist())
        return True

    def _disown(self, nodes: Sequence[int]) -> None:
        """Cuts the children of removed nodes loose; one pass over all rows, since children are not listed."""
        if not nodes:
            return  # the children went in the same call
        for node in nodes:
            self._children[node] = 0
        parents = np.frombuffer(self._parent, dtype=np.int32)
        parents[np.isin(parents, np.asarray(nodes, dtype=np.int32))] = -1

    def _ripe(self, node: int, gone: dict[int, int]) -> Sequence[int]:
        """The waiting ancestors of `node` (slots, nearest first) whose last child has been offered with it.

        `gone` counts the children that were offered so far; a caller skips this for a node without a parent.
        """
        ripe = []
        while (parent := self._parent[node]) >= 0:
            count = gone.get(parent, 0) + 1
            gone[parent] = count
            if self._where[parent] != _WAITING or count < self._children[parent]:
                break
            ripe.append(parent - self._shift)
            node = parent
        return ripe

    def _blocked(self, gone: dict[int, int]) -> Iterator[int]:
        """The nodes that wait for hidden children, tails first: offered when there is nothing better."""
        left = [node for node in self._waiting if gone.get(node, 0) < self._children[node]]
        below = dict.fromkeys(left, 0)
        above = {node: self._nearest(node, below) for node in left}
        for node in above.values():
            if node >= 0:
                below[node] += 1
        ready = [node for node in left if not below[node]]
        while ready:
            node = ready.pop()
            yield node - self._shift
            node = above[node]
            if node >= 0:
                below[node] -= 1
                if not below[node]:
                    ready.append(node)

    def _nearest(self, node: int, among: Container[int]) -> int:
        """The nearest ancestor of `node` in `among`, past hidden ones; -1 if there is none."""
        node = self._parent[node]
        while node >= 0 and node not in among:
            node = self._parent[node]
        return node
