"""S3-FIFO: three first-in-first-out queues, of which the small one filters what is used only once."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Self

from kvstrata.errors import ConfigError
from kvstrata.policy.base import EvictionPolicy
from kvstrata.policy.chains import _QUEUE, _WAITING, ChainQueues
from kvstrata.types import OffloadKey

_SMALL = 0
_MAIN = 1
_MAX_USES = 3
_MIN_GHOSTS = 16


class S3FIFO(ChainQueues, EvictionPolicy):
    """New slots enter the small queue; those used there move to the main queue, the others are evicted early.

    The main queue is a clock: a used slot that comes up goes round again with one use less. Keys evicted from the
    small queue are remembered as ghosts (64-bit hashes, at most as many as slots are held); one that comes back
    enters the main queue at once. `small_share` is the part of the slots that the small queue may keep.
    """

    def __init__(self, small_share: float = 0.1) -> None:
        if not 0.0 < small_share < 1.0:
            raise ConfigError(f"s3fifo: small_share must be between 0 and 1, not {small_share}")
        super().__init__(queues=2)
        self._share = small_share
        self._uses = bytearray()
        self._hash = array("q")
        self._ghosts: set[int] = set()
        self._ghost_order: deque[int] = deque()
        self._small = 0  # held slots that belong to the small queue, parked ones included

    def fresh(self) -> Self:
        return type(self)(self._share)

    @property
    def ghosts(self) -> int:
        """How many evicted keys are remembered."""
        return len(self._ghosts)

    def insert(self, slots: Sequence[int], anchor: int = -1, keys: Sequence[OffloadKey] = ()) -> None:
        if not slots:
            return
        self._grow(slots)
        missing = len(self._where) - len(self._uses)
        self._uses.extend(bytes(missing))
        self._hash.frombytes(bytes(8 * missing))
        self._adopt(slots, anchor)
        hashes = [hash(key) for key in keys] if keys else [0] * len(slots)
        for slot, digest in zip(reversed(slots), reversed(hashes), strict=True):
            node = slot + 2
            self._uses[node] = 0
            self._hash[node] = digest
            if digest in self._ghosts:
                self._ghosts.discard(digest)
                self._link_hot(node, _MAIN)
            else:
                self._small += 1
                self._link_hot(node, _SMALL)

    def touch(self, slots: Sequence[int]) -> None:
        uses = self._uses
        for slot in slots:
            node = slot + 2
            if uses[node] < _MAX_USES:
                uses[node] += 1
        self.show(slots)

    def renew(self, slots: Sequence[int]) -> None:
        self.show(slots)

    def evicted(self, slots: Sequence[int]) -> None:
        ghosts, order = self._ghosts, self._ghost_order
        for slot in slots:
            node = slot + 2
            digest = self._hash[node]
            if digest and digest not in ghosts and self._queue_of(node) == _SMALL:
                ghosts.add(digest)
                order.append(digest)
        self.remove(slots)
        limit = max(_MIN_GHOSTS, self._held)
        while len(order) > limit:
            ghosts.discard(order.popleft())

    def remove(self, slots: Sequence[int]) -> None:
        self._small -= sum(self._queue_of(slot + 2) == _SMALL for slot in slots)
        super().remove(slots)

    def _queue_of(self, node: int) -> int:
        where = self._where[node]
        return where - _QUEUE if where >= _QUEUE else self._home[node]

    def victims(self) -> Iterator[int]:
        nexts, uses, children = self._next, self._uses, self._children
        gone: dict[int, int] = {}
        at = [_SMALL, _MAIN]  # the last node walked over in each queue
        small, total = self._small, self._held  # what would be left
        while True:
            queue = _SMALL if small > self._share * total else _MAIN
            node = nexts[at[queue]]
            if node == queue:
                queue = 1 - queue
                node = nexts[at[queue]]
                if node == queue:
                    break
            if uses[node]:
                self._go_round(node, queue)
                small -= queue == _SMALL
                continue
            small -= queue == _SMALL
            total -= 1
            if (count := children[node]) and count > gone.get(node, 0):
                self._park(node, _WAITING)
                continue
            at[queue] = node
            yield node - 2
            if self._parent[node] >= 0:
                yield from self._ripe(node, gone)
        yield from self._blocked(gone)

    def _go_round(self, node: int, queue: int) -> None:
        """A used node that came up: from small to main with its uses cleared, or round the main queue again."""
        if queue == _MAIN:
            self._uses[node] -= 1
        else:
            self._uses[node] = 0
            self._small -= 1
        self._unlink(node)
        self._link_hot(node, _MAIN)
