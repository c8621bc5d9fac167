"""What the workers of a Mooncake tier share: whose turn it is, and registered memory beside primary, for the headers of
records and for payloads that are not in primary.
"""

from __future__ import annotations

import mmap
from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from kvstrata.tiers.common.record import HEADER_BYTES

BLOCKS = 16
"""Batches that can be under way at once; one that hangs keeps its block."""
RECORDS = 64
"""Most records of one batch."""
SPARE_BYTES = 64 << 10
"""Room of one batch for payloads outside primary: those of the self-test."""
BLOCK_BYTES = RECORDS * HEADER_BYTES + SPARE_BYTES


def address_of(view: memoryview) -> int:
    """Where the bytes of a view lie."""
    return int(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else 0


class Turn:
    """One worker at a time is between `with` and its end; the others wait."""

    __slots__ = ("_token",)

    def __init__(self) -> None:
        self._token: SimpleQueue[None] = SimpleQueue()
        self._token.put(None)

    def __enter__(self) -> None:
        self._token.get()

    def __exit__(self, *_: object) -> None:
        self._token.put(None)


@dataclass(slots=True, eq=False)
class Block:
    """The memory of one batch: `headers`, one after the other, then `spare`."""

    number: int
    headers: memoryview
    spare: memoryview

    def header(self, index: int) -> memoryview:
        """The place of one record's header."""
        return self.headers[index * HEADER_BYTES : (index + 1) * HEADER_BYTES]


class Arena:
    """Blocks for batches. `lend` and `take_back` are single steps: several workers use them."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, BLOCKS * BLOCK_BYTES)
        whole = memoryview(self._memory)
        self.view = whole
        self._free: deque[Block] = deque()
        for number in range(BLOCKS):
            part = whole[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
            self._free.append(Block(number, part[: RECORDS * HEADER_BYTES], part[RECORDS * HEADER_BYTES :]))

    def lend(self) -> Block | None:
        """A block that nobody uses, or None."""
        try:
            return self._free.popleft()
        except IndexError:
            return None

    def take_back(self, block: Block) -> None:
        """The batch has ended."""
        self._free.append(block)
