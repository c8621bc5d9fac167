"""What a tier asks of its I/O workers: plain values, the same for threads and for another process.

Places are byte offsets in a segment file, `memory` are byte offsets in primary. Keys and digests are concatenated.
Each task is answered by exactly one `Done`.
"""

from __future__ import annotations

import itertools
from typing import TypeAlias

import msgspec

from kvstrata.tiers.disk.format import BLOCK
from kvstrata.types import DIGEST_BYTES, KEY_BYTES


def _slots(memory: list[int], lengths: list[int]) -> list[int]:
    if len(memory) == 1 < len(lengths):
        return list(itertools.accumulate(lengths[:-1], initial=memory[0]))
    return memory


class WriteBatch(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=1):
    """Write one header block and its payloads. `digests` empty: make them from the payloads."""

    task_id: int
    segment: int
    segment_id: bytes
    seq: int
    start: int
    span: int
    kind: int
    namespace: bytes
    layout_tag: int
    wall_us: int
    keys: bytes
    places: list[int]
    """Empty if `straight`: then the payloads follow each other, and the first one the header block."""
    lengths: list[int]
    """A single one if all are equal."""
    memory: list[int]
    """A single one if the slots follow each other."""
    digests: bytes
    straight: bool
    """All payloads may go from their slots without a bounce buffer."""
    fresh: bool = False
    """The segment was never written before: the file system has something to do for each call."""

    def layout(self) -> tuple[list[int], list[int]]:
        """Place and length of each payload."""
        count = len(self.keys) // KEY_BYTES
        lengths = self.lengths if len(self.lengths) == count else self.lengths * count
        if not self.straight or not count:
            return self.places, lengths
        return list(itertools.accumulate(lengths[:-1], initial=self.start + BLOCK)), lengths

    def slots(self, lengths: list[int]) -> list[int]:
        """Where in primary each payload is."""
        return _slots(self.memory, lengths)


class ReadUnit(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=2):
    """Read neighbouring payloads of one segment into their slots and verify them there."""

    task_id: int
    segment: int
    places: list[int]
    lengths: list[int]
    memory: list[int]
    digests: bytes
    verify: bool
    straight: bool
    first: int = 0
    """Index of its first key in the load that it was cut from."""


class ReadEven(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=8):
    """Read payloads of one size and of one segment that need no bounce buffer, in the order of their places.

    Who runs it may cut it into units and run these at once; it has one answer in any case.
    """

    task_id: int
    segment: int
    size: int
    places: list[int]
    memory: list[int]
    """A single one if the slots follow each other."""
    digests: bytes
    verify: bool

    def units(self, most: int) -> list[ReadUnit]:
        """The same as units of `most` bytes, or of one payload if that is larger."""
        size, places, count = self.size, self.places, len(self.places)
        most, memory = max(most // size, 1), _slots(self.memory, [size] * count)
        borders = [0, *[at for at in range(1, count) if places[at] - places[at - 1] != size], count]
        return [
            ReadUnit(
                self.task_id,
                self.segment,
                places[at:end],
                [size] * (end - at),
                memory[at:end],
                self.digests[at * DIGEST_BYTES : end * DIGEST_BYTES],
                self.verify,
                True,
                at,
            )
            for first, last in itertools.pairwise(borders)
            for at in range(first, last, most)
            for end in [min(at + most, last)]
        ]


class MoveBatch(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """Read payloads of a segment that is to be reclaimed, verify them, write them as a new batch."""

    task_id: int
    source: int
    source_places: list[int]
    batch: WriteBatch


class Prepare(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """Make `sync_first` durable, then begin a new life of a segment file, created at need, and make that durable."""

    task_id: int
    segment: int
    size: int
    create: bool
    header: bytes
    sync_first: list[int]
    min_free: int


class Sync(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """Make what was written to the segments durable."""

    task_id: int
    segments: list[int]


class SelfTest(msgspec.Struct, array_like=True, frozen=True, tag=6):
    """Write a scratch file, read it back past every cache, compare, remove it."""

    task_id: int
    payload: bytes


Load: TypeAlias = ReadUnit | ReadEven
LOADS = (ReadUnit, ReadEven)
"""The same for `isinstance`, which takes a multiple of the time for a union."""
Task: TypeAlias = WriteBatch | ReadUnit | ReadEven | MoveBatch | Prepare | Sync | SelfTest


class Done(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The end of a task: `cause` is empty if it worked. A read also names the keys that failed, by index."""

    task_id: int
    cause: str = ""
    detail: str = ""
    failed: list[tuple[int, str]] = []
    digests: bytes = b""


class Forget(msgspec.Struct, array_like=True, frozen=True, tag=7):
    """Tasks that need not be started any more; what has not started ends as cancelled."""

    task_ids: list[int]


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """What goes over the job pipe in one piece."""

    items: list[Task | Forget]


class Answers(msgspec.Struct, array_like=True, frozen=True):
    """What comes back over the result pipe in one piece."""

    items: list[Done]
