"""Jobs on their way into a volume: what comes while the disk is busy anyway is looked up together.

A look into the index costs the same for a few keys as for many, so the jobs of a busy tier wait for each other: until
the next poll, which is asked for at once, or until they are many. A job that finds the tier idle goes its way at once.
Every other question to the volume takes them in first, so nobody sees a difference.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstrata.tiers.disk.desk import Desk
from kvstrata.tiers.disk.format import KEY_WORDS, Words
from kvstrata.tiers.disk.index import hashes_of
from kvstrata.tiers.disk.jobs import Job
from kvstrata.tiers.disk.planning import even_size
from kvstrata.tiers.disk.reads import Found, Reads
from kvstrata.tiers.disk.writes import Writes
from kvstrata.types import I64, KEY_BYTES, FailCause, TierJob

_MOST_KEYS = 1024


class Intake:
    """The jobs that wait. `wake` is called when a poll is wanted."""

    def __init__(self, desk: Desk, writes: Writes, reads: Reads, wake: Callable[[], None]) -> None:
        self._desk = desk
        self._writes = writes
        self._reads = reads
        self._wake = wake
        self._waiting: list[tuple[TierJob, bool]] = []
        self._keys = 0

    def add(self, job: TierJob, *, load: bool) -> bool:
        """Take the job in, or let it wait; whether it was taken in, with all that waited."""
        self._waiting.append((job, load))
        self._keys += len(job.keys)
        if self._desk.ops and self._keys < _MOST_KEYS:
            if len(self._waiting) == 1:
                self._wake()
            return False
        self.empty()
        return True

    def empty(self) -> None:
        """Take in what waits."""
        if not self._waiting:
            return
        waiting, self._waiting, self._keys = self._waiting, [], 0
        accepted: list[tuple[Job, bool, bytes]] = []
        for job, load in waiting:
            state = self._desk.jobs.begin(job)
            if not state.left:
                continue
            if [*map(len, job.keys)].count(KEY_BYTES) == len(job.keys):
                accepted.append((state, load, b"".join(job.keys)))
            else:  # keys of another length cannot be held; a job with one is refused
                self._writes.fail(state, range(len(job.keys)), FailCause.REFUSED)
        if accepted:
            self._take_in(accepted)

    def _take_in(self, accepted: list[tuple[Job, bool, bytes]]) -> None:
        stores = [(state, packed) for state, load, packed in accepted if not load]
        if stores and self._store_new(stores):
            accepted = [each for each in accepted if each[1]]
        if not accepted:
            return
        index = self._desk.index
        words = _words([packed for _, _, packed in accepted])
        rows = index.find(words)
        held = index.held(rows)
        singles = self._singles(held) if any(load and state.left == 1 for state, load, _ in accepted) else None
        found = self._found(held) if any(load and state.left > 1 for state, load, _ in accepted) else None
        changes, at = index.changes, 0
        for state, load, packed in accepted:
            end = at + state.left
            if index.changes != changes:  # a job before this one dropped a version, or reserved rows
                rows[at:end] = index.find(words[at:end])
                held[at:end] = index.held(rows[at:end])
                singles = found = None
            if not load:
                self._writes.submit(state, packed, words[at:end], rows[at:end])
            elif not (
                (singles is not None and end == at + 1 and self._reads.submit_one(state, *singles[at]))
                or (found is not None and self._reads.submit_even(state, held[at:end], found.part(at, end)))
            ):
                self._reads.submit(state, held[at:end])
            at = end

    def _store_new(self, stores: list[tuple[Job, bytes]]) -> bool:
        """Take in all stores at once, if nothing of them seems to be there and no key to come twice."""
        sizes = [even_size(state.job.lengths) for state, _ in stores]
        even = sizes[0] if sizes.count(sizes[0]) == len(sizes) else 0
        lengths = even or [length for state, _ in stores for length in state.job.lengths]
        words = _words([packed for _, packed in stores])
        rows = self._desk.reserve_absent(words, lengths, hashes_of(words))
        if rows is None:
            return False
        at = 0
        for (state, packed), size in zip(stores, sizes, strict=True):
            end = at + state.left
            self._writes.submit_new(state, packed, rows[at:end], size)
            at = end
        return True

    def _found(self, rows: I64) -> Found:
        """What the index has in these rows, by one call for all jobs."""
        index = self._desk.index
        lengths = np.where(rows >= 0, index.length.take(rows), -1).tolist()
        homes, places = index.segment.take(rows).tolist(), index.offset.take(rows).tolist()
        return Found(lengths, homes, places, index.digest.take(rows, axis=0).tobytes())

    def _singles(self, rows: I64) -> list[tuple[int, int, int, int, bytes]]:
        """Row, segment, place, length (-1: not held) and digest of each: for jobs of one key, by one call for all."""
        index = self._desk.index
        lengths = np.where(rows >= 0, index.length.take(rows), -1).tolist()
        digests = index.digest.take(rows, axis=0).view("V16").ravel().tolist()
        segments, places = index.segment.take(rows).tolist(), index.offset.take(rows).tolist()
        return list(zip(rows.tolist(), segments, places, lengths, digests, strict=True))


def _words(packed: list[bytes]) -> Words:
    """The keys of several jobs, as `index.words_of` has them."""
    return np.frombuffer(b"".join(packed), "<u4").reshape(-1, KEY_WORDS)
