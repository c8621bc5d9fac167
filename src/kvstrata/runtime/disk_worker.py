"""The I/O process of the disk tier: `python -m kvstrata.runtime.disk_worker SPEC`.

Started by `kvstrata.tiers.disk.process`, with everything it needs as inherited descriptors. It ends when its job pipe
ends, or when the process that started it is gone, whatever its calls are doing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import sys
import termios
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvstrata.primary.aligned import map_shared
from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.executor import ThreadExecutor
from kvstrata.tiers.base import Clock
from kvstrata.tiers.disk.calls import CallQueue
from kvstrata.tiers.disk.io import SystemFiles
from kvstrata.tiers.disk.lanes import Lanes
from kvstrata.tiers.disk.loop import IoLoop
from kvstrata.tiers.disk.process import READ_BYTES, CountedPipe, Frames, WorkerSpec, frame, map_counts
from kvstrata.tiers.disk.tasks import Answers, Batch, Done, Forget, Task, WriteBatch
from kvstrata.tiers.disk.work import Workshop

_LOOK_FOR_PARENT_S = 0.25
_BURST = 256
_TOGETHER = 8
"""Answers of one message while more loads wait than there are runners."""
_HOLD_S = 0.001
"""How long an answer may wait for the next one of its kind, and for an engine that looks by itself."""
_HOLD_BELL_S = 0.005
"""The latter if the engine came by itself last time: the bell makes two of its threads wait for each other."""
_OFTEN = 8
"""After it came by itself for so many messages one after the other, also for an answer that no other follows."""
_BESIDE = 3
_FILLERS = 8
_SPARE_CALLS = 8


class _Reporter:
    """Sends answers; those that come together go as one message."""

    def __init__(self, pipe: CountedPipe, bell: int) -> None:
        self._pipe = pipe
        self._bell = bell
        self._waiting: deque[Done] = deque()
        self._turn: deque[int] = deque([0])  # whoever holds it sends; `popleft` and `append` are atomic
        self._encoder = msgspec.msgpack.Encoder()
        self.lanes: Lanes | None = None

    def report(self, done: Done) -> None:
        """Called by the threads that run tasks."""
        self._waiting.append(done)
        if len(self._waiting) < _TOGETHER and self.lanes is not None and self.lanes.reads_waiting >= self.lanes.width:
            return  # more answers come in a moment: a message for each would cost more than the loads do
        self.flush()

    def flush(self) -> None:
        """Send what waits, unless another thread is at it: that one looks again when it is done."""
        while self._waiting:
            try:
                self._turn.popleft()
            except IndexError:
                return
            try:
                items = []
                while self._waiting:
                    items.append(self._waiting.popleft())
                if items:
                    self._pipe.send(frame(self._encoder.encode(Answers(items))))
                    ring(self._bell)
            finally:
                self._turn.append(0)


class _Outbox:
    """Answers of the loop: one goes at once if no other of its kind is on the way, else with those in a moment.

    The bell is rung at once for the former, and after a moment for the latter. An engine that came by itself last time,
    as a busy one does, has longer to do so again; only what it does not fetch is rung for, and once, however much
    follows before it comes.
    """

    def __init__(self, pipe: CountedPipe, bell: int, clock: Clock) -> None:
        self._pipe = pipe
        self._bell = bell
        self._clock = clock
        self._encoder = msgspec.msgpack.Encoder()
        self._held: list[Done] = []
        self._kinds: set[bool] = set()
        self._due = 0.0
        self._ring_at: float | None = None  # None: nothing is there to be rung for
        self._unasked = 0  # messages in a row for which the engine came by itself

    def pressing(self, loop: IoLoop) -> bool:
        """Whether the answer of a load waits that no other follows: it goes before the next piece of work."""
        return True in self._kinds and not loop.follow(load=True)

    def report(self, done: Done, load: bool) -> None:
        """Called by the loop."""
        if not self._held:
            self._due = self._clock.monotonic() + _HOLD_S
        self._kinds.add(load)
        self._held.append(done)

    def flush(self, loop: IoLoop, *, at_once: bool) -> float:
        """Send what should go now; seconds until the next call, or until a look at other things is due."""
        if not self._held and self._ring_at is None:
            return _LOOK_FOR_PARENT_S
        now = self._clock.monotonic()
        if self._held:
            alone = at_once or not all(loop.follow(load=load) for load in self._kinds)
            if alone or now >= min(self._due, self._ring_at or self._due):
                self._send(now, alone, at_once)
        if self._ring_at is not None and now >= self._ring_at:
            self._ring_at = None
            if self._unfetched():
                ring(self._bell)
        next_at = [at for at in (self._due if self._held else None, self._ring_at) if at is not None]
        return max(min(next_at) - now, 0.0) if next_at else _LOOK_FOR_PARENT_S

    def _send(self, now: float, alone: bool, urgent: bool) -> None:
        message = frame(self._encoder.encode(Answers(self._held)))
        self._pipe.send(message)
        self._held = []
        self._kinds.clear()
        # Looked at after it is sent: if older ones still lie there, whoever fetches those fetches these too.
        if self._unfetched() <= len(message):
            self._unasked = self._unasked + 1 if self._pipe.unasked else 0
            self._ring_at = now + (_HOLD_BELL_S if self._unasked else 0.0 if alone else _HOLD_S)
        if urgent:
            self._ring_at = now
        elif alone and self._ring_at is not None and self._unasked < _OFTEN:
            # Somebody may wait for just this, although the engine has come by itself until now.
            self._ring_at = min(self._ring_at, now + _HOLD_S)

    def _unfetched(self) -> int:
        """Bytes of answers that lie in the pipe."""
        return int.from_bytes(fcntl.ioctl(self._pipe.pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def ring(bell: int) -> None:
    """Say that answers are there."""
    with contextlib.suppress(BlockingIOError):  # full of rings that nobody has heard yet
        os.write(bell, b"!")


class _Inbox:
    """Tasks from the job pipe, handed to whoever runs them."""

    def __init__(self, spec: WorkerSpec, runner: Lanes | IoLoop) -> None:
        self._spec = spec
        self._runner = runner
        self._frames, self._decoder = Frames(), msgspec.msgpack.Decoder(Batch)

    def read(self) -> bool:
        """Take what the pipe has; False if there will be no more."""
        piece = os.read(self._spec.jobs, READ_BYTES)
        for message in self._frames.feed(piece):
            for item in self._decoder.decode(message).items:
                if isinstance(item, Forget):
                    self._runner.forget(item.task_ids)
                else:
                    self._runner.push(item)
        return bool(piece)


def serve(spec: WorkerSpec) -> None:
    """Run tasks until there will be no more."""
    files = SystemFiles()
    region = map_shared(spec.region, spec.region_bytes)
    queue = (
        files.call_queue(_SPARE_CALLS + 2 * spec.width + spec.write_depth) if spec.direct and spec.call_queue else None
    )
    workshop = Workshop(files, spec.directory, region, direct=spec.direct, alone=queue is not None)
    answers = CountedPipe(spec.answers, map_counts(spec.sent))
    answers.send(frame(msgspec.msgpack.encode(Answers([]))))  # it is there
    ring(spec.bell)
    if queue is None:
        _serve_by_threads(spec, workshop, answers)
    else:
        _serve_by_queue(spec, workshop, answers, queue)


def _serve_by_queue(spec: WorkerSpec, workshop: Workshop, answers: CountedPipe, queue: CallQueue) -> None:
    clock = SystemClock()
    outbox, finished = _Outbox(answers, spec.bell, clock), deque[Done]()
    # Those that write for the first time are many; nothing that others wait for may stand behind them.
    upkeep, first_writes = ThreadExecutor("disk-io", threads=_BESIDE), ThreadExecutor("disk-fill", threads=_FILLERS)

    def aside(task: Task, run: Callable[[], Done]) -> None:
        def body() -> None:
            finished.append(run())
            os.eventfd_write(queue.handle, 1)

        (first_writes if isinstance(task, WriteBatch) else upkeep).submit(body)

    loop = IoLoop(workshop, queue, outbox.report, aside, width=spec.width, write_depth=spec.write_depth, clock=clock)
    inbox = _Inbox(spec, loop)
    ready = select.epoll()
    for handle in (spec.jobs, queue.handle):
        ready.register(handle, select.EPOLLIN)
    look_at = 0.0
    rest, more = _LOOK_FOR_PARENT_S, False
    while True:
        found = [handle for handle, _ in ready.poll(0 if more else rest)]
        if queue.handle in found:
            os.eventfd_read(queue.handle)
        if spec.jobs in found and not inbox.read():
            return
        urgent = False
        while finished:
            done = finished.popleft()
            urgent |= not loop.ended_aside(done)
        more = loop.turn()
        if not more or urgent or outbox.pressing(loop) or not loop.due:
            rest = outbox.flush(loop, at_once=urgent)
        now = clock.monotonic()
        if now >= look_at:
            look_at = now + _LOOK_FOR_PARENT_S
            if os.getppid() != spec.parent:
                return


def _serve_by_threads(spec: WorkerSpec, workshop: Workshop, answers: CountedPipe) -> None:
    executor = ThreadExecutor("disk-io", threads=spec.width)
    reporter = _Reporter(answers, spec.bell)
    lanes = Lanes(workshop.run, executor, reporter.report, width=spec.width, write_depth=spec.write_depth, burst=_BURST)
    reporter.lanes = lanes
    inbox = _Inbox(spec, lanes)
    while True:
        reporter.flush()  # a device that hangs must not keep the answers of others
        readable, _, _ = select.select([spec.jobs], [], [], _LOOK_FOR_PARENT_S)
        if not readable:
            if os.getppid() != spec.parent:
                return
            continue
        if not inbox.read():
            return
        lanes.start()


def _weigh_as(parent: int) -> None:
    """Give this process's session the weight that the engine's has, where the kernel schedules by sessions (sched(7)).

    It does not hand that on to new sessions. An engine that was given more, and keeps all processors busy, would leave
    this process next to nothing.
    """
    with contextlib.suppress(OSError):
        _, _, nice = Path(f"/proc/{parent}/autogroup").read_text().partition(" nice ")
        if nice:
            Path("/proc/self/autogroup").write_text(nice)


def main() -> None:
    """The command. Its one argument is a `WorkerSpec` as JSON."""
    spec = msgspec.json.decode(sys.argv[1], type=WorkerSpec)
    _weigh_as(spec.parent)
    if spec.pin_cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, spec.pin_cpus)
    try:
        serve(spec)
    finally:
        os._exit(0)  # threads inside a call that hangs must not keep the directory locked


if __name__ == "__main__":
    main()
