"""Room for new files, and writing them.

A store waits in `_waiting` until it has room. Room is given to batches, oldest first: a batch takes what is free,
and evicts the coldest for the rest. Removing the victims and writing the batch is one task, and the larger of both
sizes is reserved for it, so that neither the account nor the directory ever exceeds the limit.
"""

from __future__ import annotations

from kvstrata.tiers.common.index import Victim
from kvstrata.tiers.common.jobs import Job
from kvstrata.tiers.common.record import HEADER_BYTES
from kvstrata.tiers.common.tasks import Ticket, Waiter
from kvstrata.tiers.fs.core import State
from kvstrata.tiers.fs.loads import TASK_BYTES, TASK_KEYS, Loads
from kvstrata.tiers.fs.tasks import StoreItem, StoreTask, UnlinkTask
from kvstrata.types import KEY_BYTES, FailCause, OffloadKey, TierJob

SCAN_PATIENCE_S = 5.0
"""How long stores wait for the scan that has to end before anything may be written; later they are refused."""
FREE_SPACE_MEMORY_S = 1.0
"""How long what was seen of the device's free space is believed."""


class Stores(Loads):
    """Writing, and the cancelling of jobs."""

    def submit_store(self, job: TierJob) -> None:
        """Write each new key's file. What the limit has no room for, even by eviction, fails as NO_SPACE."""
        if self._context is None or self._place is None or self._is_late():
            self._refuse(job.job_id)
            return
        self._jobs.add(job.job_id, len(job.keys))
        self.touch(job.keys)  # before room is made: what this job names is no victim of it
        stamp = self._stamps(len(job.keys))
        for index, key in enumerate(job.keys):
            self._admit(job, index, key, stamp - index)  # the head is the warmest
        self._publish()
        self._grant()

    def _admit(self, job: TierJob, index: int, key: OffloadKey, stamp: int) -> None:
        place = self._place
        pending = self._pending.get(key)
        if len(key) != KEY_BYTES or place is None:
            self._jobs.settle(job.job_id, index, FailCause.REFUSED)
        elif pending is not None and not pending.cancelled:
            pending.waiters.append(Waiter(job.job_id, index))
        elif self._index.get(key) is not None:
            self._jobs.settle(job.job_id, index, None)
        else:
            need = place.footprint(HEADER_BYTES + job.lengths[index])
            if self._limit is not None and need > self._limit:
                self._jobs.settle(job.job_id, index, FailCause.NO_SPACE)
                return
            payload = self._range(job.job_id, job.offsets[index], job.lengths[index])
            digest = None if job.digests is None else job.digests[index]
            item = StoreItem(key, payload, digest, need, stamp, job.job_id, [Waiter(job.job_id, index)])
            if pending is not None:
                self._doom(pending)
            self._pending[key] = item
            self._waiting.append(item)

    def _is_late(self) -> bool:
        """Whether the scan takes so long that stores are refused rather than kept waiting."""
        return self._scan is not None and self._now() - self._scan.since > SCAN_PATIENCE_S

    def _grant(self) -> None:
        """Give room to waiting stores, oldest first, and hand them over."""
        while self._state is State.READY and self._waiting:
            if self._waiting[0].waiters and not self._waiting[0].doomed:
                if not self._grant_batch():
                    return
            else:
                self._waiting.popleft()

    def _grant_batch(self) -> bool:
        """Hand over the next batch; False if it has to wait for work under way."""
        batch = self._next_batch()
        if batch:
            for _ in batch:
                self._waiting.popleft()
            self._hand_over(batch)
            return True
        if any(isinstance(task, StoreTask | UnlinkTask) and task.place is self._place for task in self._running):
            return False
        item = self._waiting.popleft()
        self._end_item(item, FailCause.NO_SPACE)
        self._publish()
        return True

    def _next_batch(self) -> list[StoreItem]:
        """The items at the head of the queue that can be written now, in one task."""
        index = self._index
        room = index.room
        if room is not None and room < 0:
            return []
        most = None if room is None else room + index.evictable
        spare = self._spare()
        if spare is not None:
            most = min(spare + index.evictable, spare + index.evictable if most is None else most)
        batch: list[StoreItem] = []
        total = 0
        for item in self._waiting:
            total += item.need
            dead = not item.waiters or item.doomed
            dying = item.key in index.dying or self._hidden_name(item.key) in index.dying
            if dead or dying or (most is not None and total > most):
                break
            batch.append(item)
            if len(batch) == TASK_KEYS or total >= TASK_BYTES:
                break
        return batch

    def _spare(self) -> int | None:
        """Bytes that may be written before the device's floor is reached, if known; negative below the floor."""
        if self._free_seen is None:
            return None
        seen_at, free = self._free_seen
        if self._now() - seen_at > FREE_SPACE_MEMORY_S:
            return None
        return free - self._min_free

    def _hand_over(self, batch: list[StoreItem]) -> None:
        """Reserve room for the batch, by evicting the coldest if need be, and submit it."""
        index, place = self._index, self._place
        if place is None:
            return
        need = sum(item.need for item in batch)
        room, spare = index.room, self._spare()
        shortage = max(0 if room is None else need - room, 0 if spare is None else need - spare)
        replaced = [self._hidden_name(item.key) for item in batch]
        victims = self._evict(shortage) + self._condemn(replaced)
        reserved = max(sum(victim.allocated for victim in victims), need)
        index.reserved += reserved
        index.note_peak()
        for item in batch:
            item.granted = True
        self._tell_removed(victims)
        self._submit(StoreTask(place, batch, victims, reserved, self._min_free))

    def _on_stored(self, task: StoreTask) -> None:
        current = task.place is self._place
        if current:
            self._index.reserved -= task.reserved
            self._bury(task.victims, task.kept, done=task.crash is None and not task.abandoned)
            self._note_free(task)
        again = [item for item in task.items if current and self._may_retry(item)]
        for item in task.items:
            if item not in again:
                self._end_item(item, self._outcome(item, task, current=current))
        for item in reversed(again):
            item.retried, item.granted, item.written = True, False, None
            self._waiting.appendleft(item)

    @staticmethod
    def _may_retry(item: StoreItem) -> bool:
        """Whether an item found no room on the device, or that of a victim which would not go, for the first time.

        What the task saw of the device is known now, so that the second try evicts enough.
        """
        failure = None if item.written is None else item.written.failure
        no_space = failure is not None and failure.cause is FailCause.NO_SPACE
        settled = item.retried or item.doomed or item.cancelled or (item.written is not None and item.written.stray)
        return no_space and not settled

    def _outcome(self, item: StoreItem, task: StoreTask, *, current: bool) -> FailCause | None:
        """Why an item failed, or None. A file that is there is counted, and goes at once if its key was removed."""
        written = item.written
        if item.doomed:
            if current:
                self._end_doomed(item)
            for ticket in item.tickets:
                ticket.ok = ticket.ok and current
            return FailCause.CANCELLED
        if written is None:
            return FailCause.IO_ERROR if task.crash is not None else FailCause.CANCELLED
        if written.stray is not None and current:
            self._index.add_stray(*written.stray)
        if written.failure is not None:
            # A store cannot find its target missing: some directory on the way is.
            return FailCause.IO_ERROR if written.failure.cause is FailCause.GONE else written.failure.cause
        if not current:
            return FailCause.IO_ERROR
        owner = self._jobs.open.get(item.owner)
        self._index.add(item.key, written.allocated, fresh=owner is not None)
        self._unsynced[item.key] = None
        if owner is not None:
            first = next((w.index for w in item.waiters if w.job_id == item.owner), len(owner.stored))
            owner.stored[first] = item.key
        return None

    def _end_doomed(self, item: StoreItem) -> None:
        """The write of a removed key has ended: its file goes, if there is one, and its name is free again."""
        written = item.written
        if written is None or written.failure is not None:
            self._index.dying.discard(item.key)
            if written is not None and written.stray is not None:
                self._index.add_stray(*written.stray)
            return
        victim = Victim(item.key, written.allocated)
        self._submit_removal([victim], item.tickets)
        self._index.note_peak()
        item.tickets = []

    def _doom(self, item: StoreItem, ticket: Ticket | None = None) -> None:
        """The key of a store that has not ended was removed. `ticket` waits for the file to be gone, too."""
        item.doomed = True
        if not item.granted:
            self._end_item(item, FailCause.CANCELLED)
            return
        self._pending.pop(item.key, None)
        self._index.dying.add(item.key)
        if ticket is not None:
            ticket.parts += 1
            item.tickets.append(ticket)

    def _end_item(self, item: StoreItem, cause: FailCause | None) -> None:
        """Answer everybody who waits for an item."""
        if self._pending.get(item.key) is item:
            del self._pending[item.key]
        for ticket in item.tickets:
            self._part_done(ticket, ok=True)
        for waiter in item.waiters:
            self._jobs.settle(waiter.job_id, waiter.index, cause)
        item.waiters = []

    def _note_free(self, task: StoreTask) -> None:
        """Remember how much room the device has left after a task."""
        if task.free_bytes is None:
            return
        free = task.free_bytes
        for item in task.items:
            if item.written is not None and item.written.failure is None:
                free -= item.need
            elif item.written is not None and item.written.failure is not None:
                # The device refused though it seemed to have room (a quota, another writer): believe the refusal.
                full = item.written.failure.cause is FailCause.NO_SPACE
                free = min(free, self._min_free) if full else free
        self._free_seen = (self._now(), free)

    def _fail_waiting(self, cause: FailCause) -> None:
        """End all stores that were not handed over."""
        while self._waiting:
            self._end_item(self._waiting.popleft(), cause)

    def cancel(self, job_id: int) -> None:
        """Skip what has not started. The job ends when nothing of it is under way any more."""
        job = self._jobs.open.get(job_id)
        if job is not None:
            self._cancel(job)
            self._publish()

    def _cancel(self, job: Job) -> None:
        job.cancelled = True
        for item in list(self._pending.values()):
            others = [waiter for waiter in item.waiters if waiter.job_id != job.job_id]
            if len(others) == len(item.waiters):
                continue
            if not others and not item.granted:
                self._end_item(item, FailCause.CANCELLED)
            elif not others:
                item.cancelled = True
            elif item.owner != job.job_id:  # the owner's range is read for the others: it waits for that
                for waiter in item.waiters:
                    if waiter.job_id == job.job_id:
                        self._jobs.settle(waiter.job_id, waiter.index, FailCause.CANCELLED)
                item.waiters = others
