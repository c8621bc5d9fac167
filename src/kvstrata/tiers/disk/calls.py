"""Reads and writes as values: what a task asks of a file, whoever carries it out and whenever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that calls move bytes from and to, and the address where it begins."""

    view: memoryview
    address: int


Part: TypeAlias = tuple[Memory, int, int]
"""Bytes of some memory: where they begin in it, and how many."""


@dataclass(slots=True, eq=False)
class Call:
    """One read or write of neighbouring bytes of a file, from or into the parts one after the other."""

    handle: int
    write: bool
    parts: Sequence[Part]
    offset: int
    size: int

    def cut(self, begin: int, size: int) -> Sequence[Part]:
        """The parts of `size` bytes from `begin` on."""
        if len(self.parts) == 1:
            memory, at, _ = self.parts[0]
            return ((memory, at + begin, size),)
        if not begin and size == self.size:
            return self.parts
        chosen = []
        for memory, at, length in self.parts:
            if begin < length and size:
                take = min(length - begin, size)
                chosen.append((memory, at + begin, take))
                size -= take
            begin = max(begin - length, 0)
        return chosen

    def buffers(self, begin: int, size: int) -> list[memoryview]:
        """The same bytes as buffers."""
        return [memory.view[at : at + length] for memory, at, length in self.cut(begin, size)]


class CallQueue(Protocol):
    """Calls that are on their way at the same time without a thread for each. Used by one thread."""

    @property
    def handle(self) -> int:
        """A descriptor that is readable when a call has ended."""
        ...

    def push(self, tag: int, call: Call, begin: int, size: int) -> None:
        """Add a part of a call to what `submit` hands over; at most `depth` are unfinished at any time."""
        ...

    def submit(self) -> None:
        """Hand over what was pushed. Does not wait for it. What is refused ends with its error."""
        ...

    def take(self, least: int = 0) -> list[tuple[int, int]]:
        """Calls that have ended: tag, and the bytes done or minus the number of the error.

        Waits for `least` of them; fewer if not so many are unfinished, or a signal comes in between.
        """
        ...

    def close(self) -> None:
        """Give the queue back; waits for what is in it."""
        ...
