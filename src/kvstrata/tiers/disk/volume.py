"""An owned directory at work: the front door of an opened disk tier. Lives on the caller's thread; only tasks leave it.

`desk.py` is what the parts share, `writes.py` the way of stores, `reads.py` that of loads, `upkeep.py` the rest. Every
task answers to exactly one operation (`jobs.py`), and `poll` is where answers are taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstrata.tiers.base import TierContext
from kvstrata.tiers.disk.acquire import Acquired
from kvstrata.tiers.disk.desk import Desk, Place, VolumeSettings, Workers
from kvstrata.tiers.disk.format import BatchKind, Realm
from kvstrata.tiers.disk.index import words_of
from kvstrata.tiers.disk.intake import Intake
from kvstrata.tiers.disk.io import Files
from kvstrata.tiers.disk.jobs import Jobs, MoveOp, PrepareOp, ReadOp, SyncOp, TestOp, WriteOp
from kvstrata.tiers.disk.reads import Reads
from kvstrata.tiers.disk.tasks import Done, SelfTest
from kvstrata.tiers.disk.upkeep import Upkeep
from kvstrata.tiers.disk.writes import Writes
from kvstrata.types import I8, KEY_BYTES, FailCause, OffloadKey, Presence, TierEvent, TierJob, TierUsage


class Volume:
    """See the module. `events` is shared with the tier, which hands it out in `poll`."""

    def __init__(
        self,
        files: Files,
        acquired: Acquired,
        workers: Workers,
        context: TierContext,
        settings: VolumeSettings,
        events: list[TierEvent],
        jobs: Jobs,
    ) -> None:
        self.desk = desk = Desk(files, acquired, workers, context, settings, events, jobs)
        self.writes = writes = Writes(desk)
        self.reads = reads = Reads(desk, writes)
        self.upkeep = upkeep = Upkeep(desk, writes)
        self.intake = Intake(desk, writes, reads, context.wake)
        self._wake = context.wake
        self._held: list[tuple[MoveOp | PrepareOp | SyncOp, Done]] = []  # answers that upkeep has not looked at
        self._put_off = False
        writes.want_spare, writes.sync, reads.left = upkeep.want_spare, upkeep.sync, upkeep.leave
        self._next_ticket = 1
        if acquired.bad:
            writes.log(BatchKind.REMOVE, [key for realm, key in acquired.bad if realm == desk.realm])
        self.pump()

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way to or from the disk."""
        return self.settled and not self.writes.queue and self.upkeep.snapshot is None

    @property
    def settled(self) -> bool:
        """Whether everything that was handed over has answered."""
        snapshot = self.upkeep.snapshot
        return not (self.desk.ops or self._held) and (snapshot is None or not snapshot.running)

    @property
    def saving(self) -> bool:
        """Whether nothing but a checkpoint is on its way."""
        return not (self.desk.ops or self._held or self.writes.queue) and self.upkeep.snapshot is not None

    @property
    def put_off(self) -> bool:
        """Whether the last poll has left upkeep to the next one."""
        return self._put_off

    # what the tier is asked

    def probe(self, keys: Sequence[OffloadKey]) -> I8:
        """Presence of each key: what is being written is unknown."""
        self.intake.empty()
        if set(map(len, keys)) != {KEY_BYTES}:
            answers = np.zeros(len(keys), np.int8)
            fit = [place for place, key in enumerate(keys) if len(key) == KEY_BYTES]
            if fit:
                answers[fit] = self.probe([keys[place] for place in fit])
            return answers
        index = self.desk.index
        rows = index.find(words_of(keys))
        answers = (rows >= 0).astype(np.int8)
        answers *= np.int8(Presence.PRESENT)
        if index.pending:
            answers[rows != index.held(rows)] = Presence.UNKNOWN
        return answers

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Mark as used: reclaim writes these again rather than drop them."""
        rows = self.desk.find(keys)
        self.desk.index.stamp[rows[rows >= 0]] = self.desk.next_tick()

    def submit_store(self, job: TierJob) -> None:
        """Queue what is not held yet."""
        if self.intake.add(job, load=False):
            self.pump()

    def submit_load(self, job: TierJob) -> None:
        """Read what is held, in units of neighbours."""
        if self.intake.add(job, load=True):
            self.pump()

    def cancel(self, job_id: int) -> None:
        """Skip what has not begun."""
        self.intake.empty()
        state = self.desk.jobs.open.get(job_id)
        if state is not None:
            self.writes.cancel(state)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Drop keys, those that are being written included, and log it."""
        desk = self.desk
        self.intake.empty()
        gone = self.writes.drop_pending(keys)
        rows = np.unique(desk.find(keys))
        rows = rows[rows >= 0]
        held = desk.tell_removed(rows)
        desk.forget_rows(desk.index, rows)
        if held or gone:
            self.writes.log(BatchKind.REMOVE, held + gone)
            self.pump()

    def purge(self, namespace: bytes) -> int:
        """Drop a namespace; the ticket is answered when that is durable."""
        desk, ticket = self.desk, self._take_ticket()
        self.intake.empty()
        desk.fill_written()
        if namespace == desk.realm.namespace:
            self.writes.drop_all()
        for realm in [realm for realm in desk.indexes if realm.namespace == namespace]:
            index = desk.indexes.pop(realm)
            rows = index.live_rows()
            if realm == desk.realm:
                desk.tell_removed(rows)
                desk.new_index()
            desk.uncount(index, rows)
        self.writes.log(BatchKind.PURGE, [], Realm(namespace, 0), ticket)
        self.pump()
        return ticket

    def flush(self) -> int:
        """The ticket is answered when everything that was stored is durable."""
        ticket = self._take_ticket()
        self.upkeep.sync([ticket])
        self.desk.workers.start()
        return ticket

    def _take_ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket - 1

    def self_test(self, payload: bytes) -> TestOp:
        """Begin a self test; its `outcome` is set by a later `poll`."""
        op = TestOp()
        self.desk.workers.push(SelfTest(self.desk.new_task(op), payload))
        self.desk.workers.start()
        return op

    def usage(self) -> TierUsage:
        """What is held: records count as held, the rest of what is allocated as reserved."""
        desk = self.desk
        held, allocated = desk.space.live_bytes, desk.space.allocated
        limit, peak = desk.space.sizes.limit, max(desk.peak, allocated)
        return TierUsage(held, allocated - held, limit, desk.count, peak, desk.evicted)

    def place_of(self, key: OffloadKey) -> Place | None:
        """Where the payload of a key lies."""
        row = int(self.desk.find([key])[0]) if len(key) == KEY_BYTES else -1
        if row < 0:
            return None
        index = self.desk.index
        return Place(int(index.segment[row]), int(index.offset[row]), int(index.length[row]))

    # answers and time

    def poll(self) -> bool:
        """Take the answers of the workers and go on with what waited for them; whether there was anything to do.

        Upkeep may take a millisecond. It comes when the workers have something to do meanwhile, and an answer to a load
        goes first: then it is left to the next poll, which is asked for at once, but never twice in turn.
        """
        answers, loaded = self.desk.workers.take(), self.desk.loads_answered
        for done in answers:
            self._answered(done)
        self.desk.workers.advance(self.desk.now())
        was_put_off, self._put_off = self._put_off, False
        may_wait = self.desk.loads_answered != loaded and not was_put_off and not self.desk.leaving
        if may_wait and (self._held or self.upkeep.due):
            self._put_off = True
            self._hand_over()
            self._wake()
        else:
            self.pump()
            self.upkeep.step_snapshot()
        return bool(answers) or was_put_off

    def pump(self) -> None:
        """Take waiting jobs in, place queued batches and hand tasks over; then keep a spare segment coming."""
        self._hand_over()
        made = self.desk.tasks_made
        held, self._held = self._held, []
        for op, done in held:
            self._go_on(op, done)
        if not self.desk.leaving:
            self.upkeep.want_spare()
        if held or self.desk.tasks_made != made:
            self._hand_over()

    def _hand_over(self) -> None:
        self.intake.empty()
        if self.desk.leaving:
            self.writes.fail_all(FailCause.CANCELLED)
            return
        self.writes.place()
        self.desk.workers.start()

    def _answered(self, done: Done) -> None:
        op = self.desk.ops.pop(done.task_id, None)
        if done.cause and done.cause != FailCause.CANCELLED:
            self.desk.detail = done.detail
            self.desk.look_needed = True
        match op:
            case WriteOp():
                self.writes.answered(op, done)
            case ReadOp():
                self.desk.loads_answered += 1
                self.reads.answered(op, done)
            case TestOp():
                op.outcome = f"{done.cause}: {done.detail}" if done.cause else ""
            case None:
                return
            case _:
                self._held.append((op, done))

    def _go_on(self, op: MoveOp | PrepareOp | SyncOp, done: Done) -> None:
        match op:
            case MoveOp():
                self.upkeep.move_answered(op, done)
            case PrepareOp():
                self.upkeep.prepare_answered(op, done)
            case SyncOp():
                self.upkeep.sync_answered(op, done)

    # leaving

    def leave(self) -> None:
        """Begin nothing new; what is queued fails."""
        self.intake.empty()
        self.desk.leaving = True
        self.writes.fail_all(FailCause.CANCELLED)

    def save(self) -> None:
        """Write a checkpoint now; blocks. May raise `OSError`."""
        self.upkeep.save()

    def forget_all(self) -> None:
        """The directory is lost: nothing is held any more, and what is queued fails."""
        self.intake.empty()
        rows = self.desk.index.live_rows()
        self.desk.tell_removed(rows)
        self.desk.forget_rows(self.desk.index, rows)
        self.desk.leaving = True
        self.writes.fail_all(FailCause.IO_ERROR)
