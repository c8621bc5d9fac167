"""The server tier: everything of a `Tier` (tiers/base.py) that does not depend on which store it is."""

from __future__ import annotations

import contextlib

from kvstrata.errors import ConfigError, StateError
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.common.record import Identity, tag_key_of
from kvstrata.tiers.common.self_test import run_self_test
from kvstrata.tiers.common.task_tier import SELF_TEST_S
from kvstrata.tiers.server.core import CommonOptions, ServerSettings, State
from kvstrata.tiers.server.release import ReleasedPart, release_part
from kvstrata.tiers.server.secrets import read_secret
from kvstrata.tiers.server.stores import Stores
from kvstrata.tiers.server.tasks import (
    AttachTask,
    DiscardTask,
    HoldTask,
    LeaveTask,
    LoadTask,
    ProbeTask,
    RemoveTask,
    ScanTask,
    StoreTask,
    Task,
    TouchTask,
)
from kvstrata.types import Capabilities, FailCause, Locality, Medium, OffloadKey, TierEvent

__all__ = ["CommonOptions", "ServerSettings", "ServerTier"]

TOUCH_INTERVAL_S = 10.0
TOUCHES_PER_TASK = 1024
NAMESPACE_BYTES = 16


class ServerTier(Stores):
    """One store behind a server. Made by the tiers that are built on it, each with its client.

    Keys are 36 bytes (a 32-byte block hash and the group). `open` fails only for what the operator has to change (a
    missing bucket, refused credentials, a quota that does not fit); a server that does not answer is tried again and
    costs recomputation meanwhile. If another engine writes the part, this one reads only, says so in `notices`, and
    tries again.
    """

    medium: Medium = Medium.MEMORY_STORE
    locality: Locality = Locality.SHARED
    capabilities: Capabilities = Capabilities(sync_probe=False, shared=True)

    def open(self, context: TierContext) -> None:
        """Connect, take the part, and start to find out what lies in it. Raises `ConfigError`."""
        if self._state is not State.CLOSED or self._running:
            raise StateError(f"tier {self.name} is open, or has not ended its last work")
        if len(context.namespace) != NAMESPACE_BYTES:
            raise ConfigError(f"namespace: {len(context.namespace)} bytes, must be {NAMESPACE_BYTES}")
        self._settings.check()
        self._identity = Identity(context.namespace, context.layout_tag, self._tag_key())
        self._context = context
        self._forget_part()
        attach = self._attach()
        attach()
        if attach.refusal is not None and attach.refusal.permanent:
            self._client.close()
            self._context = None
            raise ConfigError(f"tier {self.name}: {attach.refusal.text}")
        self._on_attached(attach)
        self._feed()

    def _tag_key(self) -> bytes | None:
        """What records are tagged with. Raises `ConfigError` for a reference that leads nowhere."""
        reference, option = self._settings.secret, f"tier {self.name}: secret"
        return tag_key_of(read_secret(reference, option)) if reference else None

    @property
    def is_tagged(self) -> bool:
        """Whether only records of those who have the secret are accepted."""
        return bool(self._settings.secret)

    def close(self, timeout: float = 5.0) -> None:
        """Finish what can be finished in `timeout` seconds, abandon the rest, and give the part back."""
        context = self._context
        if context is None or self._state is State.CLOSED:
            return
        deadline = context.clock.monotonic() + timeout
        self._persist_touches(self._now())
        if not self.drain(timeout):
            for job in list(self._jobs.open.values()):
                self._cancel(job)
        leave = LeaveTask(self._client, self._part, self._owner)
        self._state = State.CLOSED
        for queue in self._lanes.values():
            for task in queue:
                task.abandoned = True
                self._outbox.append(task)
            queue.clear()
        with contextlib.suppress(Exception):  # an executor that takes nothing more: the next owner finds us dead
            context.executor.submit(leave)
        context.executor.close(max(deadline - context.clock.monotonic(), 0.0))
        self._collect()
        self._abandon()
        self._owner = None
        self._forget_part()

    def _abandon(self) -> None:
        """End what never started; what hangs ends when it comes back."""
        self._fail_waiting(FailCause.CANCELLED)
        self._abandon_running()
        for probe in list(self._probes.values()):
            self._end_probe(probe, FailCause.CANCELLED)
        self._abandon_tickets()
        self._publish()

    def poll(self) -> list[TierEvent]:
        """Apply what workers have done, do what is due, and tell what happened."""
        self._collect()
        if self._is_open():
            self._tick(self._now())
            self._publish()
            self._feed()
        return self._jobs.take()

    def _collect(self) -> None:
        """Apply everything that workers have finished."""
        while self._outbox:
            task = self._outbox.popleft()
            self._running.pop(task, None)
            self._progress = self._now()
            self._apply(task)
            self._publish()
        self._grant()
        self._feed()

    def _apply(self, task: Task) -> None:
        match task:
            case StoreTask():
                self._on_stored(task)
            case LoadTask():
                self._on_loaded(task)
            case ProbeTask():
                self._on_probed(task)
            case RemoveTask() | DiscardTask():
                self._on_removed(task)
            case AttachTask() if self._state in (State.DETACHED, State.READING):
                self._on_attached(task)
            case ScanTask() if task.epoch == self._epoch:
                self._on_scanned(task)
                self._after_scan()
            case HoldTask() if task.epoch == self._epoch:
                self._on_held(task)

    def _after_scan(self) -> None:
        if self._state is State.READY:
            self._trim()
            for namespace, ticket in self._purges:
                self._purge(namespace, ticket)
            self._purges = []
            self._drop_late()

    def _tick(self, now: float) -> None:
        """Do what is due at `now`."""
        self._expire(now)
        self._expire_stores(now)
        match self._state:
            case State.DETACHED | State.READING:
                if now >= self._next_try and not self._busy(AttachTask):
                    self._submit(self._attach())
            case State.SCANNING:
                if now >= self._next_try and not self._busy(ScanTask):
                    self._submit(ScanTask(self._client))
                if self._is_late():
                    self._fail_waiting(FailCause.REFUSED)
            case State.READY:
                if self._index.excess and not self._busy(RemoveTask):
                    self._trim()
                if now >= self._next_touch:
                    self._next_touch = now + TOUCH_INTERVAL_S
                    self._persist_touches(now)
        if self._owner is not None and now >= self._next_hold and not self._busy(HoldTask, AttachTask):
            self._submit(HoldTask(self._client, self._part, self._owner))

    def _persist_touches(self, now: float) -> None:
        """Have recency written down."""
        if not self._touched or self._state is not State.READY:
            return
        names, self._touched = list(self._touched), {}
        stamps = self._stamped(names)
        for start in range(0, len(stamps), TOUCHES_PER_TASK):
            self._submit(TouchTask(self._client, stamps[start : start + TOUCHES_PER_TASK]))

    def release(self, part: str, *, this_host_only: bool = True) -> ReleasedPart:
        """Free a part whose engine is gone for good, this tier being closed. Raises `ConfigError`."""
        if self._state is not State.CLOSED:
            raise StateError(f"tier {self.name} is open")
        return release_part(self._client, part, timeout_s=self._settings.timeout_s, this_host_only=this_host_only)

    @property
    def part(self) -> str:
        """The part that this tier writes."""
        return self._part

    def self_test(self) -> str | None:
        """Write a record, read it back, compare, remove it."""
        if self._state is State.SCANNING:
            self._wait_for_scan()
        if self._state is not State.READY:
            closed = self._state is State.CLOSED or not self.notices
            return f"{self.name} is not open" if closed else self.notices[-1]
        return run_self_test(self)

    def _wait_for_scan(self) -> None:
        context = self._context
        if context is not None and context.executor.wait_idle(SELF_TEST_S):
            self._collect()

    def remove_quietly(self, key: OffloadKey) -> None:
        """Remove a key without telling anybody. Self-test only."""
        self._delete(self._condemn([key]))
        self._feed()
        self._drain_quietly()

    def _drain_quietly(self) -> None:
        context = self._context
        if context is not None and context.executor.wait_idle(SELF_TEST_S):
            self._collect()
