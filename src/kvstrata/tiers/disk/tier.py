"""The disk tier: segment files in one directory, bounded, verified, crash-safe. Its life cycle and its front door.

    CLOSED --open--> OPEN <--- tries again ---> WAITING        (somebody else owns the directory, or it cannot be used)

A waiting tier answers as an empty, refusing one, says why in `status`, and tries again every second. What an open tier
does is in `volume.py`.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstrata.errors import ConfigError
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.disk.acquire import Acquired, InUseError, acquire
from kvstrata.tiers.disk.desk import VolumeSettings, Workers
from kvstrata.tiers.disk.format import BLOCK, Reject
from kvstrata.tiers.disk.io import Files, SystemFiles, aligned_buffer, read_all, write_all
from kvstrata.tiers.disk.jobs import Jobs, TestOp
from kvstrata.tiers.disk.lanes import LocalWorkers
from kvstrata.tiers.disk.process import START_S, ProcessSettings, ProcessWorkers
from kvstrata.tiers.disk.segment import Sizes, divide
from kvstrata.tiers.disk.tasks import Sync
from kvstrata.tiers.disk.volume import Volume
from kvstrata.tiers.disk.work import Workshop, segment_name
from kvstrata.types import (
    I8,
    Capabilities,
    FailCause,
    Flushed,
    JobEnded,
    Locality,
    Medium,
    OffloadKey,
    TierEvent,
    TierJob,
    TierUsage,
)

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
_LOOK_S = 1.0
_GLANCE_S = 0.01
_NOTICES = 32
_TEST_PAYLOAD = bytes(range(256)) * 32
_SCANNERS = 16


class TierState(enum.Enum):
    """Whether the tier has its directory."""

    CLOSED = "closed"
    WAITING = "waiting"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class DiskStatistics:
    """A snapshot of what the tier has done and holds."""

    state: TierState
    status: str
    direct: bool
    io_process: bool
    segments: int
    records: int
    records_of_others: int
    stored: int
    loaded: int
    evicted: int
    moved: int
    failures: dict[FailCause, int]
    rejected_at_open: dict[Reject, int]


class DiskTier:
    """A `Tier` (tiers/base.py) over segment files in one directory.

    `limit`: bytes that all files together may take, None for no limit. `segment_bytes`: size of a segment file; by
    default what the directory has already, else a 32nd of the limit, and room for `largest_chunk` in any case.
    `min_free`: bytes that stay free on the device; no segment is created below. `io_process`: None uses a process of
    its own if primary is a shared region, else threads of the context's executor. `width`: calls in flight, at most 16
    where each takes a thread; `write_depth`: how many of them may be stores while no load waits. `call_queue`: the I/O
    process, and the scan of an opening, keep their calls in the kernel's queue where there is one, else in threads.
    `hot_share`: how much of a reclaimed segment is written again at most. `verify=False` is for tests only: it switches
    off the check of payload digests, to show that damage would be seen without it.
    """

    medium = Medium.NVME
    locality = Locality.LOCAL
    capabilities = Capabilities(sync_probe=True)

    def __init__(
        self,
        *,
        path: str,
        limit: int | None = None,
        name: str = "disk",
        segment_bytes: int | None = None,
        largest_chunk: int = 4 << 20,
        min_free: int = 0,
        io_process: bool | None = None,
        pin_cpus: Sequence[int] = (),
        width: int = 64,
        write_depth: int = 32,
        queue_bytes: int = 512 << 20,
        hot_share: float = 0.5,
        checkpoint_segments: int = 16,
        verify: bool = True,
        call_queue: bool = True,
        files: Files | None = None,
    ) -> None:
        self.name = name
        self.notices: deque[str] = deque(maxlen=_NOTICES)
        """What an operator should read: why the tier ran without its directory."""
        self._path = str(path)
        self._limit = limit
        self._segment_bytes = segment_bytes
        self._largest_chunk = largest_chunk
        self._io_process = io_process
        self._pin_cpus = tuple(pin_cpus)
        self._width = width
        self._write_depth = write_depth
        self._call_queue = call_queue
        self._settings = VolumeSettings(verify, min_free, queue_bytes, hot_share, checkpoint_segments)
        self._files: Files = files if files is not None else SystemFiles()
        self._state = TierState.CLOSED
        self._status = "not open"
        self._context: TierContext | None = None
        self._volume: Volume | None = None
        self._workers: Workers | None = None
        self._workshop: Workshop | None = None
        self._events: list[TierEvent] = []
        self._jobs = Jobs(self._events)
        self._refused_tickets = 0
        self._outcomes: list[Acquired | str] = []
        self._trying = False
        self._try_at = 0.0
        self._look_at = 0.0

    # life cycle

    @property
    def status(self) -> str:
        """Empty if all is well, else one line that says what is not."""
        return self._status

    @property
    def io_process_id(self) -> int | None:
        """Of the I/O process, None without one."""
        return self._workers.process_id if isinstance(self._workers, ProcessWorkers) else None

    def open(self, context: TierContext) -> None:
        """Take the directory, or begin to wait for it. Raises `ConfigError` for settings that cannot work."""
        self._check_settings()
        if self._io_process and context.region_fd is None:
            raise ConfigError(f"tier {self.name}: io_process needs a primary region that another process can map")
        self._context = context
        self._try_at = self._look_at = context.clock.monotonic()
        self._outcomes.clear()
        self._adopt(context, self._acquire(context))
        if isinstance(self._workers, ProcessWorkers) and not self._workers.await_start(START_S):
            _log.warning("tier %s: its I/O process is not there after at most %.0f s", self.name, START_S)

    def _check_settings(self) -> None:
        if self._limit is not None and self._limit < 1:
            raise ConfigError(f"tier {self.name}: limit: {self._limit} must be at least 1 byte")
        if self._width < 2 or not 1 <= self._write_depth <= self._width:
            raise ConfigError(
                f"tier {self.name}: width: {self._width} must be at least 2, and write_depth"
                f" {self._write_depth} from 1 to it"
            )
        if not 0.0 <= self._settings.hot_share <= 0.9:
            raise ConfigError(f"tier {self.name}: hot_share: {self._settings.hot_share} must be from 0 to 0.9")
        try:
            divide(self._limit, self._segment_bytes, self._largest_chunk)
        except ConfigError as error:
            raise ConfigError(f"tier {self.name}: {error}") from error

    def _sizes(self, found: int | None) -> Sizes:
        if self._segment_bytes is None and found is not None:
            try:
                return divide(self._limit, found, self._largest_chunk)
            except ConfigError:
                pass  # the limit is too low now for segments of the old size: begin anew
        return divide(self._limit, self._segment_bytes, self._largest_chunk)

    def _acquire(self, context: TierContext) -> Acquired | str:
        """The directory, or why it cannot be had. May block; also runs on the executor."""
        try:
            return acquire(self._files, self._path, self._sizes, context.executor.submit, _SCANNERS, self._call_queue)
        except InUseError:
            return "the directory is in use by another process"
        except (NotADirectoryError, FileExistsError):
            return "the path is not a directory"
        except OSError as error:
            return f"the directory cannot be used: {error.strerror or error}"
        except Exception as error:  # a tier never fails the engine's start
            return f"recovery failed: {type(error).__name__}: {error}"

    def _adopt(self, context: TierContext, outcome: Acquired | str) -> None:
        now = context.clock.monotonic()
        if isinstance(outcome, str):
            if outcome != self._status or self._state is not TierState.WAITING:
                self.notices.append(f"tier {self.name} runs without {self._path}: {outcome}")
                _log.warning("%s", self.notices[-1])
            self._state, self._status, self._try_at = TierState.WAITING, outcome, now + _RETRY_S
            return
        workshop = Workshop(self._files, outcome.directory, context.region, direct=outcome.direct)
        self._workshop = workshop
        self._workers = self._make_workers(context, outcome, workshop)
        self._volume = Volume(self._files, outcome, self._workers, context, self._settings, self._events, self._jobs)
        self._state, self._status, self._look_at = TierState.OPEN, "", now + _LOOK_S
        if not outcome.direct:
            _log.info("tier %s: the file system of %s takes no direct I/O: buffered", self.name, self._path)
        for note in outcome.notes:
            _log.info("tier %s: %s", self.name, note)

    def _make_workers(self, context: TierContext, acquired: Acquired, workshop: Workshop) -> Workers:
        wanted = self._io_process
        if wanted is None:
            wanted = context.region_fd is not None and isinstance(self._files, SystemFiles)
        if wanted and context.region_fd is not None:
            settings = ProcessSettings(
                self._width, self._write_depth, self._pin_cpus, acquired.direct, self._call_queue
            )
            return ProcessWorkers(context, acquired.directory, acquired.lock, context.region_fd, settings)
        return LocalWorkers(
            workshop.run, context.executor, context.wake, width=self._width, write_depth=self._write_depth
        )

    def close(self, timeout: float = 5.0) -> None:
        """Drain, write a checkpoint, let the directory go. What hangs is left behind and ends in a later `poll`."""
        context, volume, workers = self._context, self._volume, self._workers
        self._context = None
        if self._state is TierState.CLOSED:
            return
        self._state, self._status = TierState.CLOSED, "closed"
        if context is None or volume is None or workers is None:
            return
        deadline = context.clock.monotonic() + timeout
        self._drain(volume, workers, context, timeout)
        volume.leave()
        ended = workers.close(max(deadline - context.clock.monotonic(), 0.0))
        volume.poll()
        self._detach(volume, save=ended and volume.settled)

    def _detach(self, volume: Volume, *, save: bool) -> None:
        if not volume.settled:
            return  # a call hangs in there: the files stay open, the directory stays ours
        self._volume = self._workers = None
        if save:
            try:
                self._save(volume)
            except OSError as error:
                _log.warning("tier %s: the checkpoint was not written: %s", self.name, error)
        if self._workshop is not None:
            self._workshop.close()
            self._workshop = None
        self._release(volume.desk.acquired)

    def _save(self, volume: Volume) -> None:
        dirty = [segment.number for segment in volume.desk.space.dirty()]
        if self._workshop is not None and not self._workshop.run(Sync(0, dirty)).cause:
            volume.save()

    def _release(self, acquired: Acquired) -> None:
        for handle in (acquired.lock, acquired.directory):
            try:
                self._files.close(handle)
            except OSError:
                continue

    # the front door

    @property
    def _live(self) -> Volume | None:
        return self._volume if self._state is TierState.OPEN else None

    def probe(self, keys: Sequence[OffloadKey]) -> I8:
        """Presence of each key, at once."""
        volume = self._live
        return np.zeros(len(keys), np.int8) if volume is None or not keys else volume.probe(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Mark as recently used: they are written again when their segment is reclaimed."""
        volume = self._live
        if volume is not None and keys:
            volume.touch(keys)

    def submit_load(self, job: TierJob) -> None:
        """Read each key into its range of primary and verify it there."""
        volume = self._live
        if volume is None:
            self._refuse(job)
        else:
            volume.submit_load(job)
            self._woken()

    def submit_store(self, job: TierJob) -> None:
        """Write each key from its range of primary."""
        volume = self._live
        if volume is None:
            self._refuse(job)
        else:
            volume.submit_store(job)
            self._woken()

    def _refuse(self, job: TierJob) -> None:
        self._events.append(JobEnded(job.job_id, FailCause.REFUSED))
        self._woken()

    def _woken(self) -> None:
        if self._events and self._context is not None:
            self._context.wake()

    def cancel(self, job_id: int) -> None:
        """Skip what of the job has not begun."""
        if self._volume is not None:
            self._volume.cancel(job_id)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Drop keys; a log entry keeps them from coming back."""
        volume = self._live
        if volume is not None and keys:
            volume.remove(keys)
            self._woken()

    def purge(self, namespace: bytes) -> int:
        """Drop everything of a namespace, also what was stored under other layouts; answered when durable."""
        volume = self._live
        return self._refused_ticket() if volume is None else volume.purge(namespace)

    def flush(self) -> int:
        """Answered when all stores that ended before are durable."""
        volume = self._live
        ticket = self._refused_ticket() if volume is None else volume.flush()
        self._woken()
        return ticket

    def _refused_ticket(self) -> int:
        self._refused_tickets -= 1  # never one of a volume's
        self._events.append(Flushed(self._refused_tickets, ok=False))
        return self._refused_tickets

    def poll(self) -> list[TierEvent]:
        """Everything that happened since the last call."""
        if self._volume is not None:
            self._volume.poll()
            if self._state is TierState.CLOSED:
                self._detach(self._volume, save=False)
        context = self._context
        if context is not None:
            self._look_after_directory(context)
        events = self._events.copy()
        self._events.clear()
        return events

    def usage(self) -> TierUsage:
        """What is held at this instant: records as held, the rest of what is allocated as reserved."""
        volume = self._live
        return TierUsage(0, 0, self._limit, 0) if volume is None else volume.usage()

    def drain(self, timeout: float) -> bool:
        """Wait until no job is unfinished."""
        volume, workers, context = self._live, self._workers, self._context
        if volume is None or workers is None or context is None:
            return True
        return self._drain(volume, workers, context, timeout)

    def _drain(self, volume: Volume, workers: Workers, context: TierContext, timeout: float) -> bool:
        deadline = context.clock.monotonic() + timeout
        volume.poll()
        glances = int(timeout / _GLANCE_S)
        while not volume.idle:
            if volume.put_off:
                volume.poll()
                continue
            # A checkpoint in the making goes on with every poll, and the workers do not answer for it.
            saving = volume.saving and glances > 0
            glances -= saving
            rest = max(deadline - context.clock.monotonic(), 0.0)
            waited = workers.wait(min(rest, _GLANCE_S) if saving else rest)
            moved = volume.poll()
            late = context.clock.monotonic() >= deadline
            if not volume.idle and (late or not (moved or saving)) and not (waited and moved):
                return False  # the workers have nothing more to say: it waits for time, or a device hangs
        return True

    def self_test(self) -> str | None:
        """Write a scratch file, read it back past every cache, compare."""
        volume, workers, context = self._live, self._workers, self._context
        if volume is None or workers is None or context is None:
            return f"tier {self.name}: {self._status}"
        test = volume.self_test(_TEST_PAYLOAD)
        self._await_test(test, volume, workers, context, timeout=10.0)
        if test.outcome is None:
            return f"tier {self.name}: the device did not answer in 10 s"
        return f"tier {self.name}: {test.outcome}".replace("\n", " ") if test.outcome else None

    def _await_test(self, test: TestOp, volume: Volume, workers: Workers, context: TierContext, timeout: float) -> None:
        deadline = context.clock.monotonic() + timeout
        while test.outcome is None:
            waited = workers.wait(max(deadline - context.clock.monotonic(), 0.0))
            volume.poll()
            if not waited or context.clock.monotonic() >= deadline:
                return

    def statistics(self) -> DiskStatistics:
        """A snapshot for operators and tests."""
        volume = self._live
        if volume is None:
            return DiskStatistics(self._state, self._status, False, False, 0, 0, 0, 0, 0, 0, 0, {}, {})
        desk = volume.desk
        others = sum(index.count for realm, index in desk.indexes.items() if realm != desk.realm)
        return DiskStatistics(
            self._state, self._status, desk.acquired.direct, self.io_process_id is not None, len(desk.space.segments),
            desk.index.count, others, desk.stored, desk.loaded, desk.evicted, desk.moved, dict(desk.failures),
            dict(+desk.acquired.rejects),
        )  # fmt: skip

    # the directory

    def _look_after_directory(self, context: TierContext) -> None:
        """Try again for a directory that is not ours yet; notice one that is gone."""
        while self._outcomes:
            self._trying = False
            outcome = self._outcomes.pop(0)
            if self._state is TierState.WAITING:
                self._adopt(context, outcome)
            elif isinstance(outcome, str) and self._state is TierState.OPEN:
                self._lose(context, outcome)
            elif isinstance(outcome, Acquired):
                self._release(outcome)
        now = context.clock.monotonic()
        if self._trying:
            return
        volume = self._volume
        if self._state is TierState.WAITING and now >= self._try_at and (volume is None or volume.settled):
            if volume is not None and self._workers is not None:
                self._workers.close(0.0)
                volume.poll()
                self._detach(volume, save=False)
            self._submit(context, lambda: self._acquire(context))
        elif self._state is TierState.OPEN and volume is not None and (volume.desk.look_needed or now >= self._look_at):
            volume.desk.look_needed = False
            self._look_at = now + _LOOK_S
            identity = volume.desk.acquired.identity
            self._submit(context, lambda: self._look(identity))

    def _submit(self, context: TierContext, work: Callable[[], Acquired | str | None]) -> None:
        self._trying = True

        def task() -> None:
            outcome = work()
            if outcome is None:
                self._trying = False
            elif self._context is not context:
                if isinstance(outcome, Acquired):  # closed meanwhile
                    self._release(outcome)
            else:
                self._outcomes.append(outcome)
                context.wake()

        context.executor.submit(task)

    def _look(self, identity: tuple[int, int]) -> str | None:
        found = self._files.identity(self._path)
        return None if found == identity else "the directory has vanished"

    def _lose(self, context: TierContext, why: str) -> None:
        """The directory is gone: what was in it is gone too. Calls in flight still end by themselves."""
        _log.warning("tier %s: %s: %s", self.name, self._path, why)
        volume = self._volume
        self._state, self._status, self._try_at = TierState.WAITING, why, context.clock.monotonic() + _RETRY_S
        if volume is not None:
            volume.forget_all()

    # instruments of tests

    def damage(self, key: OffloadKey) -> bool:
        """Test instrument: alter one byte of the payload behind the tier's back; False if the key is not there."""
        place = None if self._live is None else self._live.place_of(key)
        if place is None or self._live is None or not place.length:
            return False
        files, directory = self._files, self._live.desk.acquired.directory
        at = place.offset + place.length // 2
        start = at // BLOCK * BLOCK
        handle = files.open(directory, segment_name(place.segment), write=True)
        try:
            block = aligned_buffer(BLOCK)
            read_all(files, handle, [block], start)
            block[at - start] ^= 0xFF
            write_all(files, handle, [block], start)
            files.sync(handle)
        finally:
            files.close(handle)
        return True


__all__ = ["DiskStatistics", "DiskTier", "TierState"]
