"""The contract of an eviction policy: an order over slot numbers, coldest first.

A policy knows nothing of bytes, pages, pins or requests. Residency tells it what came, what was used and what went,
and asks it for victims. `kvstrata.testing.policy_contract` is the suite that every policy must pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import ClassVar, Protocol, Self

from kvstrata.types import OffloadKey

VICTIMS_AT_ONCE = 64
"""Victims that are looked for together if nobody says how many are wanted."""


class EvictionPolicy(Protocol):
    """An order over the slots it holds.

    Duties of the caller: a slot is inserted at most once until it is removed or evicted; touched, hidden and shown
    slots are held; a call never names a slot twice. Slot numbers are small non-negative ints and are used again.

    Duty of the policy, the order of chains: an `insert` names one chain, head first, that continues the chain of
    `anchor`. As long as a slot is held and not hidden, no slot that it descends from is offered before it.
    """

    remembers_keys: ClassVar[bool] = True
    """Whether `insert` makes use of keys; they are not looked up for a policy that does not."""

    def insert(self, slots: Sequence[int], anchor: int = -1, keys: Sequence[OffloadKey] = ()) -> None:
        """Takes `slots`, one chain with its head first; the last one is offered before the others.

        `anchor` is the slot of the same chain that comes right before `slots[0]`; it is ignored when not held.
        `keys`, when given, are the keys of `slots`, for policies that remember what they evicted.
        """
        ...

    def touch(self, slots: Sequence[int]) -> None:
        """Marks `slots` as used now; chain order again, so the last one is the coldest of them."""
        ...

    def renew(self, slots: Sequence[int]) -> None:
        """Marks `slots` as the newest although nothing used them again: the request that left them has ended.

        By default that is a use; a policy that counts uses must not count it.
        """
        self.touch(slots)

    def remove(self, slots: Sequence[int]) -> None:
        """Forgets `slots`, for any reason but eviction."""
        ...

    def evicted(self, slots: Sequence[int]) -> None:
        """Forgets `slots` because they were chosen as victims."""
        ...

    def victims(self) -> Iterator[int]:
        """Every held slot that is not hidden, once, coldest first; membership does not change.

        The caller skips what it may not evict. Any other call on the policy ends the iterator; a new one starts
        over. Inner order may be advanced while iterating, so that repeated calls do not repeat the same work.
        """
        ...

    def victim_lists(self, most: int = VICTIMS_AT_ONCE) -> Iterator[Sequence[int]]:
        """`victims`, about `most` at a time: for callers that look at them together. No list is empty."""
        victims = self.victims()
        while some := list(islice(victims, most)):
            yield some

    def hide(self, slots: Sequence[int]) -> None:
        """A hint that `slots` cannot be evicted for now: they need not be offered until shown or touched.

        They stay held. The default ignores the hint, at the price of walking over them again and again.
        """

    def show(self, slots: Sequence[int]) -> None:
        """Ends `hide`: `slots` (chain order) may be evicted again and count as cold. No effect on others."""

    def fresh(self) -> Self:
        """A new, empty policy with the same settings: residency keeps one order per size class."""
        ...

    def __len__(self) -> int:
        """How many slots are held, hidden ones included."""
        ...

    def __contains__(self, slot: object) -> bool:
        """Whether `slot` is held, hidden or not."""
        ...
