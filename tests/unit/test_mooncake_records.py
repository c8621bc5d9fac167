"""Where the mooncake tier lays header and payload, and what it believes of what a store says that it has read."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest

from kvstrata.errors import StateError
from kvstrata.runtime.executor import ThreadExecutor
from kvstrata.testing.tier_harness import chunk_key, payload_of
from kvstrata.tiers.common.record import HEADER_BYTES, Identity
from kvstrata.tiers.mooncake.arena import SPARE_BYTES, Arena, address_of
from kvstrata.tiers.mooncake.client import LONG_CALL, NOT_FOUND, Connection, MooncakeClient
from kvstrata.tiers.server.client import ReadItem, WriteItem
from kvstrata.types import FailCause

SIZE = 1000
SLOT = SIZE + HEADER_BYTES
ADDED = b"\xa5" * 64


class Library:
    """A store of that library whose transfers are copies. `idle`: it says that it has read, and has not."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.pieces: set[int] = set()
        self.idle = False

    def batch_put_from_multi_buffers(
        self, names: Sequence[str], pointers: Sequence[list[int]], sizes: Sequence[list[int]], _: object
    ) -> list[int]:
        for name, starts, lengths in zip(names, pointers, sizes, strict=True):
            self.pieces.add(len(starts))
            self.objects[name] = b"".join(ctypes.string_at(*piece) for piece in zip(starts, lengths, strict=True))
        return [0] * len(names)

    def batch_get_into_multi_buffers(
        self, names: Sequence[str], pointers: Sequence[list[int]], sizes: Sequence[list[int]]
    ) -> list[int]:
        return [
            self._get(self.objects.get(name), list(zip(starts, lengths, strict=True)))
            for name, starts, lengths in zip(names, pointers, sizes, strict=True)
        ]

    def _get(self, data: bytes | None, pieces: list[tuple[int, int]]) -> int:
        if data is None:
            return NOT_FOUND
        at = 0
        for start, length in [] if self.idle else pieces:
            part = data[at : at + length]
            ctypes.memmove(start, part, len(part))
            at += length
        return len(data)


class Rig:
    """A client with room for four chunks in primary, each followed by bytes that are nobody's."""

    def __init__(self, tail_room: int, *, verify: bool = True) -> None:
        self.step = SIZE + tail_room + len(ADDED)
        self.primary = np.frombuffer(bytearray(4 * self.step), np.uint8).data
        self.client = MooncakeClient(Connection("", "", "", "tcp", "", 0, ""), "kvstrata", lambda: None)
        self.client.region, self.client.tail_room = self.primary, tail_room
        self.library = self.client.store = Library()
        self.client._config = lambda **_: None  # type: ignore[method-assign]
        self.client._identity, self.client._part, self.client._verify = Identity(bytes(16), 7), "one", verify

    def chunk(self, index: int) -> memoryview:
        start = index * self.step
        self.primary[start + self.step - len(ADDED) : start + self.step] = ADDED
        return self.primary[start : start + SIZE]

    def untouched(self, index: int) -> bool:
        return bytes(self.primary[(index + 1) * self.step - len(ADDED) : (index + 1) * self.step]) == ADDED

    def write(self, number: int, index: int) -> None:
        key = chunk_key(number)
        chunk = self.chunk(index)
        chunk[:] = payload_of(key, SIZE)
        item = WriteItem(key, chunk, None, 1)
        self.client.write([item])
        assert item.failed is None
        assert self.untouched(index)

    def read(self, number: int, index: int) -> FailCause | None:
        item = ReadItem(chunk_key(number), self.chunk(index), True)
        self.client.read([item])
        assert self.untouched(index)
        return item.failed

    @property
    def names(self) -> list[str]:
        return list(self.library.objects)


@pytest.mark.parametrize(("tail_room", "pieces"), [(HEADER_BYTES, 1), (2 * HEADER_BYTES, 1), (0, 2), (127, 2)])
def test_header_and_payload_are_one_transfer_where_there_is_room(tail_room: int, pieces: int) -> None:
    rig = Rig(tail_room)
    rig.write(1, 0)
    rig.chunk(2)[:] = bytes(SIZE)
    assert rig.read(1, 2) is None
    assert bytes(rig.chunk(2)) == payload_of(chunk_key(1), SIZE)
    assert rig.library.pieces == {pieces}


