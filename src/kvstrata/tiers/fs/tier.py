"""The fs tier: one verified file per chunk in a directory (layout of files: place.py, bytes of a file: record.py).

All state belongs to the caller's thread. Blocking work is done by tasks (tasks.py) on the injected executor; each
comes back through `_outbox` and is applied by `poll`. So there is no lock, and a file and the index never disagree
for longer than a task is under way: the keys concerned are `dying` or pending meanwhile.
"""

from __future__ import annotations

from kvstrata.errors import ConfigError, StateError
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.common.self_test import run_self_test
from kvstrata.tiers.fs.attach import Refusal, attach
from kvstrata.tiers.fs.core import State
from kvstrata.tiers.fs.instruments import flip_payload_byte
from kvstrata.tiers.fs.tasks import (
    AttachTask,
    FlushTask,
    LoadTask,
    ScanTask,
    SortTask,
    StoreTask,
    StrayTask,
    Task,
    TouchTask,
    UnlinkTask,
)
from kvstrata.tiers.fs.upkeep import Upkeep
from kvstrata.types import Capabilities, FailCause, Locality, Medium, OffloadKey, TierEvent


class FsTier(Upkeep):
    """A `Tier` (tiers/base.py) over the directory `path`.

    `limit`: hard limit in bytes as allocated, None for none. `min_free`: bytes of the device that are left free.
    `files` replaces the operating system in tests. `verify=False` is for tests only: it switches off the check of
    payload digests, to show that damage would be seen without it. `notices` collects one line for each thing that the
    operator should know and that is no reason to stop: a directory that another engine has, or that went away.
    """

    medium = Medium.SHARED_FS
    locality = Locality.LOCAL
    capabilities = Capabilities(sync_probe=True)

    def open(self, context: TierContext) -> None:
        """Take the directory. Raises `ConfigError` for settings or a directory that cannot work.

        If another engine has the directory the tier stays empty and refusing, says so in `notices`, and tries again
        with later polls.
        """
        if self._state is not State.CLOSED or self._running:
            raise StateError(f"tier {self.name} is open, or has not ended its last work")
        self._check_settings()
        outcome = attach(self._files, self._path, self._identity(context), verify=self._verify)
        if isinstance(outcome, Refusal) and outcome.permanent:
            raise ConfigError(f"tier {self.name}: path: {outcome.text}")
        self._context = context
        self._namespace = context.namespace
        self._state = State.DETACHED
        self._take_place(outcome)

    def _check_settings(self) -> None:
        for field, value, least in (("limit", self._limit, 1), ("min_free", self._min_free, 0)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigError(f"tier {self.name}: {field}: {value!r} must be a number of bytes, at least {least}")

    def close(self, timeout: float = 5.0) -> None:
        """Finish what can be finished in `timeout` seconds, abandon the rest, and give the directory back.

        A task that hangs keeps the directory locked until it ends: it may still write.
        """
        context = self._context
        if context is None or self._state is State.CLOSED:
            return
        deadline = context.clock.monotonic() + timeout
        self._persist_touches(everything=True)
        if not self.drain(timeout):
            for job in list(self._jobs.open.values()):
                self._cancel(job)
        context.executor.close(max(deadline - context.clock.monotonic(), 0.0))
        self._collect()
        self._abandon()
        self._state = State.CLOSED
        self._retire_place()
        self._reset()
        self._release_places()

    def _abandon(self) -> None:
        """End what never started; what hangs ends when it comes back."""
        self._fail_waiting(FailCause.CANCELLED)
        self._abandon_running()
        self._abandon_tickets()
        self._publish()

    def poll(self) -> list[TierEvent]:
        """Apply what workers have done, do what is due, and tell what happened."""
        self._collect()
        if self._is_open():
            self._tick(self._now())
            self._publish()
        return self._jobs.take()

    def _collect(self) -> None:
        """Apply everything that workers have finished."""
        while self._outbox:
            task = self._outbox.popleft()
            if task in self._running:
                del self._running[task]
                self._apply(task)
                self._publish()
                if task.lost and task.place is self._place:
                    self._detach()
        if self._waiting:
            self._grant()
        if self._retired:
            self._release_places()

    def _apply(self, task: Task) -> None:
        match task:
            case StoreTask():
                self._on_stored(task)
            case LoadTask():
                self._on_loaded(task)
            case UnlinkTask():
                self._on_unlinked(task)
            case FlushTask():
                self._on_flushed(task)
            case AttachTask():
                self._on_attached(task)
            case ScanTask() | SortTask() | TouchTask() | StrayTask():
                if task.place is self._place and not task.abandoned:
                    self._on_upkeep(task)

    def self_test(self) -> str | None:
        """Write a record, read it back, compare, remove it."""
        if self._place is None:
            return self.notices[-1] if self.notices and self._state is not State.CLOSED else f"{self.name} is not open"
        return run_self_test(self)

    def remove_quietly(self, key: OffloadKey) -> None:
        """Remove a key without telling anybody. Self-test only."""
        self._delete(self._condemn([key]))
        self.drain(0.0)

    def damage(self, key: OffloadKey) -> bool:
        """Test instrument: alter one byte of the stored payload behind the tier's back; False if there is none."""
        place = self._place
        return place is not None and self._index.get(key) is not None and flip_payload_byte(place, key)
