"""Writing records, and removing them (the stores of a job: common/storing.py).

A write whose outcome is not known counts as if it had worked, and is removed before anything else of its name is
written.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.tiers.common.index import Victim
from kvstrata.tiers.common.storing import SCAN_PATIENCE_S
from kvstrata.tiers.common.tasks import Waiter
from kvstrata.tiers.server.client import WriteItem, footprint
from kvstrata.tiers.server.core import State
from kvstrata.tiers.server.loads import Loads
from kvstrata.tiers.server.tasks import DiscardTask, RemoveTask, StoreItem, StoreTask
from kvstrata.types import KEY_BYTES, FailCause, OffloadKey, TierJob

STORE_PATIENCE = 4
"""A store that was not handed over after so many time-outs is given up."""


class Stores(Loads):
    """Writing and removing."""

    def _takes_stores(self) -> bool:
        return self._context is not None and self._holds_part() and not self._is_late()

    def _holds_part(self) -> bool:
        return self._state in (State.SCANNING, State.READY)

    def _store_item(self, job: TierJob, index: int, stamp: int) -> StoreItem:
        key, length = job.keys[index], job.lengths[index]
        payload = self._range(job.job_id, job.offsets[index], length)
        digest = None if job.digests is None else job.digests[index]
        return StoreItem(
            key,
            footprint(self._client, length),
            job.job_id,
            [Waiter(job.job_id, index)],
            write=WriteItem(key, payload, digest, stamp),
            deadline=self._now() + STORE_PATIENCE * self._settings.timeout_s,
        )

    def _is_late(self) -> bool:
        """Whether the scan takes so long that stores are refused rather than kept waiting."""
        return self._state is State.SCANNING and self._now() - self._scanning_since > SCAN_PATIENCE_S

    def _is_freeing(self) -> bool:
        return self._busy(StoreTask, RemoveTask, DiscardTask)

    def _hand_over(self, batch: list[StoreItem]) -> None:
        replaced = self._condemn([self._hidden_name(item.key) for item in batch])
        room = self._index.room
        evicted = self._evict(0 if room is None else sum(item.need for item in batch) - room)
        victims = evicted + replaced
        reserved = self._reserve(batch, victims)
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
        self._outdate([victim.name for victim in task.victims])

    def _outcome(self, item: StoreItem, task: StoreTask, *, current: bool) -> FailCause | None:
        """Why an item failed, or None. A record that is there is counted, and goes at once if its key was removed."""
        write = item.write
        started = not task.abandoned and not item.cancelled
        there = started and (write.failed is None or write.uncertain) and not write.foreign
        if not current:
            return FailCause.CANCELLED if item.doomed else FailCause.IO_ERROR
        if item.doomed:
            if there:
                self._remove_doomed(item, item.need)
            else:
                self._index.dying.discard(item.key)
            return FailCause.CANCELLED
        if there and write.failed is not None:
            self._index.add(self._hidden_name(item.key), item.need)
        if write.failed is not None:
            # A store cannot find its target missing: something on the way is.
            return FailCause.IO_ERROR if write.failed is FailCause.GONE else write.failed
        self._distrusted.discard(item.key)
        if there:
            self._note_stored(item, item.need)
        return None

    def _expire_stores(self, now: float) -> None:
        """Give up stores that were not handed over in time."""
        while self._waiting and self._waiting[0].deadline <= now:
            self._end_item(self._waiting.popleft(), FailCause.TIMEOUT)

    # removal

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Drop keys of the own part; a store of one that is under way ends as CANCELLED."""
        if not self._holds_part():
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
        self._outdate([victim.name for victim in task.victims])
        if isinstance(task, DiscardTask):
            bad = {item.key for item in task.items} & self._distrusted  # the others were stored since
            self._outdate(bad)
            self._distrusted -= bad
        else:
            for ticket in task.tickets:
                self._part_done(ticket, ok=done and not task.kept)

    def flush(self) -> int:
        """Answered at once: a write that has ended is as durable as the store makes it."""
        ticket = self._ticket()
        self._part_done(ticket, ok=self._holds_part())
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