def test_a_record_is_the_same_bytes_in_both_ways_payload_first() -> None:
    records = []
    for tail_room in (0, HEADER_BYTES):
        rig = Rig(tail_room)
        rig.write(1, 1)
        records += rig.library.objects.values()
    assert records[0] == records[1]
    assert records[0].startswith(payload_of(chunk_key(1), SIZE))
    assert records[0][SIZE:].startswith(b"KVSTRATA")


@pytest.mark.parametrize("tail_room", [0, HEADER_BYTES])
def test_the_header_of_an_earlier_job_is_not_taken_for_what_was_read(tail_room: int) -> None:
    """The room behind a chunk still has its header when the slot is used again; so has the arena."""
    rig = Rig(tail_room, verify=False)
    rig.write(1, 0)
    assert rig.read(1, 0) is None
    rig.library.idle = True
    assert rig.read(1, 0) is FailCause.CORRUPT


WRONG = {
    "header of another key": (lambda mine, other: mine[:SIZE] + other[SIZE:], FailCause.FOREIGN),
    "another record": (lambda _, other: other, FailCause.FOREIGN),
    "short": (lambda mine, _: mine[:-1], FailCause.WRONG_SIZE),
    "payload alone": (lambda mine, _: mine[:SIZE], FailCause.WRONG_SIZE),
    "empty": (lambda mine, _: b"", FailCause.WRONG_SIZE),
    "header first": (lambda mine, _: mine[SIZE:] + mine[:SIZE], FailCause.CORRUPT),
    "altered payload": (lambda mine, _: b"?" + mine[1:], FailCause.CORRUPT),
}


@pytest.mark.parametrize("tail_room", [0, HEADER_BYTES])
@pytest.mark.parametrize("how", WRONG)
def test_what_is_not_the_record_is_refused(how: str, tail_room: int) -> None:
    rig = Rig(tail_room)
    rig.write(1, 0)
    rig.write(2, 1)
    make, cause = WRONG[how]
    first, second = rig.names
    rig.library.objects[first] = make(rig.library.objects[first], rig.library.objects[second])
    assert rig.read(1, 0) is cause
    assert rig.read(2, 1) is None


def test_a_payload_outside_primary_is_one_piece_beside_it_while_there_is_room() -> None:
    block = Arena().lend()
    assert block is not None
    region = np.zeros(4096, np.uint8).data
    place = block.place(memoryview(bytearray(SIZE)), region, 0)
    assert place is not None
    assert place.is_copy
    assert (place.sizes, place.pointers) == ([SLOT], [address_of(place.payload)])
    assert address_of(place.header) == place.pointers[0] + SIZE
    assert block.place(memoryview(bytearray(SPARE_BYTES)), region, 0) is None
    assert block.place(memoryview(b""), region, 0) is None


def test_the_last_chunk_of_primary_has_no_room_behind_it() -> None:
    """Who gives room sees to it that it lies in primary; if not, nothing is written past the end."""
    arena = Arena()
    block = arena.lend()
    assert block is not None
    region = np.zeros(SLOT, np.uint8).data
    within, over = (block.place(region[at : at + SIZE], region, HEADER_BYTES) for at in (0, 1))
    assert within is not None
    assert over is not None
    assert (len(within.sizes), len(over.sizes)) == (1, 2)
    used = address_of(over.header)
    arena.take_back(block)
    while (again := arena.lend()) is not block:
        assert again is not None
    place = again.place(region[:SIZE], region, 0)
    assert place is not None
    assert address_of(place.header) == used, "a block that comes back is empty"


def test_only_a_long_call_is_made_on_a_thread_that_lets_others_go_first() -> None:
    client = Rig(0).client
    client.yielding = executor = ThreadExecutor("yielding", 1, yielding=True)
    assert client._call(lambda: [1], LONG_CALL - 1) == [1]
    assert executor.statistics().threads == 0
    assert client._call(lambda: [2], LONG_CALL) == [2]
    assert executor.statistics().threads == 1
    client.yielding = None
    assert client._call(lambda: [3], LONG_CALL) == [3]
    assert executor.close(5.0)
    assert executor.statistics().finished == 1


def test_what_a_long_call_raises_is_raised_where_it_is_waited_for() -> None:
    client = Rig(0).client
    client.yielding = executor = ThreadExecutor("yielding", 1, yielding=True)

    def fail() -> list[int]:
        raise OSError("the library does not want to")

    with pytest.raises(OSError, match="does not want to"):
        client._call(fail, LONG_CALL)
    assert executor.close(5.0)
    with pytest.raises(StateError):
        client._call(fail, LONG_CALL)
