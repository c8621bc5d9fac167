"""What a tier asks of its I/O workers: plain values, the same for threads and for another process.

Places are byte offsets in a segment file, `memory` are byte offsets in primary. Keys and digests are concatenated.
Each task is answered by exactly one `Done`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class WriteBatch(msgspec.Struct, array_like=True, frozen=True, tag=1):
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
    lengths: list[int]
    memory: list[int]
    digests: bytes
    straight: bool
    """All payloads may go from their slots without a bounce buffer."""
    fresh: bool = False
    """The segment was never written before: the file system has something to do for each call."""


class ReadUnit(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """Read neighbouring payloads of one segment into their slots and verify them there."""

    task_id: int
    segment: int
    places: list[int]
    lengths: list[int]
    memory: list[int]
    digests: bytes
    verify: bool
    straight: bool


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


Task: TypeAlias = WriteBatch | ReadUnit | MoveBatch | Prepare | Sync | SelfTest


class Done(msgspec.Struct, array_like=True, frozen=True):
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
