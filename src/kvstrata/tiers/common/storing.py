"""Room for new records, and writing them.

A store waits in `_waiting` until it has room. Room is given to batches, oldest first: a batch takes what is free,
and evicts the coldest for the rest. Removing the victims and writing the batch is one task, and the larger of both
sizes is reserved for it, so that neither the account nor the place ever exceeds the limit.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from kvstrata.tiers.common.index import Victim, is_served
from kvstrata.tiers.common.jobs import Job
from kvstrata.tiers.common.task_tier import AnyTask, TaskTier
from kvstrata.tiers.common.tasks import StoreItem, Ticket, Waiter
from kvstrata.types import KEY_BYTES, FailCause, OffloadKey, TierJob

SCAN_PATIENCE_S = 5.0
"""How long stores wait for the scan that has to end before anything may be written; later they are refused."""

AnyItem = TypeVar("AnyItem", bound=StoreItem)


class Storing(TaskTier[AnyTask], Generic[AnyTask, AnyItem]):
    """The stores of one tier, from the job to the batch, and their cancelling.

    A task takes at most `task_keys` items and about `task_bytes` bytes. `max_queue`: most items that wait, None for
    any number.
    """

    def __init__(
        self, name: str, limit: int | None, *, task_keys: int, task_bytes: int, max_queue: int | None = None
    ) -> None:
        super().__init__(name, limit)
        self._task_keys = task_keys
        self._task_bytes = task_bytes
        self._max_queue = max_queue

    def _forget_records(self) -> None:
        super()._forget_records()
        self._pending: dict[OffloadKey, AnyItem] = {}
        """What is to be written or is being written; not what was removed meanwhile."""
        self._waiting: deque[AnyItem] = deque()

    # what each tier has its own way for

    def _takes_stores(self) -> bool:
        raise NotImplementedError

    def _is_ready(self) -> bool:
        """Whether all that is there is known, so that something may be written."""
        raise NotImplementedError

    def _store_item(self, job: TierJob, index: int, stamp: int) -> AnyItem:
        raise NotImplementedError

    def _hand_over(self, batch: list[AnyItem]) -> None:
        """Reserve room for the batch, by evicting the coldest if need be, and submit it."""
        raise NotImplementedError

    def _is_freeing(self) -> bool:
        """Whether work is under way that will free room or names."""
        raise NotImplementedError

    def _hidden_name(self, key: OffloadKey) -> bytes:
        """What a record is called that takes the key's place, but would not be accepted."""
        raise NotImplementedError

    def _spare(self) -> int | None:
        """Bytes that may be written before the device's floor is reached, if known; negative below the floor."""
        return None

    def _feed(self) -> None:
        """Hand over what is queued, where tasks are."""

    def _cancel_loads(self, job: Job) -> None:
        """End what is queued for a job that was cancelled."""

    # room

    def submit_store(self, job: TierJob) -> None:
        """Write each new key's record. What the limit has no room for, even by eviction, fails as NO_SPACE."""
        if not self._takes_stores():
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
        elif self._max_queue is not None and len(self._waiting) >= self._max_queue:
            self._jobs.settle(job.job_id, index, FailCause.REFUSED)
        else:
            item = self._store_item(job, index, stamp)
            if self._limit is not None and item.need > self._limit:
                self._jobs.settle(job.job_id, index, FailCause.NO_SPACE)
                return
            if pending is not None:
                self._doom(pending)
            self._pending[key] = item
            self._waiting.append(item)

    def _grant(self) -> None:
        """Give room to waiting stores, oldest first, and hand them over."""
        while self._is_ready() and self._waiting:
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
        if self._is_freeing():
            return False
        self._end_item(self._waiting.popleft(), FailCause.NO_SPACE)
        self._publish()
        return True

    def _next_batch(self) -> list[AnyItem]:
        """The items at the head of the queue that can be written now, in one task."""
        index = self._index
        room, spare = index.room, self._spare()
        if room is not None and room < 0:
            return []
        most = min((free + index.evictable for free in (room, spare) if free is not None), default=None)
        batch: list[AnyItem] = []
        total = 0
        for item in self._waiting:
            total += item.need
            dead = not item.waiters or item.doomed
            dying = item.key in index.dying or self._hidden_name(item.key) in index.dying
            if dead or dying or (most is not None and total > most):
                break
            batch.append(item)
            if len(batch) == self._task_keys or total >= self._task_bytes:
                break
        return batch

    def _reserve(self, batch: list[AnyItem], victims: list[Victim]) -> int:
        """Reserve what a task needs that removes victims and writes a batch; returns the bytes."""
        reserved = max(sum(victim.allocated for victim in victims), sum(item.need for item in batch))
        self._index.reserved += reserved
        self._index.note_peak()
        for item in batch:
            item.granted = True
        return reserved

    # the end of a store

    def _note_stored(self, item: AnyItem, allocated: int) -> None:
        """A record is there: it counts, and is no victim while its owner has not ended."""
        owner = self._jobs.open.get(item.owner)
        self._index.add(item.key, allocated, fresh=owner is not None)
        if owner is not None:
            first = next((w.index for w in item.waiters if w.job_id == item.owner), len(owner.stored))
            owner.stored[first] = item.key

    def _remove_doomed(self, item: AnyItem, allocated: int) -> None:
        """A record is there whose key was removed meanwhile: it goes at once."""
        self._submit_removal([Victim(item.key, allocated)], item.tickets)
        self._index.note_peak()
        item.tickets = []

    def _doom(self, item: AnyItem, ticket: Ticket | None = None) -> None:
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

    def _end_item(self, item: AnyItem, cause: FailCause | None) -> None:
        """Answer everybody who waits for an item."""
        if self._pending.get(item.key) is item:
            del self._pending[item.key]
        for ticket in item.tickets:
            self._part_done(ticket, ok=True)
        item.tickets = []
        for waiter in item.waiters:
            self._jobs.settle(waiter.job_id, waiter.index, cause)
        item.waiters = []

    def _fail_waiting(self, cause: FailCause) -> None:
        """End all stores that were not handed over."""
        while self._waiting:
            self._end_item(self._waiting.popleft(), cause)

    def _purge(self, namespace: bytes, ticket: Ticket) -> None:
        """Remove all records of a namespace, and what is being written if it is the own one."""
        index = self._index
        names = [name for name in index.entries if not is_served(name) and name.startswith(namespace)]
        if self._context is not None and namespace == self._context.namespace:
            names += [name for name in index.entries if is_served(name)] + list(index.fresh)
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
