"""A server tier's answers about what the store has, its reads, and their time-outs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvstrata.tiers.common.index import Victim
from kvstrata.tiers.common.jobs import Job
from kvstrata.tiers.common.tasks import Waiter, cut
from kvstrata.tiers.server.client import ReadItem
from kvstrata.tiers.server.core import Core, State
from kvstrata.tiers.server.tasks import DiscardTask, Lane, LoadItem, LoadTask, ProbeTask, Task
from kvstrata.types import I8, KEY_BYTES, FailCause, OffloadKey, Presence, ProbeDone, TierJob


class Loads(Core):
    """Presence, and reading."""

    @property
    def _connected(self) -> bool:
        return self._state in (State.READING, State.SCANNING, State.READY)

    @property
    def _knows_part(self) -> bool:
        """Whether what the own part has is exactly what the index says, so that nobody need be asked.

        Not while the store is sick: an answer from memory would hide that it does not serve what it has.
        """
        return self._state is State.READY and self._client.trusts_index and not self._sick

    def probe(self, keys: Sequence[OffloadKey]) -> I8 | int:
        """A ticket; its answer comes by `poll`, within the time-out. A closed tier answers absent at once."""
        if self._context is None or self._state is State.CLOSED:
            return np.zeros(len(keys), np.int8)
        self._next_ticket += 1
        knows = self._knows_part
        asked = [
            index
            for index, key in enumerate(keys)
            if len(key) == KEY_BYTES and not (knows and self._index.get(key) is not None)
        ]
        task = ProbeTask(self._client, self._next_ticket, list(keys), asked, own=not knows)
        self._probes[task.ticket] = task
        if not self._connected:
            self._end_probe(task, FailCause.IO_ERROR)
        elif not asked:
            self._end_probe(task, None)
        else:
            self._submit(task)
            self._feed()
        return task.ticket

    def _end_probe(self, task: ProbeTask, error: FailCause | None) -> None:
        """Answer a probe, once. An error of some keys is an error of the probe, unless others were found."""
        if self._probes.pop(task.ticket, None) is None:
            return
        answers = np.zeros(len(task.keys), np.int8)
        if error is None:
            asked = set(task.asked)
            found = {index for index, there in zip(task.asked, task.found, strict=True) if there is True}
            error = next((there for there in task.found if isinstance(there, FailCause)), None)
            for index, key in enumerate(task.keys):
                there = index in found if index in asked else self._index.get(key) is not None
                if there and key not in task.removed and not self._is_hidden(key):
                    answers[index] = Presence.PRESENT
        self._publish()
        self._jobs.events.append(ProbeDone(task.ticket, answers if error is None else answers * 0, error))
        self._wake()

    def _is_hidden(self, key: OffloadKey) -> bool:
        """Whether a record of this key that still lies in the store was told to be gone, or was read as bad."""
        index = self._index
        return key in self._distrusted or key in index.dying or index.get(self._hidden_name(key)) is not None

    def _on_probed(self, task: ProbeTask) -> None:
        failed = task.crash is not None or task.abandoned
        self._sick = failed or any(isinstance(there, FailCause) for there in task.found)
        self._end_probe(task, FailCause.IO_ERROR if failed else None)

    def submit_load(self, job: TierJob) -> None:
        """Read each record, verify it, and copy its payload into its range of primary."""
        if self._context is None or not self._connected:
            self._refuse(job.job_id)
            return
        record = self._jobs.add(job.job_id, len(job.keys))
        items: list[LoadItem] = []
        knows = self._knows_part
        for index, (key, offset, length) in enumerate(zip(job.keys, job.offsets, job.lengths, strict=True)):
            if len(key) != KEY_BYTES or self._is_hidden(key):
                self._jobs.settle(job.job_id, index, FailCause.GONE)
                continue
            entry = self._index.get(key)
            own = True if entry is not None else (False if knows else None)
            read = ReadItem(key, self._range(job.job_id, offset, length), own)
            generation = None if entry is None else entry.generation
            items.append(LoadItem(read, Waiter(job.job_id, index), record, generation))
        self.touch(job.keys)
        for part in cut(items, lambda item: len(item.read.target), self._task_keys, self._task_bytes):
            self._submit(LoadTask(self._client, part))
        self._publish()
        self._feed()

    def _on_loaded(self, task: LoadTask) -> None:
        bad: list[LoadItem] = []
        for item in task.items:
            if item.settled:
                continue
            if item.skipped:
                cause: FailCause | None = FailCause.CANCELLED if task.crash is None else FailCause.IO_ERROR
            else:
                cause = item.read.failed
            self._settle_load(item, cause)
            self._sick = cause is not None and cause.is_passing
            if cause is FailCause.GONE or (cause is not None and cause.is_content):
                bad.append(item)
        self._drop_bad(bad, current=task.epoch == self._epoch)

    def _settle_load(self, item: LoadItem, cause: FailCause | None) -> None:
        item.settled = True
        self._jobs.settle(item.waiter.job_id, item.waiter.index, cause)

    def _drop_bad(self, bad: list[LoadItem], *, current: bool) -> None:
        """Forget what is not there; have what is bad discarded, the version that was read and no other.

        While a scan is under way that waits for its end, or the scan would count what is about to be deleted. A part
        that is not ours is left alone.
        """
        if self._state is not State.READY:
            if self._state is State.SCANNING and current:
                self._bad_later += bad
                self._distrusted.update(item.read.key for item in bad if item.read.failed is not FailCause.GONE)
            return
        discard: list[ReadItem] = []
        victims: list[Victim] = []
        for item in bad:
            entry = self._index.get(item.read.key) if current else None
            known = entry is not None and (
                # What the scan found has not changed since: whoever read it before knew no generation.
                item.generation == entry.generation or (item.generation is None and entry.generation <= self._scanned)
            )
            if item.read.failed is FailCause.GONE:
                if known:
                    self._index.pop(item.read.key)
                    self._touched.pop(item.read.key, None)
                    self._tell_removed([Victim(item.read.key, 0)])
                continue
            discard.append(item.read)
            self._distrusted.add(item.read.key)
            if known:
                victims += self._condemn([item.read.key])
        if discard:
            self._tell_removed(victims)
            discarding = DiscardTask(self._client, discard, victims)
            self._index.reserved += discarding.reserved
            self._submit(discarding)

    def _drop_late(self) -> None:
        """The scan has ended: what was found bad meanwhile is dropped."""
        later, self._bad_later = self._bad_later, []
        self._drop_bad(later, current=True)

    # time-outs

    def _expire(self, now: float) -> None:
        """Answer probes and reads whose time is up."""
        stalled = now - 2 * self._settings.timeout_s
        stalled = stalled if self._progress <= stalled else -math.inf
        for task in list(self._tasks()):
            if task.deadline > now and (task in self._running or task.queued_at > stalled):
                continue
            self._sick = True
            if isinstance(task, ProbeTask):
                self._drop_queued(task)
                self._end_probe(task, FailCause.TIMEOUT)
            elif isinstance(task, LoadTask):
                self._drop_queued(task)
                for item in task.items:
                    # A worker that already has the permit is copying: its answer is a moment away.
                    if not item.settled and item.read.take_permit():
                        self._settle_load(item, FailCause.TIMEOUT)

    def _drop_queued(self, task: Task) -> None:
        """A task that nobody waits for any more need not start."""
        queue = self._lanes[task.lane]
        if task in queue:
            queue.remove(task)

    def _cancel_loads(self, job: Job) -> None:
        """End what is queued for a job that was cancelled."""
        for task in list(self._lanes[Lane.LOAD]):
            if isinstance(task, LoadTask) and all(item.job is job for item in task.items):
                self._drop_queued(task)
                for item in task.items:
                    if not item.settled and item.read.take_permit():
                        self._settle_load(item, FailCause.CANCELLED)
