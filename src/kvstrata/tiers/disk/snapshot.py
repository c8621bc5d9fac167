"""A checkpoint in the making: rows are copied a slice at a time, so that no call of the tier takes long.

The places to scan on from are taken first. What changes while the copy goes on is found by that later scan: a record
that moved or came lies behind those places, and so does a removal. A segment that began a new life has a new id, which
makes its rows in the checkpoint void.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvstrata.tiers.base import TierContext
from kvstrata.tiers.disk.format import (
    CHECKPOINT_RECORD_DTYPE,
    CHECKPOINT_SEGMENT_DTYPE,
    Checkpoint,
    Realm,
    pack_checkpoint,
)
from kvstrata.tiers.disk.index import Index
from kvstrata.tiers.disk.io import Files, write_all
from kvstrata.tiers.disk.recover import CHECKPOINT_NAME, CHECKPOINT_TEMPORARY
from kvstrata.tiers.disk.segment import SegmentState, Space

SLICE_ROWS = 16_384


class Snapshot:
    """One checkpoint. `ready` is set when the segments that it speaks of are durable."""

    def __init__(self, indexes: Mapping[Realm, Index], space: Space, wall_us: int) -> None:
        self.ready = False
        self.submitted = False
        self.outcome: str | None = None
        """Set when the file was written (empty), or could not be."""
        self._space = space
        self._wall_us = wall_us
        self._indexes = list(indexes.items())
        self._table, self._positions = _segment_table(space)
        self._parts: list[npt.NDArray[np.void]] = []
        self._realm = 0
        self._row = 0

    @property
    def running(self) -> bool:
        """Whether the file is being written by another thread."""
        return self.submitted and self.outcome is None

    def step(self) -> bool:
        """Copy a slice; True once everything is copied and durable."""
        if self._realm < len(self._indexes):
            index = self._indexes[self._realm][1]
            end = min(self._row + SLICE_ROWS, index.row_bound)
            self._copy(index, self._row, end)
            self._row = end
            if end == index.row_bound:
                self._realm, self._row = self._realm + 1, 0
        return self._realm >= len(self._indexes) and self.ready

    def _copy(self, index: Index, begin: int, end: int) -> None:
        rows = begin + np.flatnonzero(index.segment[begin:end] >= 0)
        positions = self._positions[np.minimum(index.segment[rows], len(self._positions) - 1)]
        rows = rows[positions >= 0]
        out = np.zeros(len(rows), CHECKPOINT_RECORD_DTYPE)
        for name in ("key", "digest", "offset", "length", "stamp"):
            out[name] = getattr(index, name)[rows]
        out["segment"] = positions[positions >= 0]
        out["realm"] = self._realm
        self._parts.append(out)

    def submit(self, files: Files, directory: int, context: TierContext) -> None:
        """Have the file written by the executor."""
        self.submitted = True

        def task() -> None:
            try:
                self.write(files, directory)
            except Exception as error:  # a worker survives any error
                self.outcome = f"{type(error).__name__}: {error}"
            context.wake()

        context.executor.submit(task)

    def write(self, files: Files, directory: int) -> None:
        """Write the file beside the old one and put it in its place."""
        records = np.concatenate(self._parts) if self._parts else np.zeros(0, CHECKPOINT_RECORD_DTYPE)
        realms = tuple(realm for realm, _ in self._indexes)
        parts = pack_checkpoint(Checkpoint(self._wall_us, realms, self._table, records))
        limit = self._space.sizes.checkpoint_bytes
        if sum(map(len, parts)) > limit:
            self.outcome = "does not fit"
            return
        try:
            handle = files.open(directory, CHECKPOINT_TEMPORARY, write=True, create=True)
            try:
                write_all(files, handle, [memoryview(part) for part in parts if part], 0)
                files.sync(handle)
            finally:
                files.close(handle)
            files.rename(directory, CHECKPOINT_TEMPORARY, CHECKPOINT_NAME)
            files.sync_directory(directory)
        except OSError:
            with contextlib.suppress(OSError):
                files.unlink(directory, CHECKPOINT_TEMPORARY)
            raise
        self.outcome = ""


def _segment_table(space: Space) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    """The table, and the position of each segment number in it (-1: not in it)."""
    segments = [s for s in space.segments.values() if s.state is not SegmentState.PREPARING]
    table = np.zeros(len(segments), CHECKPOINT_SEGMENT_DTYPE)
    positions = np.full(max(space.segments, default=0) + 2, -1, np.int64)
    for position, segment in enumerate(segments):
        row = table[position]
        row["number"], row["seq"], row["scan_from"] = segment.number, segment.seq, segment.scan_from
        row["id"] = np.frombuffer(segment.segment_id, np.uint8)
        positions[segment.number] = position
    return table, positions
