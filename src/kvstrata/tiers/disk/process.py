"""I/O in a process of its own: tasks go out and answers come back over pipes, in batches.

The process is started as a command with inherited descriptors (never forked from here, never by multiprocessing): the
two pipes, the file behind primary, the directory and its lock. It runs the same `Workshop` and `Lanes` as threads do.
Index, space and decisions stay here. When it dies, every task in its hands has ended: a process is gone only after its
calls are, so the slots are free at once. It is started again after a back-off. It ends by itself when this process
does; until then it holds the lock of the directory, so nobody else writes there beside it.

Answers are read by whoever polls, and nobody else touches them. A count in shared memory tells whether there are any:
a busy engine mostly asks too early, and a read of the empty pipe is not free. A bell beside them, a socket, says
that it is time to look: a slice of waiting for it runs on the context's executor, which therefore has to be one with
threads. The bell is not rung for answers that are fetched in time anyway: each ring makes a thread of the
engine give up the interpreter, to one that may have to wait for a core of its own.

The first answer says that the process is there. An opening waits for it: on a busy machine a start takes seconds,
which would else pass on the clocks of the first jobs.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvstrata.tiers.base import TierContext
from kvstrata.tiers.disk.tasks import LOADS, Answers, Batch, Done, Forget, Task
from kvstrata.tiers.disk.work import NOT_THERE, UNIT_BYTES
from kvstrata.types import FailCause

WORKER_MODULE = "kvstrata.runtime.disk_worker"
PIPE_BYTES = 1 << 20
MOST_MESSAGE_BYTES = 256 << 20
"""No message is longer; a length above it is damage."""
READ_BYTES = 1 << 16
"""Larger reads take fresh memory from the system for each."""
_RINGS = 64
"""Rings of the bell that are taken off it at once."""
_TOGETHER = 16
"""Most loads that are held back to go in one message."""
_LOAD_BYTES = 16 << 20
"""The loop over there cuts loads into calls, so they need not be small to be many."""
_LISTEN_S = 0.25
"""Less than a second."""
_LISTEN_TURNS = 64
_GLANCE_S = 0.001
_LOOK_S = 0.1
START_S = 30.0
"""So long an opening waits for the process at most."""
_RESTART_FIRST_S = 0.1
_RESTART_MOST_S = 10.0
_CAUSES = frozenset({"", NOT_THERE, *FailCause})
_TIME = struct.Struct("@ll")
"""The system's `struct timeval`."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """What the process is started with."""

    width: int
    write_depth: int
    pin_cpus: tuple[int, ...]
    direct: bool
    call_queue: bool


class WorkerSpec(msgspec.Struct, frozen=True):
    """The one argument of the command: descriptors and settings, as JSON."""

    jobs: int
    answers: int
    bell: int
    sent: int
    """A file with two numbers about `answers`; see `CountedPipe`."""
    region: int
    region_bytes: int
    directory: int
    parent: int
    width: int
    write_depth: int
    direct: bool
    call_queue: bool
    pin_cpus: list[int]


def frame(payload: bytes) -> bytes:
    """One message of a pipe: its length in 4 bytes, then itself."""
    return len(payload).to_bytes(4, "little") + payload


class BadStreamError(Exception):
    """What a pipe delivered is no message. Never leaves the disk tier."""


