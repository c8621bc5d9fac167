"""Stores and log entries on their way to the disk: job -> batches -> a place in the active segment -> a task.

One queue keeps the order: a removal is placed behind the store that it removes, and before one that follows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvstrata.tiers.disk.desk import Desk, Written
from kvstrata.tiers.disk.format import BLOCK, RECORDS_PER_BATCH, BatchKind, Realm, Words
from kvstrata.tiers.disk.index import words_of
from kvstrata.tiers.disk.jobs import Job, WriteOp
from kvstrata.tiers.disk.planning import (
    BatchPlan,
    batch_room,
    even_batches,
    even_size,
    even_slots,
    part_of_slots,
    pieces,
    plan_batches,
)
from kvstrata.tiers.disk.segment import Segment, padded_sum
from kvstrata.tiers.disk.tasks import Done, WriteBatch
from kvstrata.types import DIGEST_BYTES, I64, KEY_BYTES, Bool, FailCause, Flushed, OffloadKey


class Writes:
    """The write queue of a volume. `want_spare` and `sync` are set by the volume: what upkeep does for it."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.unwritten: dict[WriteOp, None] = {}
        """Batches of stores that are queued or in flight, in their order: a set."""
        self.waiters: dict[OffloadKey, list[tuple[Job, int]]] = {}
        self.queue: deque[WriteOp] = deque()
        self.space_cause = FailCause.NO_SPACE
        """Why there is no place, when there is none and none is coming."""
        self.want_spare: Callable[[], bool] = lambda: False
        self.sync: Callable[[Sequence[int]], None] = lambda tickets: None
        self._bytes = 0  # queued or in flight
        segment_bytes = desk.space.sizes.segment_bytes
        self._largest = segment_bytes - BLOCK  # span of a batch
        self._even_room = min(batch_room(segment_bytes), self._largest - BLOCK)

    # jobs

    def submit_new(self, state: Job, packed: bytes, rows: I64, size: int) -> None:
        """Queue a job of distinct keys that are not there.

        `packed`: its keys, concatenated; `rows`: reserved ones; `size`: of each chunk, 0 if they differ.
        """
        self._queue_store(state, range(len(rows)), packed, rows, size)

    def submit(self, state: Job, packed: bytes, words: Words, rows: I64) -> None:
        """Queue what is not held yet, and is not being written. `rows`: where the keys are, or -1."""
        lengths, index = np.array(state.job.lengths, np.int64), self._desk.index
        picks = self._not_pending(state, self._not_held(state, index.held(rows), lengths))
        if picks:
            mine = np.full(len(rows), -1, np.int64)
            mine[picks] = index.reserve(words[picks], lengths[picks])
            self._queue_store(state, picks, packed, mine, even_size(state.job.lengths))

    def _not_held(self, state: Job, held: I64, lengths: I64) -> list[int]:
        """Those picks that are not held; the others are reported."""
        there = held >= 0
        there &= self._same_length(held, there, lengths)
        self._desk.jobs.report(state, np.flatnonzero(there).tolist())
        picks: list[int] = np.flatnonzero(~there).tolist()
        return picks

    def fail(self, job: Job, picks: Iterable[int], cause: FailCause) -> None:
        """These keys of a job did not work."""
        failed = [(pick, cause) for pick in picks]
        self._desk.failures[cause] += len(failed)
        self._desk.jobs.report(job, (), failed)

    def _same_length(self, rows: I64, held: Bool, lengths: I64) -> Bool:
        """Where what is held is what is stored. A version of another length makes room for the new one."""
        index = self._desk.index
        same: Bool = index.length[rows] == lengths
        self._desk.forget_rows(index, np.unique(rows[held & ~same]))
        return same

    def _not_pending(self, state: Job, picks: list[int]) -> list[int]:
        """Those picks that nobody is writing; the others wait for whoever does."""
        keys = [state.job.keys[pick] for pick in picks]
        pending = set(self._pending_of(keys))
        fresh: list[int] = []
        for pick, key in zip(picks, keys, strict=True):
            if key in pending:
                self.waiters.setdefault(key, []).append((state, pick))
            else:
                pending.add(key)
                fresh.append(pick)
        return fresh

    def _pending_of(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Those of the keys that are being written."""
        index = self._desk.index
        if not index.pending or not keys:
            return []
        rows = index.find(words_of(keys))
        return [keys[place] for place in np.flatnonzero(rows != index.held(rows)).tolist()]

    def _queue_store(self, state: Job, picks: Sequence[int], packed: bytes, rows: I64, size: int) -> None:
        """Queue some of a job; `rows`: the reserved row of each key of the job; `size`: of each chunk, or 0."""
        job, desk = state.job, self._desk
        slots = even_slots(job.offsets, size, desk.address) if size <= self._largest - BLOCK else []
        plans: Sequence[BatchPlan]
        if slots:
            plans = even_batches(picks, size, self._even_room)
        else:
            plans = self._plan_uneven(state, picks, rows)
        refused: list[int] = []
        for plan in plans:
            if self._bytes and self._bytes + plan.span > desk.settings.queue_bytes:
                refused += plan.picks
                continue
            self._queue_batch(state, plan, packed, rows, slots)
        if refused:
            self._fail_writes(state, refused, rows, FailCause.REFUSED)

    def _plan_uneven(self, state: Job, picks: Sequence[int], rows: I64) -> list[BatchPlan]:
        job, chosen = state.job, np.array(picks, np.int64)
        sizes = np.array(job.lengths, np.int64)[chosen]
        large = sizes > self._largest - BLOCK
        if large.any():
            self._fail_writes(state, chosen[large].tolist(), rows, FailCause.NO_SPACE)
            chosen, sizes = chosen[~large], sizes[~large]
        memory = np.array(job.offsets, np.int64)[chosen] + self._desk.address
        return plan_batches(chosen, memory, sizes, self._largest) if len(chosen) else []

    def _queue_batch(self, state: Job, plan: BatchPlan, packed: bytes, rows: I64, slots: list[int]) -> None:
        """`slots`: of the whole job, as `even_slots` has them."""
        job, picks = state.job, plan.picks
        first, last = picks[0], picks[-1] + 1
        lengths: Sequence[int]
        memory: Sequence[int]
        if last - first == len(picks):  # neighbours of the job, in its order
            own, packed = rows[first:last], packed[first * KEY_BYTES : last * KEY_BYTES]
            lengths = job.lengths[first : first + 1 if slots else last]
            memory = part_of_slots(slots, lengths[0], first, last) if slots else job.offsets[first:last]
        else:
            own = rows[list(picks)]
            packed = b"".join([job.keys[pick] for pick in picks])
            lengths = job.lengths[first : first + 1] if slots else [job.lengths[pick] for pick in picks]
            memory = [job.offsets[pick] for pick in picks]
        op = WriteOp(BatchKind.RECORDS, self._desk.realm, packed, state, plan, own, list(lengths), list(memory))
        op.digests, op.span = pieces(job.digests, picks), plan.span
        self.unwritten[op] = None
        self._bytes += plan.span
        self.queue.append(op)

    def _fail_writes(self, state: Job, picks: list[int], rows: I64, cause: FailCause) -> None:
        """These keys of a store will not be written; whoever waited for them fails too."""
        self._desk.index.delete(rows[picks])
        self.fail(state, picks, cause)
        self._tell_waiters([state.job.keys[pick] for pick in picks], cause)

    def cancel(self, state: Job) -> None:
        """Drop what of a job is queued, and have workers skip what they have not begun."""
        state.cancelled = True
        for op in [op for op in self.queue if op.job is state and not self._is_awaited(op)]:
            self.queue.remove(op)
            self._end(op, Done(0, FailCause.CANCELLED))
        ops = [(task, self._desk.ops[task]) for task in state.tasks if task in self._desk.ops]
        skip = [task for task, op in ops if not (isinstance(op, WriteOp) and self._is_awaited(op))]
        self._desk.workers.forget(skip)

    def _is_awaited(self, op: WriteOp) -> bool:
        return bool(self.waiters) and not self.waiters.keys().isdisjoint(op.keys)

    # log entries

    def log(self, kind: BatchKind, keys: list[OffloadKey], realm: Realm | None = None, ticket: int = 0) -> None:
        """Queue log entries; the ticket is answered when they are durable."""
        parts = [keys[at : at + RECORDS_PER_BATCH] for at in range(0, len(keys), RECORDS_PER_BATCH)]
        for part in parts or ([[]] if kind is not BatchKind.REMOVE else []):
            op = WriteOp(kind, realm or self._desk.realm, b"".join(part), tickets=[ticket] if ticket else ())
            self._bytes += op.span
            self.queue.append(op)

    def drop_pending(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """What is being written under these keys is not to be seen; returns those keys."""
        dropped = self._pending_of([key for key in set(keys) if len(key) == KEY_BYTES])
        if dropped:
            left, index = set(dropped), self._desk.index
            for op in self.unwritten:
                op.dead |= left.intersection(op.keys)
            index.delete(index.find(words_of(dropped)))
            self._tell_waiters(dropped, FailCause.CANCELLED)
        return dropped

    def drop_all(self) -> None:
        """The same for everything that is being written; the index is given up with it."""
        for op in self.unwritten:
            op.dead |= set(op.keys)
        self._tell_waiters(list(self.waiters), FailCause.CANCELLED)

    def drop_versions(self, rows: I64) -> None:
        """Forget records that are bad, durably in time: a scan must not find them again."""
        if len(rows):
            keys = self._desk.tell_removed(rows)
            self._desk.forget_rows(self._desk.index, rows)
            self.log(BatchKind.REMOVE, keys)

    # places

    def place(self) -> None:
        """Give queued batches their places and hand them over, as far as there is room."""
        if not self.queue:
            return
        wall_us = self._desk.wall_us()
        while self.queue:
            op = self.queue[0]
            span = op.span
            segment = self._segment_for(span, wall_us)
            if segment is None:
                if not self.want_spare():
                    self.fail_all(self.space_cause)
                return
            if not segment.in_window(span):
                return  # an answer is due that makes room in the window
            self.queue.popleft()
            self._write(op, segment, wall_us)

    def _segment_for(self, span: int, wall_us: int) -> Segment | None:
        space = self._desk.space
        if space.active is not None:
            if space.active.has_room(span):
                return space.active
            if not space.spares:
                return None
            self._end_segment(space.active, wall_us)
        return space.promote()

    def _end_segment(self, segment: Segment, wall_us: int) -> None:
        """Tell a later scan that nothing follows, if there is room to say so."""
        if segment.has_room(BLOCK):
            op = WriteOp(BatchKind.END, self._desk.realm)
            self._bytes += op.span
            self._write(op, segment, wall_us)

    def _write(self, op: WriteOp, segment: Segment, wall_us: int) -> None:
        op.segment, op.start = segment, segment.place(op.span)
        task = self.batch_task(self._desk.new_task(op), op, segment, op.start, wall_us)
        if op.job is not None:
            op.job.tasks.append(task.task_id)
        self._desk.workers.push(task)

    def batch_task(self, task_id: int, op: WriteOp, segment: Segment, start: int, wall_us: int) -> WriteBatch:
        """The task that writes a batch at its place."""
        plan = op.plan
        count = len(op.packed) // KEY_BYTES
        straight = plan is not None and plan.straight
        places = [] if straight else [start] * count if plan is None else plan.places_from(start).tolist()
        return WriteBatch(
            task_id,
            segment.number,
            segment.segment_id,
            segment.seq,
            start,
            op.span,
            int(op.kind),
            op.realm.namespace,
            op.realm.layout_tag,
            wall_us,
            op.packed,
            places,
            op.lengths or [0] * count,
            op.memory,
            op.digests,
            straight,
            segment.fresh,
        )

    def fail_all(self, cause: FailCause) -> None:
        """Fail everything that has no place yet."""
        while self.queue:
            self._end(self.queue.popleft(), Done(0, cause, self._desk.detail))

    # answers

    def answered(self, op: WriteOp, done: Done) -> None:
        """A batch was written, or not."""
        if op.segment is not None:
            op.segment.finish(op.start, not done.cause)
        self._end(op, done)

    def _end(self, op: WriteOp, done: Done) -> None:
        self._bytes -= op.span
        job, plan, rows = op.job, op.plan, op.rows
        if job is not None and plan is not None and rows is not None:
            del self.unwritten[op]
            self._end_store(op, job, plan, rows, done)
        elif op.tickets:
            if done.cause or self._desk.leaving:
                self._desk.events.extend(Flushed(ticket, ok=False) for ticket in op.tickets)
            else:
                self.sync(op.tickets)

    def _end_store(self, op: WriteOp, job: Job, plan: BatchPlan, rows: I64, done: Done) -> None:
        cause = FailCause(done.cause) if done.cause else None
        alive = [place for place, key in enumerate(op.keys) if key not in op.dead] if op.dead else None
        if cause is not None:
            self._desk.index.delete(rows if alive is None else rows[alive])
            self.fail(job, plan.picks, cause)
        elif op.segment is not None:
            left, lengths, digests = plan, op.lengths, op.digests or done.digests
            if alive is not None:
                left, rows = plan.part(alive), rows[alive]
                lengths = lengths if len(lengths) == 1 else [lengths[place] for place in alive]
                digests = b"".join([digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] for at in alive])
            payload = sum(lengths) if plan.straight else padded_sum(np.array(lengths, np.int64))
            if len(lengths) == 1:  # of all
                payload *= len(rows)
            if len(rows):
                self._desk.add(Written(rows, digests, op.segment.number, op.start, left), payload)
            self._desk.jobs.report(job, left.picks)
            if alive is not None:
                self.fail(job, sorted(set(plan.picks) - set(left.picks)), FailCause.CANCELLED)
        if self.waiters:
            self._tell_waiters([key for key in op.keys if key not in op.dead], cause)

    def _tell_waiters(self, keys: list[OffloadKey], cause: FailCause | None) -> None:
        if not self.waiters:
            return
        for key in keys:
            for job, pick in self.waiters.pop(key, ()):
                if cause is None:
                    self._desk.jobs.report(job, [pick])
                else:
                    self.fail(job, [pick], cause)
