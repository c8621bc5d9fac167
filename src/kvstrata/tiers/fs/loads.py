"""The fs tier's answers about what it holds, and its reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstrata.tiers.common.index import Victim
from kvstrata.tiers.common.tasks import Waiter, cut
from kvstrata.tiers.fs.core import Core
from kvstrata.tiers.fs.place import Failure
from kvstrata.tiers.fs.tasks import LoadItem, LoadTask
from kvstrata.types import I8, KEY_BYTES, FailCause, OffloadKey, Presence, TierJob


class Loads(Core):
    """Presence, and reading."""

    def probe(self, keys: Sequence[OffloadKey]) -> I8:
        """Presence of each key, at once, from the index. UNKNOWN: being written, or not reached by the scan yet."""
        index = self._index
        answers = np.fromiter(map(index.entries.__contains__, keys), dtype=np.int8, count=len(keys))
        answers <<= 1  # Presence.PRESENT is 2
        if index.fresh or self._pending or self._scan is not None:
            for position, key in enumerate(keys):
                if not answers[position]:
                    answers[position] = self._presence(key)
        return answers

    def _presence(self, key: OffloadKey) -> Presence:
        if key in self._index.fresh:
            return Presence.PRESENT
        if key in self._pending:
            return Presence.UNKNOWN
        if self._scan is not None and len(key) == KEY_BYTES and self._scan.may_hold(key):
            return Presence.UNKNOWN
        return Presence.ABSENT

    def submit_load(self, job: TierJob) -> None:
        """Read each file straight into its range of primary and verify it there."""
        place = self._place
        if self._context is None or place is None:
            self._refuse(job.job_id)
            return
        record = self._jobs.add(job.job_id, len(job.keys))
        items: list[LoadItem] = []
        for index, (key, offset, length) in enumerate(zip(job.keys, job.offsets, job.lengths, strict=True)):
            entry = self._index.get(key)
            if (entry is None and self._presence(key) is not Presence.UNKNOWN) or len(key) != KEY_BYTES:
                self._jobs.settle(job.job_id, index, FailCause.GONE)
                continue
            target = self._range(job.job_id, offset, length)
            generation = None if entry is None else entry.generation
            items.append(LoadItem(key, target, Waiter(job.job_id, index), generation, record))
        self.touch(job.keys)
        for part in cut(items, lambda item: len(item.target), self._task_keys, self._task_bytes):
            self._submit(LoadTask(place, part))
        self._publish()

    def _on_loaded(self, task: LoadTask) -> None:
        bad: list[tuple[LoadItem, Failure]] = []
        for item in task.items:
            failure = item.failure
            if item.skipped:
                cause: FailCause | None = FailCause.CANCELLED if task.crash is None else FailCause.IO_ERROR
            else:
                cause = failure.cause if failure is not None else None
            self._jobs.settle(item.waiter.job_id, item.waiter.index, cause)
            if failure is not None and (failure.cause is FailCause.GONE or failure.cause.is_content):
                bad.append((item, failure))
        if task.place is self._place:
            self._drop_bad(bad)

    def _drop_bad(self, bad: list[tuple[LoadItem, Failure]]) -> None:
        """Forget what is not there, remove what is bad; only the version that was read, in both cases."""
        gone: list[OffloadKey] = []
        victims: list[Victim] = []
        for item, failure in bad:
            entry = self._index.get(item.key)
            if entry is None or entry.generation != item.generation:
                continue
            gone.append(item.key)
            if failure.cause is FailCause.GONE or failure.inode is None:
                self._forget(item.key)
            else:
                victims += self._condemn([item.key], failure.inode)
        self._jobs.removed(gone)
        self._delete(victims)
