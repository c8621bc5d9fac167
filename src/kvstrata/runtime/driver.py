"""The driver: carries what tiers report into the core, and what the core decides out to the tiers.

The core is a state machine without thread or clock. The driver gives it both: one lock, so that only one thread at a
time is inside; the time, with every entry; and, if started, a daemon thread, so that completions, clocks and breakers
advance also while the engine does not step.

Order of every entry: completions that have arrived are applied, time is set, the caller's work is done, and the
commands that came of it are handed to the tiers.

Whatever raises on the way is recorded and nothing else stops for it: the other tiers are asked, the other events are
applied, the caller gets its manager. What the core would not take is told again later (`runtime.owed`).
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvstrata.core.messages import (
    Answer,
    CancelJob,
    Command,
    PurgeTier,
    SubmitLoad,
    SubmitStore,
    TouchKeys,
)
from kvstrata.errors import StateError
from kvstrata.runtime.executor import Signal, Worker, make_lock
from kvstrata.runtime.guard import GuardedTier
from kvstrata.runtime.owed import Owed
from kvstrata.tiers.base import Clock
from kvstrata.types import FailCause, JobEnded, KeysDone, TierEvent

MIN_WAIT_S = 0.001
"""Least wait of the driver's thread for a deadline: one that never moves must not keep a core busy."""
HEARTBEAT_S = 0.25
"""How often the thread asks a tier that has unfinished work, in case it never calls `wake`."""
PURGE_RETRY_S = 1.0
"""Least time between two purges of one tier."""
MAX_FAULTS = 32
"""Most faults of the core that are kept with their text; all are counted."""


class Drivable(Protocol):
    """What the driver needs of a manager."""

    def advance(self, now: float) -> None:
        """Set the core's time and do what is due."""
        ...

    def next_deadline(self) -> float | None:
        """When `advance` has something to do next, if nothing else happens."""
        ...

    def take_commands(self) -> list[Command]:
        """What tiers are to do, in order; each is given out once."""
        ...

    def on_event(self, tier: int, event: TierEvent) -> None:
        """Apply one event of a tier."""
        ...

    def waits(self, request_id: str, computed: int, total: int) -> bool:
        """Whether a poll would only be answered "wait"; may be called without the lock."""
        ...

    def standing(self, request_id: str, computed: int, total: int) -> Answer | None:
        """The answer that a poll would repeat, if there is one; may be called without the lock."""
        ...

    def poll(self, request_id: str, computed: int, total: int) -> Answer:
        """The two-phase door."""
        ...

    def on_schedule_end(self) -> None:
        """The engine's step is over."""
        ...

    def purge_submitted(self, tier: int, ticket: int) -> None:
        """Learn the ticket whose `Flushed` says that a purge is durable."""
        ...


M = TypeVar("M", bound=Drivable)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DriverStatistics:
    """What a driver has carried so far."""

    rounds: int
    events: int
    commands: int
    faults: int
    last_faults: tuple[str, ...] = ()


