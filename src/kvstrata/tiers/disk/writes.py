"""Stores and log entries on their way to the disk: job -> batches -> a place in the active segment -> a task.

One queue keeps the order: a removal is placed behind the store that it removes, and before one that follows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvstrata.tiers.disk.desk import Desk, Fresh
from kvstrata.tiers.disk.format import BLOCK, RECORDS_PER_BATCH, BatchKind, Realm
from kvstrata.tiers.disk.jobs import Job, WriteOp
from kvstrata.tiers.disk.planning import BatchPlan, even_batches, even_size, pieces, plan_batches
from kvstrata.tiers.disk.segment import Segment, padded_sum
from kvstrata.tiers.disk.tasks import Done, WriteBatch
from kvstrata.types import DIGEST_BYTES, I64, KEY_BYTES, Bool, FailCause, Flushed, OffloadKey


class Writes:
    """The write queue of a volume. `want_spare` and `sync` are set by the volume: what upkeep does for it."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.pending: dict[OffloadKey, WriteOp] = {}
        self.waiters: dict[OffloadKey, list[tuple[Job, int]]] = {}
        self.queue: deque[WriteOp] = deque()
        self.space_cause = FailCause.NO_SPACE
        """Why there is no place, when there is none and none is coming."""
        self.want_spare: Callable[[], bool] = lambda: False
        self.sync: Callable[[list[int]], None] = lambda tickets: None
        self._bytes = 0  # queued or in flight

    def is_pending(self, key: OffloadKey) -> bool:
        """Whether the key is being written, and was not removed meanwhile."""
        return key in self.pending

    # jobs

    def submit(self, state: Job, packed: bytes, rows: I64) -> None:
        """Queue what is not held yet. `packed`: the job's keys, concatenated; `rows`: where they are, or -1."""
        picks = list(range(len(rows))) if rows.max() < 0 else self._not_held(state, rows)
        fresh = self._not_pending(state, picks, state.job.keys) if picks else picks
        if fresh:
            self._queue_store(state, fresh, packed)

    def _not_held(self, state: Job, rows: I64) -> list[int]:
        """Those picks that are not held; the others are reported."""
        lengths, held = np.array(state.job.lengths, np.int64), rows >= 0
        held &= self._same_length(rows, held, lengths)
        self._desk.jobs.report(state, np.flatnonzero(held).tolist())
        picks: list[int] = np.flatnonzero(~held).tolist()
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

    def _not_pending(self, state: Job, picks: list[int], keys: Sequence[OffloadKey]) -> list[int]:
        """Those picks that nobody is writing; the others wait for whoever does."""
        wanted = keys if len(picks) == len(keys) else [keys[pick] for pick in picks]
        if len(set(wanted)) == len(wanted) and (not self.pending or self.pending.keys().isdisjoint(wanted)):
            return picks
        fresh: list[int] = []
        mine: set[OffloadKey] = set()
        for pick, key in zip(picks, wanted, strict=True):
            if key in mine or key in self.pending:
                self.waiters.setdefault(key, []).append((state, pick))
            else:
                mine.add(key)
                fresh.append(pick)
        return fresh

    def _queue_store(self, state: Job, picks: list[int], packed: bytes) -> None:
        job, desk = state.job, self._desk
        largest = desk.space.sizes.segment_bytes - BLOCK
        size = even_size(job.lengths, job.offsets, desk.address)
        if 0 < size <= largest - BLOCK:
            plans = even_batches(picks, size, largest)
        else:
            plans = self._plan_uneven(state, picks, largest)
        refused: list[int] = []
        for plan in plans:
            if self._bytes and self._bytes + plan.span > desk.settings.queue_bytes:
                refused += plan.picks
                continue
            self._queue_batch(state, plan, packed)
        if refused:
            self._fail_writes(state, refused, FailCause.REFUSED)

    def _plan_uneven(self, state: Job, picks: list[int], largest: int) -> list[BatchPlan]:
        job, chosen = state.job, np.array(picks, np.int64)
        sizes = np.array(job.lengths, np.int64)[chosen]
        large = sizes > largest - BLOCK
        if large.any():
            self._fail_writes(state, chosen[large].tolist(), FailCause.NO_SPACE)
            chosen, sizes = chosen[~large], sizes[~large]
        memory = np.array(job.offsets, np.int64)[chosen] + self._desk.address
        return plan_batches(chosen, memory, sizes, largest) if len(chosen) else []

    def _queue_batch(self, state: Job, plan: BatchPlan, packed: bytes) -> None:
        job, picks = state.job, plan.picks
        first, last = picks[0], picks[-1] + 1
        if plan.straight and last - first == len(picks):  # neighbours of the job, in its order
            keys, packed = list(job.keys[first:last]), packed[first * KEY_BYTES : last * KEY_BYTES]
            lengths, memory = list(job.lengths[first:last]), list(job.offsets[first:last])
        else:
            keys = [job.keys[pick] for pick in picks]
            packed = b"".join(keys)
            lengths, memory = [job.lengths[pick] for pick in picks], [job.offsets[pick] for pick in picks]
        op = WriteOp(BatchKind.RECORDS, self._desk.realm, state, plan, keys, packed)
        op.lengths, op.memory, op.digests = lengths, memory, pieces(job.digests, picks)
        self.pending.update(dict.fromkeys(keys, op))
        self._bytes += plan.span
        self.queue.append(op)

    def _fail_writes(self, state: Job, picks: list[int], cause: FailCause) -> None:
        """These keys of a store will not be written; whoever waited for them fails too."""
        self.fail(state, picks, cause)
        self._tell_waiters([state.job.keys[pick] for pick in picks], cause)

    def cancel(self, state: Job) -> None:
        """Drop what of a job is queued, and have workers skip what they have not begun."""
        state.cancelled = True
        for op in [op for op in self.queue if op.job is state and not self._is_awaited(op)]:
            self.queue.remove(op)
            self._end(op, Done(0, FailCause.CANCELLED))
        ops = {task: self._desk.ops.get(task) for task in state.tasks}
        skip = [task for task, op in ops.items() if not (isinstance(op, WriteOp) and self._is_awaited(op))]
        self._desk.workers.forget(skip)

    def _is_awaited(self, op: WriteOp) -> bool:
        return bool(self.waiters) and not self.waiters.keys().isdisjoint(op.keys)

    # log entries

    def log(self, kind: BatchKind, keys: list[OffloadKey], realm: Realm | None = None, ticket: int = 0) -> None:
        """Queue log entries; the ticket is answered when they are durable."""
        parts = [keys[at : at + RECORDS_PER_BATCH] for at in range(0, len(keys), RECORDS_PER_BATCH)]
        for part in parts or ([[]] if kind is not BatchKind.REMOVE else []):
            op = WriteOp(kind, realm or self._desk.realm, keys=list(part), packed=b"".join(part))
            op.tickets = [ticket] if ticket else []
            self._bytes += op.span
            self.queue.append(op)

    def drop_pending(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """What is being written under these keys is not to be seen; returns those keys."""
        dropped = [key for key in set(keys) if key in self.pending]
        for key in dropped:
            op = self.pending.pop(key)
            op.dead = (op.dead or set()) | {key}
            self._tell_waiters([key], FailCause.CANCELLED)
        return dropped

    def drop_versions(self, rows: I64) -> None:
        """Forget records that are bad, durably in time: a scan must not find them again."""
        if len(rows):
            keys = self._desk.tell_removed(rows)
            self._desk.forget_rows(self._desk.index, rows)
            self.log(BatchKind.REMOVE, keys)

    # places

    def place(self) -> None:
        """Give queued batches their places and hand them over, as far as there is room."""
        while self.queue:
            op = self.queue[0]
            segment = self._segment_for(op.span)
            if segment is None:
                if not self.want_spare():
                    self.fail_all(self.space_cause)
                return
            if not segment.in_window(op.span):
                return  # an answer is due that makes room in the window
            self.queue.popleft()
            self._write(op, segment)

    def _segment_for(self, span: int) -> Segment | None:
        space = self._desk.space
        if space.active is not None:
            if space.active.has_room(span):
                return space.active
            if not space.spares:
                return None
            self._end_segment(space.active)
        return space.promote()

    def _end_segment(self, segment: Segment) -> None:
        """Tell a later scan that nothing follows, if there is room to say so."""
        if segment.has_room(BLOCK):
            op = WriteOp(BatchKind.END, self._desk.realm)
            self._bytes += op.span
            self._write(op, segment)

    def _write(self, op: WriteOp, segment: Segment) -> None:
        op.segment, op.start = segment, segment.place(op.span)
        task = self.batch_task(self._desk.new_task(op), op, segment, op.start)
        op.places = task.places
        if op.job is not None:
            op.job.tasks.add(task.task_id)
        self._desk.workers.push(task)

    def batch_task(self, task_id: int, op: WriteOp, segment: Segment, start: int) -> WriteBatch:
        """The task that writes a batch at its place."""
        plan = op.plan
        places = plan.places_from(start) if plan is not None else [start] * len(op.keys)
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
            self._desk.wall_us(),
            op.packed,
            places,
            op.lengths or [0] * len(op.keys),
            op.memory,
            op.digests,
            plan is not None and plan.straight,
            segment.fresh,
        )

    def fail_all(self, cause: FailCause) -> None:
        """Fail everything that has no place yet."""
        while self.queue:
            self._end(self.queue.popleft(), Done(0, cause, self._desk.detail))

    # answers

    def answered(self, op: WriteOp, done: Done) -> None:
        """A batch was written, or not."""
        segment = op.segment
        if segment is not None:
            segment.finish(op.start, not done.cause)
            if op.job is not None:
                op.job.tasks.discard(done.task_id)
            if not done.cause and op.plan is not None:
                self._add(op, op.plan, segment, op.digests or done.digests)
        self._end(op, done)

    def _add(self, op: WriteOp, plan: BatchPlan, segment: Segment, digests: bytes) -> None:
        fresh = Fresh(op.packed, digests, segment.number, op.places, op.lengths)
        if op.dead:
            alive = [index for index, key in enumerate(op.keys) if key not in op.dead]
            fresh.packed = b"".join([op.keys[index] for index in alive])
            fresh.digests = b"".join([digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] for at in alive])
            fresh.places, fresh.lengths = [op.places[i] for i in alive], [op.lengths[i] for i in alive]
        lengths = fresh.lengths
        self._desk.add(fresh, sum(lengths) if plan.straight else padded_sum(np.array(lengths, np.int64)))

    def _end(self, op: WriteOp, done: Done) -> None:
        self._bytes -= op.span
        if op.job is not None and op.plan is not None:
            self._end_store(op, op.job, op.plan.picks, FailCause(done.cause) if done.cause else None)
        elif op.tickets:
            if done.cause or self._desk.leaving:
                self._desk.events.extend(Flushed(ticket, ok=False) for ticket in op.tickets)
            else:
                self.sync(op.tickets)

    def _end_store(self, op: WriteOp, job: Job, picks: list[int], cause: FailCause | None) -> None:
        dead: set[OffloadKey] = op.dead or set()
        alive = [key for key in op.keys if key not in dead] if dead else op.keys
        for key in alive:
            del self.pending[key]
        if cause is not None:
            self.fail(job, picks, cause)
        elif not dead:
            self._desk.jobs.report(job, picks)
        else:
            pairs = list(zip(picks, op.keys, strict=True))
            self._desk.jobs.report(job, [pick for pick, key in pairs if key not in dead])
            self.fail(job, [pick for pick, key in pairs if key in dead], FailCause.CANCELLED)
        self._tell_waiters(alive, cause)

    def _tell_waiters(self, keys: list[OffloadKey], cause: FailCause | None) -> None:
        if not self.waiters:
            return
        for key in keys:
            for job, pick in self.waiters.pop(key, ()):
                if cause is None:
                    self._desk.jobs.report(job, [pick])
                else:
                    self.fail(job, [pick], cause)