class Frames:
    """Cuts what a pipe delivers into messages. Raises `BadStreamError` for a length that none can have."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """The messages that are complete now."""
        rest: bytes | bytearray = piece  # mostly of whole messages, and nothing is left of what came before
        if self._rest:
            self._rest += piece
            rest = self._rest
        messages = []
        at = 0
        while len(rest) - at >= 4:
            size = int.from_bytes(rest[at : at + 4], "little")
            if size > MOST_MESSAGE_BYTES:
                raise BadStreamError(f"a message of {size} bytes")
            if len(rest) - at - 4 < size:
                break
            messages.append(bytes(rest[at + 4 : at + 4 + size]))
            at += 4 + size
        if rest is self._rest:
            del self._rest[:at]
        else:
            self._rest += rest[at:]
        return messages


def map_counts(file: int) -> memoryview:
    """The two numbers in a shared file."""
    return memoryview(mmap.mmap(file, mmap.PAGESIZE)).cast("Q")[:2]


class CountedPipe:
    """The writing end of the answers. Every piece that was written is counted, so that a reader need not look in vain.

    A piece is so small that a pipe that is full when it is written is full of counted ones: the reader knows of them.
    """

    def __init__(self, pipe: int, counts: memoryview) -> None:
        """`counts`: the pieces so far, which are counted here; and 1 if the reader, when it found some last, had not
        heard the bell for them.
        """
        self.pipe = pipe
        self._counts = counts

    @property
    def unasked(self) -> bool:
        """Whether the reader came by itself last time."""
        return bool(self._counts[1])

    def send(self, message: bytes) -> None:
        """Write it all; waits while the pipe is full."""
        view = memoryview(message)
        while view:
            view = view[os.write(self.pipe, view[:READ_BYTES]) :]
            self._counts[0] += 1


class _Child:
    """One life of the I/O process. `ended` once all its answers were read; `silent` once nobody waits for its bell.

    The bell belongs to the listener. It ends after the answers do: the process made it last, and files of a process
    that ends are closed in the order of their numbers.
    """

    def __init__(self, context: TierContext, spec: WorkerSpec, inherited: Sequence[int]) -> None:
        ours: list[int] = []
        theirs: list[int] = []
        try:
            jobs_out, self.jobs = _pipe(theirs, ours)
            answers_in, self.answers = _pipe(theirs, ours, outwards=False)
            bell_in, self.bell = _bell(theirs, ours)
            for end in (self.jobs, answers_in):
                with contextlib.suppress(OSError):
                    fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            for end in (self.jobs, self.answers, bell_in):
                os.set_blocking(end, False)
            sent = os.memfd_create("kvstrata-answers", os.MFD_CLOEXEC)
            theirs.append(sent)
            os.ftruncate(sent, mmap.PAGESIZE)
            self._counts = map_counts(sent)
            spec = msgspec.structs.replace(spec, jobs=jobs_out, answers=answers_in, bell=bell_in, sent=sent)
            self.process = subprocess.Popen(
                [sys.executable, "-m", WORKER_MODULE, msgspec.json.encode(spec).decode()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(jobs_out, answers_in, bell_in, sent, *inherited),
                env=_environment(),
                start_new_session=True,
            )
        except OSError:
            for end in ours:
                os.close(end)
            raise
        finally:
            for end in theirs:
                os.close(end)
        self.ended = False
        self.silent = False
        self.rung = False
        self._heard = False
        self._seen = 0
        self.outbox = bytearray()
        self._context = context
        context.executor.submit(self._listen)

    def _listen(self) -> None:
        """Wait a while for the bell, on the executor; comes back to it until the bell is gone.

        One call for each ring: after every call this thread takes the interpreter from one that may be busy.
        """
        for _ in range(_LISTEN_TURNS):
            try:
                gone = not os.read(self.bell, _RINGS)
            except BlockingIOError:  # `_LISTEN_S` are over
                break
            if gone:
                os.close(self.bell)
            self._heard = self._counts[0] != self._seen  # else somebody was faster
            self.silent, self.rung = gone, True
            self._context.wake()
            if gone:
                return
        self._context.executor.submit(self._listen)

    @property
    def news(self) -> bool:
        """Whether `fetch` would find something, as far as that can be told without a call."""
        return self._counts[0] != self._seen or self.rung or self.silent or self.ended

    def fetch(self) -> list[bytes]:
        """The pieces of answers that have come. Does not wait."""
        pieces: list[bytes] = []
        heard, self._heard = self._heard, False
        self.rung, self._seen = False, self._counts[0]  # before the look: what comes later is told of again
        while not self.ended:
            try:
                piece = os.read(self.answers, READ_BYTES)
            except BlockingIOError:
                break
            if not piece:
                self.ended = True
                break
            pieces.append(piece)
            if len(piece) < READ_BYTES:
                break  # that was all
        if pieces:
            self._counts[1] = not heard
        return pieces

    def send(self) -> None:
        """Write what the pipe takes now."""
        while self.outbox:
            try:
                piece = self.outbox if len(self.outbox) <= PIPE_BYTES else self.outbox[:PIPE_BYTES]
                done = os.write(self.jobs, piece)
            except BlockingIOError:
                return
            except OSError:
                self.outbox.clear()  # it has died; the end of the answers will say so
                return
            del self.outbox[:done]

    def wait(self, timeout: float) -> bool:
        """Until answers or their end came, or `timeout` seconds; whether they did."""
        # They may not be counted yet.
        self.rung |= self.ended or bool(select.select([self.answers], [], [], timeout)[0])
        return self.rung

    def release(self) -> None:
        """Close what is left of an ended life."""
        self.process.wait()
        for handle in (self.jobs, self.answers):
            os.close(handle)


def _pipe(theirs: list[int], ours: list[int], *, outwards: bool = True) -> tuple[int, int]:
    """A pipe, as (their end, our end), noted in both lists; `outwards`: they read what we write."""
    reader, writer = os.pipe()
    pair = (reader, writer) if outwards else (writer, reader)
    theirs.append(pair[0])
    ours.append(pair[1])
    return pair


def _bell(theirs: list[int], ours: list[int]) -> tuple[int, int]:
    """The bell, as (their end, our end), noted in both lists: reads of ours wait, for `_LISTEN_S` at most."""
    theirs_end, ours_end = socket.socketpair()
    with theirs_end, ours_end:
        ours_end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(0, int(_LISTEN_S * 1e6)))
        theirs.append(theirs_end.detach())
        ours.append(ours_end.detach())
    return theirs[-1], ours[-1]


def _environment() -> dict[str, str]:
    """Ours, and the way to this very package."""
    source = str(Path(__file__).resolve().parents[3])
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": source if not known else f"{source}{os.pathsep}{known}"}


class ProcessWorkers:
    """Runs tasks in a process of its own. Same duties as `lanes.LocalWorkers`."""

    def __init__(
        self, context: TierContext, directory: int, lock: int, region_fd: int, settings: ProcessSettings
    ) -> None:
        self.load_bytes = _LOAD_BYTES if settings.direct and settings.call_queue else UNIT_BYTES
        self._context = context
        self._spec = WorkerSpec(
            jobs=-1,
            answers=-1,
            bell=-1,
            sent=-1,
            region=region_fd,
            region_bytes=len(context.region),
            directory=directory,
            parent=os.getpid(),
            width=settings.width,
            write_depth=settings.write_depth,
            direct=settings.direct,
            call_queue=settings.call_queue,
            pin_cpus=list(settings.pin_cpus),
        )
        self._inherited = (region_fd, directory, lock)
        self._arrived: list[bytes] = []  # what came while it began or was being closed
        self._frames = Frames()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Answers)
        self._outgoing: list[Task | Forget] = []
        self._unanswered: set[int] = set()
        self._reads: set[int] = set()  # those of `_unanswered` that are loads
        self._deep = 3 * settings.width  # so many loads over there keep it busy until the next answer is taken
        self._send_now = False
        self._broken = False
        """The process has said what makes no sense; nothing of it is believed until it is gone."""
        self._lost: list[Done] = []
        self._look_at = 0.0
        self._restart_at = 0.0
        self._restart_s = _RESTART_FIRST_S
        self._closing = False
        self.restarts = 0
        self._child: _Child | None = None
        self._begin()

    @property
    def process_id(self) -> int | None:
        """Of the running process, None between two lives."""
        return None if self._child is None else self._child.process.pid

    def await_start(self, timeout: float) -> bool:
        """Wait until the process is there, at most `timeout` seconds; whether it is. It takes tasks in any case."""
        child = self._child
        if child is None or not child.wait(timeout):
            return False
        self._arrived += child.fetch()
        return not child.ended

    def push(self, task: Task) -> None:
        """See `volume.Workers`."""
        if self._child is None:
            self._lost.append(Done(task.task_id, FailCause.IO_ERROR, "the I/O process is not running"))
            return
        self._unanswered.add(task.task_id)
        self._outgoing.append(task)
        if isinstance(task, LOADS):
            self._reads.add(task.task_id)
        else:
            self._send_now = True

    def start(self) -> None:
        """See `volume.Workers`. Loads that would wait there anyway go together, after an answer at the latest."""
        if self._lost:
            self._context.wake()
        held = len(self._outgoing)
        if self._send_now or held >= _TOGETHER or len(self._reads) - held < self._deep:
            self._send()

    def _send(self) -> None:
        child = self._child
        if child is None:
            return
        self._send_now = False
        if self._outgoing:
            box, at = child.outbox, len(child.outbox)
            box += bytes(4)
            self._encoder.encode_into(Batch(self._outgoing), box, -1)
            box[at : at + 4] = (len(box) - at - 4).to_bytes(4, "little")  # a frame, made in place
            self._outgoing = []
        child.send()

    def forget(self, task_ids: list[int]) -> None:
        """See `volume.Workers`."""
        wanted = [task_id for task_id in task_ids if task_id in self._unanswered]
        if wanted and self._child is not None:
            self._outgoing.append(Forget(wanted))
            self._send()

    def take(self) -> list[Done]:
        """See `volume.Workers`."""
        child = self._child
        answers, self._lost = self._lost, []
        if child is None or not (child.news or self._arrived):
            return answers
        arrived, self._arrived = self._arrived, []
        for piece in arrived + child.fetch():
            if self._broken:
                continue
            try:
                for message in self._frames.feed(piece):
                    answers += self._checked(self._decoder.decode(message).items)
            except (BadStreamError, msgspec.MsgspecError, RecursionError) as error:
                self._give_up(error)
        ended_tasks = [done.task_id for done in answers]
        self._unanswered.difference_update(ended_tasks)
        self._reads.difference_update(ended_tasks)
        if child.ended:
            answers += self._bury(child)
        elif answers:
            self._restart_s = _RESTART_FIRST_S
        return answers

    def _checked(self, answers: Sequence[Done]) -> Sequence[Done]:
        """Answers that make sense: to tasks that are over there, with causes that there are."""
        for done in answers:
            if done.task_id not in self._unanswered or done.cause not in _CAUSES:
                raise BadStreamError(f"an answer to task {done.task_id}: {done.cause[:64]!r}")
            if done.failed and not all(index >= 0 and cause in _CAUSES for index, cause in done.failed):
                raise BadStreamError(f"failed keys of task {done.task_id}")
        return answers

    def _give_up(self, error: Exception) -> None:
        """What the process says makes no sense any more: end it; a new one follows when its pipe has ended."""
        _log.error("the I/O process is ended: %s: %s", type(error).__name__, error)
        self._broken = True
        if self._child is not None:
            self._child.process.kill()

    def _bury(self, child: _Child) -> list[Done]:
        child.release()
        self._child = None
        self._broken = False
        self._frames = Frames()
        self._outgoing = []
        lost = [Done(task_id, FailCause.IO_ERROR, "the I/O process has died") for task_id in self._unanswered]
        self._unanswered.clear()
        self._reads.clear()
        self._restart_at = self._context.clock.monotonic() + self._restart_s
        self._restart_s = min(self._restart_s * 2, _RESTART_MOST_S)
        return lost

    def wait(self, timeout: float) -> bool:
        """See `volume.Workers`."""
        if self._lost:
            return True
        child = self._child
        if child is None:
            return False
        self._send()
        return child.wait(timeout)

    def advance(self, now: float) -> None:
        """Start the process again once its back-off is over; send what the pipe did not take."""
        if self._child is None:
            if not self._closing and now >= self._restart_at:
                self.restarts += 1
                self._begin()
        else:
            if self._child.outbox:
                self._child.send()
            if now >= self._look_at:  # whatever the count and the bell say
                self._look_at = now + _LOOK_S
                self._child.rung = True

    def _begin(self) -> None:
        try:
            self._child = _Child(self._context, self._spec, self._inherited)
        except OSError:
            self._restart_at = self._context.clock.monotonic() + self._restart_s
            self._restart_s = min(self._restart_s * 2, _RESTART_MOST_S)

    def close(self, timeout: float) -> bool:
        """End the process: it drops what it has not begun. One that hangs is killed, which ends its calls too."""
        self._closing = True
        child = self._child
        if child is None:
            return True
        os.close(child.jobs)  # the end of the jobs is its sign to leave
        child.jobs = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        child.outbox.clear()
        if not self._wait_end(child, timeout):
            child.process.kill()
            self._wait_end(child, 1.0)
        return child.ended

    def _wait_end(self, child: _Child, timeout: float) -> bool:
        deadline = self._context.clock.monotonic() + timeout
        while True:
            self._arrived += child.fetch()
            if child.ended and child.silent:
                return True
            rest = deadline - self._context.clock.monotonic()
            if rest <= 0:
                return child.ended
            if child.ended:
                select.select([], [], [], min(rest, _GLANCE_S))
            else:
                child.wait(rest)