class Driver(Generic[M]):
    """Runs one manager and its tiers; by hand (`pump`, `settle`) or by its own thread (`start`).

    `tiers` must be those that the manager was made with, in its order. Tiers are opened by the caller, with
    `Driver.wake` as their wake. `strict` raises what the core or a guard raises; otherwise that is recorded, told to
    `on_fault`, and the round goes on: a fault of kvstrata must not stop the engine.
    """

    def __init__(
        self,
        manager: M,
        tiers: Sequence[GuardedTier],
        clock: Clock,
        *,
        name: str = "kvstrata-driver",
        strict: bool = False,
    ) -> None:
        self.tiers = tuple(tiers)
        self._manager = manager
        self._clock = clock
        self._name = name
        self._strict = strict
        self._lock = make_lock()
        self._signal = Signal()
        self._worker: Worker | None = None
        self._stopping = False
        self._now = -math.inf  # the core's time
        self._sleeps_until = -math.inf  # no thread sleeps: nobody has to be woken for a deadline
        self._purges: dict[int, float] = {}  # tier -> when its purge may be handed over
        self._purge_from: dict[int, float] = {}  # tier -> when the next purge may be, after the last one
        self._rounds = 0
        self._events = 0
        self._commands = 0
        self._faults = 0
        self._last_faults: deque[str] = deque(maxlen=MAX_FAULTS)
        self._owed = Owed()
        self._stuck = False
        self.on_fault: Callable[[str, Exception], None] | None = None
        """Gets the place and the error of each fault, where it is handled; must not raise."""

    # the engine's side

    def step(self) -> Step[M]:
        """The manager, for one scheduler step: what arrived is applied before, what it decided is handed over after.

        Holds the lock throughout; everything that the engine asks in one step belongs into one `with`.
        """
        return Step(self)

    def call(self, work: Callable[[M], T]) -> T:
        """The result of `work(manager)`, as a step of its own."""
        with self.step() as manager:
            return work(manager)

    @property
    def stuck(self) -> bool:
        """Whether the core's time does not move, because setting it raises: its clocks do not run."""
        return self._stuck

    def waits(self, request_id: str, computed: int, total: int) -> bool:
        """Whether a poll would only be answered "wait" now; counts as that poll. Takes no lock and asks no tier."""
        return self._manager.waits(request_id, computed, total)

    def poll(self, request_id: str, computed: int, total: int) -> Answer:
        """One request's poll: a step of its own, unless its last answer stands, which takes no lock and asks no tier.

        What arrives while all requests wait is applied by `end_step`, or by the driver's thread.
        """
        standing = self._manager.standing(request_id, computed, total)
        if standing is not None:
            return standing
        with self.step() as manager:
            return manager.poll(request_id, computed, total)

    def end_step(self) -> None:
        """The engine's scheduler step is over."""
        with self.step() as manager:
            manager.on_schedule_end()

    def wake(self) -> None:
        """Say that a tier has events. From any thread, also from inside a tier's method; never blocks."""
        self._signal.set()

    # by hand

    def pump(self) -> int:
        """One round: poll all tiers, apply, set the time, hand over. Returns how many events and commands moved."""
        with self._lock:
            return self._arrive() + self._hand_over()

    def settle(self, max_rounds: int = 100_000) -> int:
        """Pump until nothing moves; returns the rounds that moved something.

        For tiers whose work is done by the time `poll` is called. Raises `StateError` after `max_rounds`.
        """
        for done in range(max_rounds):
            if not self.pump():
                return done
        raise StateError(f"the driver did not settle in {max_rounds} rounds")

    # by thread

    @property
    def running(self) -> bool:
        """Whether the driver's thread runs."""
        return self._worker is not None and self._worker.alive

    def start(self) -> None:
        """Start the thread, if it does not run. Call it after the engine has forked its workers."""
        if self.running:
            if self._stopping:
                raise StateError("the driver's thread was told to stop and has not ended yet")
            return
        self._stopping = False
        self._worker = Worker(self._name, self._run)
        self._worker.start()

    def stop(self, timeout: float = 5.0) -> bool:
        """End the thread; False if it had not ended after `timeout` seconds. Idempotent."""
        self._stopping = True
        self._signal.set()
        return self._worker is None or self._worker.join(timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Stop the thread, hand over what is decided, close the tiers and apply their last events. Idempotent.

        All tiers together get `timeout` seconds, each at least a tenth of one. False if the thread did not end in
        time: something hangs inside it and holds the lock, so everything is left as it is to the end of the process.
        """
        end = self._clock.monotonic() + timeout
        if not self.stop(timeout):
            return False
        self.pump()
        for tier in self.tiers:
            tier.close(max(end - self._clock.monotonic(), 0.1))
        self.pump()
        return True

    def __enter__(self) -> Driver[M]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def statistics(self) -> DriverStatistics:
        """A snapshot of the counters."""
        with self._lock:
            return DriverStatistics(self._rounds, self._events, self._commands, self._faults, tuple(self._last_faults))

    # one round, under the lock

    def _arrive(self) -> int:
        """Apply everything that tiers report, and the time. Returns the number of events."""
        if self._signal.is_set:
            self._signal.clear()  # before the polls: what arrives during them raises it again
        self._rounds += 1
        arrived = [(index, events) for index, tier in enumerate(self.tiers) if (events := self._poll(tier))]
        now = self._time()
        if arrived:
            # What has arrived must not find its clock run out, nor restart one at a time long past: it is applied at
            # the last instant at which nothing was due.
            deadline = self._deadline()
            self._advance(now if deadline is None else min(now, math.nextafter(deadline, -math.inf)))
        self._owed.tell(now)
        count = 0
        for index, events in arrived:
            for event in events:
                count += 1
                self._apply(index, event)
        self._advance(now)
        self._events += count
        return count

    def _poll(self, tier: GuardedTier) -> Sequence[TierEvent]:
        try:
            return tier.poll()
        except Exception as error:
            self._note("poll", error)
            return ()

    def _time(self) -> float:
        """The clock's time, or the last known one."""
        try:
            return self._clock.monotonic()
        except Exception as error:
            self._note("clock", error)
            return self._now if self._now > -math.inf else 0.0

    def _deadline(self) -> float | None:
        try:
            return self._manager.next_deadline()
        except Exception as error:
            self._note("next_deadline", error)
            return None

    def _advance(self, now: float) -> None:
        if now < self._now:
            return
        self._now = now
        try:
            self._manager.advance(now)
            self._stuck = False
        except Exception as error:
            self._stuck = True
            self._note("advance", error)

    def _apply(self, index: int, event: TierEvent) -> None:
        subject = (index, event.job_id) if isinstance(event, KeysDone | JobEnded) else object()
        self._tell(subject, type(event).__name__, lambda: self._manager.on_event(index, event))

    def _tell(self, subject: Hashable, what: str, fact: Callable[[], T]) -> T | None:
        """Tell the core now, or later if it will not take it or what it owes comes first."""
        if not self._owed.holds(subject):
            try:
                return fact()
            except Exception as error:
                self._note(what, error)
        self._owed.add(subject, fact, max(self._now, 0.0))
        return None

    def _note(self, what: str, error: Exception) -> None:
        """Record a fault, or raise it. Called where `error` is handled."""
        if self._strict:
            raise error
        self._faults += 1
        self._last_faults.append(f"{what}: {type(error).__name__}: {error}")
        if self.on_fault is not None:
            self.on_fault(f"driver: {what}", error)

    def _hand_over(self) -> int:
        """Give the core's commands to the tiers. Returns their number."""
        try:
            commands = self._manager.take_commands()
        except Exception as error:
            self._note("take_commands", error)
            return 0
        for command in commands:
            try:
                self._command(command)
            except Exception as error:
                self._note(type(command).__name__, error)
                self._not_handed_over(command)
        self._commands += len(commands)
        if self._purges:
            self._purge()
        return len(commands)

    def _command(self, command: Command) -> None:
        match command:
            case SubmitLoad(tier, job):
                self.tiers[tier].submit_load(job)
            case SubmitStore(tier, job):
                self.tiers[tier].submit_store(job)
            case CancelJob(tier, job_id):
                self.tiers[tier].cancel(job_id)
            case TouchKeys(tier, keys):
                self.tiers[tier].touch(keys)
            case PurgeTier(tier):
                self._purges[tier] = self._purge_from.get(tier, -math.inf)

    def _not_handed_over(self, command: Command) -> None:
        """A job that the tier never got has ended: nobody else would say so."""
        if isinstance(command, SubmitLoad | SubmitStore) and not self.tiers[command.tier].has_job(command.job.job_id):
            self._apply(command.tier, JobEnded(command.job.job_id, FailCause.REFUSED))

    def _purge(self) -> None:
        """Hand over the purges that are due: the core asks again for one that failed, but not in a tight circle."""
        now = self._time()
        for index, due in list(self._purges.items()):
            if due > now:
                continue
            tier, again = self.tiers[index], now + PURGE_RETRY_S
            try:
                ticket = tier.purge(tier.namespace)
            except Exception as error:
                self._note("purge", error)
                self._purges[index] = again
                continue
            del self._purges[index]
            self._purge_from[index] = again
            self._tell((index, "purge"), "purge_submitted", functools.partial(self._submitted, index, ticket))

    def _submitted(self, index: int, ticket: int) -> None:
        self._manager.purge_submitted(index, ticket)

    # the thread

    def _wake_thread(self) -> None:
        """Wake the thread if there is now something to do before it would wake by itself."""
        if self._sleeps_until > -math.inf and self._next_wake(self._time()) < self._sleeps_until:
            self._signal.set()

    def _next_wake(self, now: float) -> float:
        """When the thread must look again if nobody wakes it; infinite if never."""
        wakes = [self._deadline(), self._owed.due, *self._purges.values()]
        wake = max(min((at for at in wakes if at is not None), default=math.inf), now + MIN_WAIT_S)
        return min(wake, now + HEARTBEAT_S) if self._stuck or any(tier.busy for tier in self.tiers) else wake

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                now = self._time()
                until = self._sleeps_until = self._round(now)
                left = None if math.isinf(until) else until - self._time()
            if not self._stopping:  # the round may have taken down the signal that came with it
                self._signal.wait(left)
        with self._lock:
            self._sleeps_until = -math.inf

    def _round(self, now: float) -> float:
        """One round of the thread. Returns when the next one is due; infinite if only a wake brings it."""
        try:
            self._arrive()
            self._hand_over()
            return self._next_wake(now)
        except Exception as error:  # the thread must live, or nothing advances any more
            self._faults += 1
            self._last_faults.append(f"round: {type(error).__name__}: {error}")
            return now + HEARTBEAT_S

    # a step, see `Step`

    def _enter(self) -> M:
        self._lock.__enter__()
        try:
            self._arrive()
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise
        return self._manager

    def _leave(self) -> None:
        try:
            self._hand_over()
            self._wake_thread()
        finally:
            self._lock.__exit__(None, None, None)


class Step(Generic[M]):
    """One entry into the core, as a context: see `Driver.step`."""

    __slots__ = ("_driver",)

    def __init__(self, driver: Driver[M]) -> None:
        self._driver = driver

    def __enter__(self) -> M:
        return self._driver._enter()

    def __exit__(self, *_: object) -> None:
        self._driver._leave()
