"""What keeps a volume going: an empty segment always coming, reclaim, flush and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstrata.tiers.disk.desk import Desk
from kvstrata.tiers.disk.format import BLOCK, ID_BYTES, BatchKind, SegmentHeader, pack_segment
from kvstrata.tiers.disk.index import Index, keys_of, words_of
from kvstrata.tiers.disk.jobs import MoveOp, PrepareOp, SyncOp, WriteOp
from kvstrata.tiers.disk.planning import BatchPlan
from kvstrata.tiers.disk.reclaim import plan_moves, split_hot
from kvstrata.tiers.disk.segment import Segment, SegmentState, padded_sum
from kvstrata.tiers.disk.snapshot import Snapshot
from kvstrata.tiers.disk.tasks import Done, MoveBatch, Prepare, Sync
from kvstrata.tiers.disk.work import NOT_THERE, segment_name
from kvstrata.tiers.disk.writes import Writes
from kvstrata.types import I64, FailCause, Flushed, KeysRemoved, OffloadKey

_AHEAD = 4
"""Most spares, while there is room for files that are not there yet. What is recycled is made one at a time."""
_RETRY_FIRST_S = 0.5
_RETRY_MOST_S = 10.0


class Upkeep:
    """Reclaim, preparation, flush and checkpoints of a volume."""

    def __init__(self, desk: Desk, writes: Writes) -> None:
        self._desk = desk
        self._writes = writes
        self._moves = 0
        self._targets: set[int] = set()  # where the hot chunks of the segment being reclaimed went
        self._departing: list[OffloadKey] = []
        self._broken: Segment | None = None
        self._retry_s = _RETRY_FIRST_S
        self._prepare_at = self._create_at = float("-inf")
        self._last_sync: SyncOp | None = None
        self.snapshot: Snapshot | None = None

    # an empty segment

    @property
    def due(self) -> bool:
        """Whether there may be something to do."""
        return self.snapshot is not None or self._wants_spare

    @property
    def _wants_spare(self) -> bool:
        """Whether one more empty segment should come. One that is recycled is made when the last one has gone."""
        space = self._desk.space
        return space.changing is None and (not space.spares or (len(space.spares) < _AHEAD and space.may_create()))

    def want_spare(self) -> bool:
        """Keep one empty segment coming; False if there is none and none can come now."""
        if not self._wants_spare:
            return True
        space, now = self._desk.space, self._desk.now()
        if space.spares:
            self._create_ahead(now)
            return True
        if now < self._prepare_at:
            return False
        if self._broken is not None:
            segment, self._broken = self._broken, None
            space.changing = segment
            self._prepare(segment, created=False)
            return True
        if now >= self._create_at and space.may_create():
            self._prepare(space.create(self._is_taken), created=True)
            return True
        victim = space.oldest()
        if victim is None:
            return False
        if not victim.unfinished:
            self._reclaim(victim)
        return True

    def _create_ahead(self, now: float) -> None:
        """New files take longer to make than to fill where they are small, so a few are made before they are needed."""
        if self._broken is None and now >= max(self._create_at, self._prepare_at):
            self._prepare(self._desk.space.create(self._is_taken), created=True)

    def _is_taken(self, number: int) -> bool:
        try:
            return self._desk.files.stat(self._desk.acquired.directory, segment_name(number)) is not None
        except OSError:
            return False  # then creating it will say what is wrong

    def _reclaim(self, victim: Segment) -> None:
        desk = self._desk
        desk.fill_written(victim.number)
        victim.move(SegmentState.RECLAIMING)
        desk.space.changing = victim
        for realm, index in list(desk.indexes.items()):
            rows = index.rows_of_segment(victim.number)
            if realm == desk.realm:
                self._evict(index, self._move_hot(index, rows, victim))
            elif len(rows):
                desk.forget_rows(index, rows)
                if not index.count:
                    del desk.indexes[realm]
        self.leave(victim)

    def _move_hot(self, index: Index, rows: I64, victim: Segment) -> I64:
        """Begin to move what was used since it was written; returns the rows that are dropped."""
        desk, active = self._desk, self._desk.space.active
        if active is None or not index.stamp[rows].any():
            return rows
        room = active.size - active.cursor
        hot, cold = split_hot(index, rows, int(min(room, victim.size * desk.settings.hot_share)))
        for plan in plan_moves(index, hot, desk.space.sizes.segment_bytes - BLOCK):
            chosen = hot[plan.picks]
            if not active.has_room(plan.span) or not active.in_window(plan.span):
                cold = np.concatenate([cold, chosen])
                continue
            self._move(index, chosen, plan, victim, active)
        return cold

    def _move(self, index: Index, rows: I64, plan: BatchPlan, victim: Segment, target: Segment) -> None:
        desk = self._desk
        start = target.place(plan.span)
        old, lengths = index.offset[rows].astype(np.int64), index.length[rows].astype(np.int64)
        new = plan.places_from(start)
        op = MoveOp(index, index.key[rows], victim, old, target, start, new)
        batch = WriteOp(BatchKind.RECORDS, desk.realm, op.words.tobytes(), plan=plan)
        batch.digests = index.digest[rows].tobytes()
        batch.lengths, batch.span = lengths.tolist(), plan.span
        self._moves += 1
        self._targets.add(target.number)
        task = self._writes.batch_task(0, batch, target, start, desk.wall_us())
        desk.workers.push(MoveBatch(desk.new_task(op), victim.number, old.tolist(), task))

    def move_answered(self, op: MoveOp, done: Done) -> None:
        """Hot records lie at their new place, or are lost to it."""
        desk, index = self._desk, op.index
        desk.fill_written()
        self._moves -= 1
        op.target.finish(op.start, not done.cause)
        if index is desk.index:  # else it was purged meanwhile
            rows = index.find(op.words)
            ours = (rows >= 0) & (index.segment[rows] == op.source.number) & (index.offset[rows] == op.old)
            bad = np.zeros(len(rows), np.bool_)
            bad[[i for i, _ in done.failed]] = True
            if done.cause:
                self._evict(index, rows[ours])
            else:
                self._relocate(index, rows[ours & ~bad], op.target, op.new[ours & ~bad])
                desk.failures[FailCause.CORRUPT] += int((ours & bad).sum())
                self._writes.drop_versions(rows[ours & bad])
        self.leave(op.source)

    def _relocate(self, index: Index, rows: I64, target: Segment, places: I64) -> None:
        desk = self._desk
        desk.uncount(index, rows)
        index.segment[rows] = target.number
        index.offset[rows] = places
        index.stamp[rows] = 0
        desk.moved += len(rows)
        desk.space.held(target.number, len(rows), padded_sum(index.length[rows]))

    def _evict(self, index: Index, rows: I64) -> None:
        if len(rows):
            self._departing += keys_of(index.key[rows])
            self._desk.forget_rows(index, rows)

    def _tell_departed(self) -> None:
        """Evictions are told once no crash can undo them. What was stored again meanwhile is there."""
        desk = self._desk
        keys, self._departing = self._departing, []
        if keys:
            gone = desk.index.find_held(words_of(keys)) < 0
            keys = [keys[place] for place in np.flatnonzero(gone).tolist()]
        if keys:
            desk.events.append(KeysRemoved(keys))
            desk.evicted += len(keys)

    def leave(self, segment: Segment) -> None:
        """Once nobody reads a reclaimed segment, its next life may begin."""
        if segment.state is SegmentState.RECLAIMING and not (segment.readers or self._moves or self._desk.leaving):
            segment.move(SegmentState.PREPARING)
            self._prepare(segment, created=False)

    def _prepare(self, segment: Segment, *, created: bool) -> None:
        desk = self._desk
        # What was moved out must be durable before its old place is overwritten.
        synced = [] if created else sorted(self._targets)
        segment.fresh = created
        desk.space.begin_life(segment, desk.files.random_bytes(ID_BYTES), desk.wall_us())
        header = SegmentHeader(segment.segment_id, segment.seq, desk.acquired.epoch, segment.size, segment.wall_us)
        desk.peak = max(desk.peak, desk.space.allocated)
        task_id = desk.new_task(PrepareOp(segment, created))
        block, min_free = pack_segment(header), desk.settings.min_free
        desk.workers.push(Prepare(task_id, segment.number, segment.size, created, block, synced, min_free))

    def prepare_answered(self, op: PrepareOp, done: Done) -> None:
        """An empty segment is there, or could not be made."""
        self._tell_departed()
        space = self._desk.space
        if not done.cause:
            self._targets.clear()
            self._retry_s = _RETRY_FIRST_S
            space.prepared(op.segment)
            if space.sealed_since_checkpoint >= self._desk.settings.checkpoint_segments:
                self.checkpoint()
            return
        if done.failed and done.failed[0][1] == NOT_THERE:
            space.forget(op.segment)
        else:  # a file may be left: it counts, and is prepared again
            space.changing = None
            self._broken = op.segment
        self._back_off(FailCause(done.cause), created=op.created)

    def _back_off(self, cause: FailCause, *, created: bool) -> None:
        until = self._desk.now() + self._retry_s
        self._retry_s = min(self._retry_s * 2, _RETRY_MOST_S)
        self._writes.space_cause = cause
        if created and cause is FailCause.NO_SPACE:
            # The device is full: go on with the segments that there are, if there are enough.
            self._create_at = until
            if self._desk.space.oldest() is not None:
                return
        self._prepare_at = until

    # durability

    def sync(self, tickets: Sequence[int], *, then_checkpoint: bool = False) -> None:
        """Make everything durable that was written; tickets are answered then."""
        desk = self._desk
        dirty = desk.space.dirty()
        if not dirty and not then_checkpoint:
            if self._last_sync is not None:
                self._last_sync.tickets += tickets
            else:
                desk.events.extend(Flushed(ticket) for ticket in tickets)
            return
        op = SyncOp(dirty, list(tickets), then_checkpoint)
        if self._last_sync is not None:
            # An earlier sync is on its way with segments that are no longer marked: both must have worked.
            op.segments = list({s.number: s for s in [*self._last_sync.segments, *dirty]}.values())
        for segment in dirty:
            segment.dirty = False
        self._last_sync = op
        desk.workers.push(Sync(desk.new_task(op), [segment.number for segment in op.segments]))

    def sync_answered(self, op: SyncOp, done: Done) -> None:
        """Segments are durable, or could not be made so."""
        if self._last_sync is op:
            self._last_sync = None
        if done.cause:
            for segment in op.segments:
                segment.dirty = True
        self._desk.events.extend(Flushed(ticket, ok=not done.cause) for ticket in op.tickets)
        if op.then_checkpoint and self.snapshot is not None:
            if done.cause:
                self.snapshot = None
            else:
                self.snapshot.ready = True

    def checkpoint(self) -> None:
        """Begin a checkpoint, unless one is on its way or there is no room for it."""
        desk = self._desk
        if self.snapshot is None and self._checkpoint_fits():
            desk.space.sealed_since_checkpoint = 0
            self.snapshot = Snapshot(desk.indexes, desk.space, desk.wall_us())
            self.sync([], then_checkpoint=True)

    def _checkpoint_fits(self) -> bool:
        desk = self._desk
        desk.fill_written()  # what was answered before a checkpoint has to be in it
        return desk.space.checkpoint_fits(len(desk.indexes), sum(index.count for index in desk.indexes.values()))

    def step_snapshot(self) -> None:
        """Go on with a checkpoint that has begun."""
        snapshot = self.snapshot
        if snapshot is None:
            return
        if snapshot.outcome is not None:
            self.snapshot = None
        elif snapshot.step() and not snapshot.submitted:
            snapshot.submit(self._desk.files, self._desk.acquired.directory, self._desk.context)

    def save(self) -> None:
        """Write a whole checkpoint now; blocks. For `close`, when nothing is on its way. May raise `OSError`."""
        desk = self._desk
        if not self._checkpoint_fits():
            return
        snapshot = Snapshot(desk.indexes, desk.space, desk.wall_us())
        snapshot.ready = True
        while not snapshot.step():
            pass
        snapshot.write(desk.files, desk.acquired.directory)
