"""The I/O process of the disk tier: `python -m kvstrata.runtime.disk_worker SPEC`.

Started by `kvstrata.tiers.disk.process`, with everything it needs as inherited descriptors. It ends when its job pipe
ends, or when the process that started it is gone, whatever its calls are doing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import sys
from collections import deque

import msgspec

from kvstrata.runtime.executor import ThreadExecutor
from kvstrata.tiers.disk.io import SystemFiles
from kvstrata.tiers.disk.lanes import Lanes
from kvstrata.tiers.disk.process import PIPE_BYTES, Frames, WorkerSpec, frame
from kvstrata.tiers.disk.tasks import Answers, Batch, Done, Forget
from kvstrata.tiers.disk.work import Workshop

_LOOK_FOR_PARENT_S = 0.25
_BURST = 256
_TOGETHER = 8
"""Answers of one message while more loads wait than there are runners."""


class _Reporter:
    """Sends answers; those that come together go as one message."""

    def __init__(self, pipe: int, width: int) -> None:
        self._pipe = pipe
        self._width = width
        self._waiting: deque[Done] = deque()
        self._turn: deque[int] = deque([0])  # whoever holds it sends; `popleft` and `append` are atomic
        self._encoder = msgspec.msgpack.Encoder()
        self.lanes: Lanes | None = None

    def report(self, done: Done) -> None:
        """Called by the threads that run tasks."""
        self._waiting.append(done)
        if len(self._waiting) < _TOGETHER and self.lanes is not None and self.lanes.reads_waiting >= self._width:
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
                    self._send(frame(self._encoder.encode(Answers(items))))
            finally:
                self._turn.append(0)

    def _send(self, message: bytes) -> None:
        view = memoryview(message)
        while view:
            view = view[os.write(self._pipe, view) :]


def serve(spec: WorkerSpec) -> None:
    """Run tasks until there will be no more."""
    region = memoryview(mmap.mmap(spec.region, spec.region_bytes))
    workshop = Workshop(SystemFiles(), spec.directory, region, direct=spec.direct)
    executor = ThreadExecutor("disk-io", threads=spec.width)
    reporter = _Reporter(spec.answers, spec.width)
    lanes = Lanes(workshop.run, executor, reporter.report, width=spec.width, write_depth=spec.write_depth, burst=_BURST)
    reporter.lanes = lanes
    frames, decoder = Frames(), msgspec.msgpack.Decoder(Batch)
    while True:
        reporter.flush()  # a device that hangs must not keep the answers of others
        readable, _, _ = select.select([spec.jobs], [], [], _LOOK_FOR_PARENT_S)
        if not readable:
            if os.getppid() != spec.parent:
                return
            continue
        piece = os.read(spec.jobs, PIPE_BYTES)
        if not piece:
            return
        for message in frames.feed(piece):
            for item in decoder.decode(message).items:
                if isinstance(item, Forget):
                    lanes.forget(item.task_ids)
                else:
                    lanes.push(item)
        lanes.start()


def main() -> None:
    """The command. Its one argument is a `WorkerSpec` as JSON."""
    spec = msgspec.json.decode(sys.argv[1], type=WorkerSpec)
    if spec.pin_cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, spec.pin_cpus)
    try:
        serve(spec)
    finally:
        os._exit(0)  # threads inside a call that hangs must not keep the directory locked


if __name__ == "__main__":
    main()
