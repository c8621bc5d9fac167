"""Loads: index -> units of neighbouring records -> tasks that read into the slots and verify there."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from kvstrata.tiers.disk.desk import Desk
from kvstrata.tiers.disk.format import BLOCK, SECTOR
from kvstrata.tiers.disk.index import words_of
from kvstrata.tiers.disk.jobs import Job, ReadOp
from kvstrata.tiers.disk.planning import even_parts, even_size, even_slots, part_of_slots, plan_units
from kvstrata.tiers.disk.segment import Segment
from kvstrata.tiers.disk.tasks import Done, ReadEven, ReadUnit
from kvstrata.tiers.disk.writes import Writes
from kvstrata.types import DIGEST_BYTES, I64, FailCause, OffloadKey


class Found(msgspec.Struct, frozen=True, gc=False):
    """Where some keys lie: length (-1: not held), segment and place of each, and their digests, concatenated."""

    lengths: list[int]
    homes: list[int]
    places: list[int]
    digests: bytes

    def part(self, begin: int, end: int) -> Found:
        """Those of one job."""
        digests = self.digests[begin * DIGEST_BYTES : end * DIGEST_BYTES]
        return Found(self.lengths[begin:end], self.homes[begin:end], self.places[begin:end], digests)


class Reads:
    """The loads of a volume. `left` is set by the volume: called when a unit no longer reads its segment."""

    def __init__(self, desk: Desk, writes: Writes) -> None:
        self._desk = desk
        self._writes = writes
        self.left: Callable[[Segment], None] = lambda segment: None

    def submit(self, state: Job, rows: I64) -> None:
        """Read what is held. `rows`: where the job's keys are, or -1."""
        job, index, writes = state.job, self._desk.index, self._writes
        if rows.min() >= 0 and index.length.take(rows).tolist() == list(job.lengths):
            self._read(state, np.arange(len(rows)), rows, np.array(job.lengths, np.int64))
            return
        lengths = np.array(job.lengths, np.int64)
        found = rows >= 0
        if not found.all():
            writes.fail(state, np.flatnonzero(~found).tolist(), FailCause.GONE)
        unlike = found & (index.length[rows] != lengths)
        if unlike.any():
            writes.fail(state, np.flatnonzero(unlike).tolist(), FailCause.WRONG_SIZE)
            writes.drop_versions(np.unique(rows[unlike]))
            found &= ~unlike
        picks = np.flatnonzero(found)
        if len(picks):
            self._read(state, picks, rows[picks], lengths[picks])

    def submit_one(self, state: Job, row: int, home: int, place: int, length: int, digest: bytes) -> bool:
        """The same for a job of one key that is held with this length; False if the job wants another."""
        desk, job = self._desk, state.job
        memory = job.offsets[0]
        if job.lengths[0] != length:
            return False
        desk.index.stamp[row] = desk.next_tick()
        segment = desk.space.segments[home]
        straight = length >= BLOCK and not (length | (memory + desk.address)) % SECTOR
        segment.readers += 1
        places = [place]
        task_id = desk.new_task(ReadOp(state, [0], segment, places))
        state.tasks.append(task_id)
        desk.workers.push(ReadUnit(task_id, home, places, [length], [memory], digest, desk.settings.verify, straight))
        return True

    def submit_even(self, state: Job, rows: I64, found: Found) -> bool:
        """The same for a job whose keys, all held, have straight slots of one size and lie in its order.

        False if it is not of that kind.
        """
        desk, index, job = self._desk, self._desk.index, state.job
        size = even_size(job.lengths)
        slots = even_slots(job.offsets, size, desk.address)
        if not slots or found.lengths.count(size) != len(found.lengths):
            return False
        homes, places, digests = found.homes, found.places, found.digests
        parts = even_parts(homes, places, max(desk.workers.load_bytes // size, 1))
        if parts is None:
            return False
        index.stamp[rows] = desk.next_tick()
        verify = desk.settings.verify
        for a, b in parts:
            segment, numbers = desk.space.segments[homes[a]], places[a:b]
            segment.readers += 1
            task_id = desk.new_task(ReadOp(state, range(a, b), segment, numbers))
            state.tasks.append(task_id)
            own = digests[a * DIGEST_BYTES : b * DIGEST_BYTES]
            memory = part_of_slots(slots, size, a, b)
            desk.workers.push(ReadEven(task_id, homes[a], size, numbers, memory, own, verify))
        return True

    def _read(self, state: Job, picks: I64, rows: I64, lengths: I64) -> None:
        desk, index = self._desk, self._desk.index
        index.stamp[rows] = desk.next_tick()
        segments, places = index.segment[rows].astype(np.int64), index.offset[rows].astype(np.int64)
        memory = np.array(state.job.offsets, np.int64)[picks]
        digests = index.digest[rows]
        for unit in plan_units(segments, places, lengths, memory + desk.address):
            chosen = unit.picks
            segment = desk.space.segments[unit.segment]
            segment.readers += 1
            numbers = places[chosen].tolist()
            op = ReadOp(state, picks[chosen].tolist(), segment, numbers)
            task = ReadUnit(
                desk.new_task(op), unit.segment, numbers, lengths[chosen].tolist(), memory[chosen].tolist(),
                digests[chosen].tobytes(), desk.settings.verify, unit.straight,
            )  # fmt: skip
            state.tasks.append(task.task_id)
            desk.workers.push(task)

    def answered(self, op: ReadOp, done: Done) -> None:
        """A unit was read, in whole, in part or not at all."""
        op.segment.readers -= 1
        if done.cause:
            self._writes.fail(op.job, op.picks, FailCause(done.cause))
        elif not done.failed:
            self._desk.loaded += len(op.picks)
            self._desk.jobs.report(op.job, op.picks)
        else:
            self._in_part(op, done)
        self.left(op.segment)

    def _in_part(self, op: ReadOp, done: Done) -> None:
        desk = self._desk
        failed = {index: FailCause(cause) for index, cause in done.failed if index < len(op.picks)}
        good = [pick for index, pick in enumerate(op.picks) if index not in failed]
        bad = [index for index, cause in failed.items() if cause.is_content]
        desk.failures.update(failed.values())
        desk.loaded += len(good)
        keys = op.job.job.keys
        desk.jobs.report(op.job, good, [(op.picks[index], cause) for index, cause in failed.items()])
        if bad:
            self._drop_version([keys[op.picks[i]] for i in bad], op.segment, [op.places[i] for i in bad])

    def _drop_version(self, keys: list[OffloadKey], segment: Segment, places: list[int]) -> None:
        """Only what was read is bad: a version that was stored meanwhile lies elsewhere."""
        self._desk.fill_written()
        index = self._desk.index
        rows = index.find(words_of(keys))
        ours = (rows >= 0) & (index.segment[rows] == segment.number) & (index.offset[rows] == places)
        self._writes.drop_versions(np.unique(rows[ours]))
