"""What the workers of a Mooncake tier share: whose turn it is, and registered memory: primary with the room behind its
chunks, and beside it a little for headers that have no room there, and for payloads that are not in primary.
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
"""Room of one batch for records whose payload is outside primary: those of the self-test."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where one record lies in registered memory: its payload, and its header right behind it or elsewhere."""

    payload: memoryview
    header: memoryview
    pointers: list[int]
    """Addresses of its pieces, payload first: one where the header is right behind it, else two."""
    sizes: list[int]
    is_copy: bool = False
    """The payload's own place is not registered; this is another one."""


@dataclass(slots=True, eq=False)
class Block:
    """The memory of one batch: `headers`, one after the other, then `spare`."""

    number: int
    headers: memoryview
    spare: memoryview
    used_headers: int = 0
    used_spare: int = 0

    def place(self, payload: memoryview, region: memoryview, tail_room: int) -> Place | None:
        """A place for the record of a payload; None if it is not in primary (`region`) and there is no room beside it.

        With `tail_room` for a header behind each payload of primary, the record is one piece there.
        """
        size, at = len(payload), address_of(payload)
        end = at - address_of(region) + size
        if not size:
            return None
        if not size <= end <= len(region):
            whole = self.spare[self.used_spare : self.used_spare + size + HEADER_BYTES]
            self.used_spare += len(whole)
            return None if len(whole) < size + HEADER_BYTES else _one_piece(whole, is_copy=True)
        if tail_room >= HEADER_BYTES and end + HEADER_BYTES <= len(region):
            return _one_piece(region[end - size : end + HEADER_BYTES])
        header = self.headers[self.used_headers * HEADER_BYTES : (self.used_headers + 1) * HEADER_BYTES]
        self.used_headers += 1
        return Place(payload, header, [at, address_of(header)], [size, HEADER_BYTES])


def _one_piece(whole: memoryview, *, is_copy: bool = False) -> Place:
    return Place(whole[:-HEADER_BYTES], whole[-HEADER_BYTES:], [address_of(whole)], [len(whole)], is_copy)


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
            block = self._free.popleft()
        except IndexError:
            return None
        block.used_headers = block.used_spare = 0
        return block

    def take_back(self, block: Block) -> None:
        """The batch has ended."""
        self._free.append(block)
