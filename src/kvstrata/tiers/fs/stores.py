"""Writing files, and what is known of the device's room (the stores of a job: common/storing.py)."""

from __future__ import annotations

from kvstrata.tiers.common.record import HEADER_BYTES
from kvstrata.tiers.common.storing import SCAN_PATIENCE_S
from kvstrata.tiers.common.tasks import Waiter
from kvstrata.tiers.fs.loads import Loads
from kvstrata.tiers.fs.tasks import StoreItem, StoreTask, UnlinkTask
from kvstrata.types import FailCause, TierJob

FREE_SPACE_MEMORY_S = 1.0
"""How long what was seen of the device's free space is believed."""


class Stores(Loads):
    """Writing."""

    def _takes_stores(self) -> bool:
        return self._context is not None and self._place is not None and not self._is_late()

    def _store_item(self, job: TierJob, index: int, stamp: int) -> StoreItem:
        length = job.lengths[index]
        return StoreItem(
            job.keys[index],
            self._held_place.footprint(HEADER_BYTES + length),
            job.job_id,
            [Waiter(job.job_id, index)],
            payload=self._range(job.job_id, job.offsets[index], length),
            digest=None if job.digests is None else job.digests[index],
            mtime_ns=stamp,
        )

    def _is_late(self) -> bool:
        """Whether the scan takes so long that stores are refused rather than kept waiting."""
        return self._scan is not None and self._now() - self._scan.since > SCAN_PATIENCE_S

    def _is_freeing(self) -> bool:
        kinds = StoreTask | UnlinkTask
        return any(isinstance(task, kinds) and task.place is self._place for task in self._running)

    def _spare(self) -> int | None:
        if self._free_seen is None:
            return None
        seen_at, free = self._free_seen
        if self._now() - seen_at > FREE_SPACE_MEMORY_S:
            return None
        return free - self._min_free

    def _hand_over(self, batch: list[StoreItem]) -> None:
        need = sum(item.need for item in batch)
        room, spare = self._index.room, self._spare()
        shortage = max(0 if room is None else need - room, 0 if spare is None else need - spare)
        replaced = [self._hidden_name(item.key) for item in batch]
        victims = self._evict(shortage) + self._condemn(replaced)
        reserved = self._reserve(batch, victims)
        self._tell_removed(victims)
        self._submit(StoreTask(self._held_place, batch, victims, reserved, self._min_free))

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
        self._note_stored(item, written.allocated)
        self._unsynced[item.key] = None
        return None

    def _end_doomed(self, item: StoreItem) -> None:
        """The write of a removed key has ended: its file goes, if there is one, and its name is free again."""
        written = item.written
        if written is None or written.failure is not None:
            self._index.dying.discard(item.key)
            if written is not None and written.stray is not None:
                self._index.add_stray(*written.stray)
            return
        self._remove_doomed(item, written.allocated)

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
