"""Room for new records, and writing them.

A store waits in `_waiting` until it has room. Room is given to batches, oldest first: a batch takes what is free,
and evicts the coldest for the rest. Removing the victims and writing the batch is one task, and the larger of both
sizes is reserved for it, so that neither the account nor the part ever exceeds the limit. A write whose outcome is not
known counts as if it had worked, and is removed before anything else of its name is written.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.tiers.common.index import Victim
from kvstrata.tiers.common.jobs import Job
from kvstrata.tiers.common.tasks import Ticket, Waiter
from kvstrata.tiers.server.client import WriteItem, footprint
from kvstrata.tiers.server.core import State
from kvstrata.tiers.server.loads import Loads
from kvstrata.tiers.server.tasks import DiscardTask, RemoveTask, StoreItem, StoreTask
from kvstrata.types import KEY_BYTES, FailCause, OffloadKey, TierJob

SCAN_PATIENCE_S = 5.0
"""How long stores wait for the scan that has to end before anything may be written; later they are refused."""
STORE_PATIENCE = 4
"""A store that was not handed over after so many time-outs is given up."""


class Stores(Loads):
    """Writing, removing, and the cancelling of jobs."""

    def submit_store(self, job: TierJob) -> None:
        """Write each new key's record. What the limit has no room for, even by eviction, fails as NO_SPACE."""
        if self._context is None or self._state not in (State.SCANNING, State.READY) or self._is_late():
            self._refuse(job.job_id)
            return
        self._jobs.add(job.job_id, len(job.keys))
        self.touch(job.keys)  # before room is made: what this job names is no victim of it
        stamp = self._stamps(len(job.keys))
        for index, key in enumerate(job.keys):
            self._admit(job, index, key, stamp - index)  # the head is the warmest
        self._publish()
        self._grant()
        self._feed()

    def _admit(self, job: TierJob, index: int, key: OffloadKey, stamp: int) -> None:
        pending = self._pending.get(key)
        if len(key) != KEY_BYTES:
            self._jobs.settle(job.job_id, index, FailCause.REFUSED)
        elif pending is not None and not pending.cancelled:
            pending.waiters.append(Waiter(job.job_id, index))
        elif self._index.get(key) is not None:
            self._jobs.settle(job.job_id, index, None)
        elif len(self._waiting) >= self._settings.max_queue:
            self._jobs.settle(job.job_id, index, FailCause.REFUSED)
        else:
            need = footprint(self._client, job.lengths[index])
            if self._settings.limit is not None and need > self._settings.limit:
                self._jobs.settle(job.job_id, index, FailCause.NO_SPACE)
                return
            payload = self._range(job.job_id, job.offsets[index], job.lengths[index])
            digest = None if job.digests is None else job.digests[index]
            write = WriteItem(key, payload, digest, stamp)
            deadline = self._now() + STORE_PATIENCE * self._settings.timeout_s
            item = StoreItem(write, need, job.job_id, [Waiter(job.job_id, index)], deadline)
            if pending is not None:
                self._doom(pending)
            self._pending[key] = item
            self._waiting.append(item)

    def _is_late(self) -> bool:
        """Whether the scan takes so long that stores are refused rather than kept waiting."""
        return self._state is State.SCANNING and self._now() - self._scanning_since > SCAN_PATIENCE_S

    def _grant(self) -> None:
        """Give room to waiting stores, oldest first, and hand them over."""
        while self._state is State.READY and self._waiting:
            head = self._waiting[0]
            if not head.waiters or head.doomed:
                self._waiting.popleft()
            elif not self._grant_batch():
                return

    def _grant_batch(self) -> bool:
        """Hand over the next batch; False if it has to wait for work under way."""
        batch = self._next_batch()
        if batch:
            for _ in batch:
                self._waiting.popleft()
            self._hand_over(batch)
            return True
        if self._busy(StoreTask, RemoveTask, DiscardTask):
            return False
        self._end_item(self._waiting.popleft(), FailCause.NO_SPACE)
        self._publish()
        return True

    def _next_batch(self) -> list[StoreItem]:
        """The items at the head of the queue that can be written now, in one task."""
        index = self._index
        room = index.room
        if room is not None and room < 0:
            return []
        most = None if room is None else room + index.evictable
        batch: list[StoreItem] = []
        total = 0
        for item in self._waiting:
            total += item.need
            dead = not item.waiters or item.doomed
            dying = item.key in index.dying or self._hidden_name(item.key) in index.dying
            if dead or dying or (most is not None and total > most):
                break
            batch.append(item)
            if len(batch) == self._settings.task_keys or total >= self._settings.task_bytes:
                break
        return batch

    def _hand_over(self, batch: list[StoreItem]) -> None:
        """Reserve room for the batch, by evicting the coldest if need be, and queue it."""
        index = self._index
        need = sum(item.need for item in batch)
        replaced = self._condemn([self._hidden_name(item.key) for item in batch])
        room = index.room
        evicted = self._evict(0 if room is None else need - room)
        victims = evicted + replaced
        reserved = max(sum(victim.allocated for victim in victims), need)
        index.reserved += reserved
        index.note_peak()
        for item in batch:
            item.granted = True
        self._tell_removed(evicted)
        self._submit(StoreTask(self._client, batch, victims, reserved))

    def _on_stored(self, task: StoreTask) -> None:
        current = task.epoch == self._epoch
        done = task.crash is None and not task.abandoned
        if current:
            self._index.reserved -= task.reserved
            self._bury(task.victims, task.kept, done=done)
        for item in task.items:
            self._end_item(item, self._outcome(item, task, current=current))

    def _outcome(self, item: StoreItem, task: StoreTask, *, current: bool) -> FailCause | None:
        """Why an item failed, or None. A record that is there is counted, and goes at once if its key was removed."""
        write = item.write
        started = not task.abandoned and not item.cancelled
        there = started and (write.failed is None or write.uncertain) and not write.foreign
        if not current:
            return FailCause.CANCELLED if item.doomed else FailCause.IO_ERROR
        if item.doomed:
            self._end_doomed(item, there=there)
            return FailCause.CANCELLED
        if there and write.failed is not None:
            self._index.add(self._hidden_name(item.key), item.need)
        if write.failed is not None:
            # A store cannot find its target missing: something on the way is.
            return FailCause.IO_ERROR if write.failed is FailCause.GONE else write.failed
        self._distrusted.discard(item.key)
        if there:
            owner = self._jobs.open.get(item.owner)
            self._index.add(item.key, item.need, fresh=owner is not None)
            if owner is not None:
                first = next((w.index for w in item.waiters if w.job_id == item.owner), len(owner.stored))
                owner.stored[first] = item.key
        return None

    def _end_doomed(self, item: StoreItem, *, there: bool) -> None:
        """The write of a removed key has ended: its record goes, if there may be one, and its name is free again."""
        if not there:
            self._index.dying.discard(item.key)
            return
        self._submit_removal([Victim(item.key, item.need)], item.tickets)
        self._index.note_peak()
        item.tickets = []

    def _doom(self, item: StoreItem, ticket: Ticket | None = None) -> None:
        """The key of a store that has not ended was removed. `ticket` waits for the record to be gone, too."""
        item.doomed = True
        if not item.granted:
            self._end_item(item, FailCause.CANCELLED)
            return
        self._pending.pop(item.key, None)
        self._index.dying.add(item.key)
        if ticket is not None:
            ticket.parts += 1
            item.tickets.append(ticket)

    def _fail_waiting(self, cause: FailCause) -> None:
        """End all stores that were not handed over."""
        while self._waiting:
            self._end_item(self._waiting.popleft(), cause)

    def _expire_stores(self, now: float) -> None:
        """Give up stores that were not handed over in time."""
        while self._waiting and self._waiting[0].deadline <= now:
            self._end_item(self._waiting.popleft(), FailCause.TIMEOUT)

    # removal

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Drop keys of the own part; a store of one that is under way ends as CANCELLED."""
        if self._state not in (State.SCANNING, State.READY):
            return
        names = dict.fromkeys(keys)
        unknown: list[Victim] = []
        for key in names:
            pending = self._pending.get(key)
            if pending is not None:
                self._doom(pending)
            elif self._state is State.SCANNING and len(key) == KEY_BYTES and self._index.get(key) is None:
                self._removed.add(key)
                unknown.append(Victim(key, 0))
        victims = self._condemn(names)
        self._tell_removed(victims)
        self._index.dying.update(victim.name for victim in unknown)
        self._delete(victims + unknown)
        self._publish()
        self._grant()
        self._feed()

    def _on_removed(self, task: RemoveTask | DiscardTask) -> None:
        done = task.crash is None and not task.abandoned
        if task.epoch == self._epoch:
            self._index.reserved -= task.reserved
            self._bury(task.victims, task.kept, done=done)
        if isinstance(task, DiscardTask):
            self._distrusted.difference_update(item.key for item in task.items)
        else:
            for ticket in task.tickets:
                self._part_done(ticket, ok=done and not task.kept)

    def flush(self) -> int:
        """Answered at once: a write that has ended is as durable as the store makes it."""
        ticket = self._ticket()
        self._part_done(ticket, ok=self._state in (State.SCANNING, State.READY))
        return ticket.number

    def purge(self, namespace: bytes) -> int:
        """Remove all records of a namespace from the own part, also of one that this tier does not serve."""
        ticket = self._ticket()
        if self._state is State.SCANNING:
            self._purges.append((namespace, ticket))
        elif self._state is State.READY:
            self._purge(namespace, ticket)
        else:
            self._answer(ticket, ok=False)
        self._feed()
        return ticket.number

    def _purge(self, namespace: bytes, ticket: Ticket) -> None:
        index = self._index
        names = [name for name in index.entries if len(name) != KEY_BYTES and name.startswith(namespace)]
        if namespace == self._identity.namespace:
            names += [name for name in index.entries if len(name) == KEY_BYTES] + list(index.fresh)
            for item in list(self._pending.values()):
                self._doom(item, ticket)
        victims = self._condemn(names)
        self._tell_removed(victims)
        self._delete(victims, ticket)
        self._part_done(ticket, ok=True)
        self._publish()

    # cancelling

    def cancel(self, job_id: int) -> None:
        """Skip what has not started. The job ends when nothing of it is under way any more."""
        job = self._jobs.open.get(job_id)
        if job is not None:
            self._cancel(job)
            self._publish()
            self._feed()

    def _cancel(self, job: Job) -> None:
        job.cancelled = True
        self._cancel_loads(job)
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
