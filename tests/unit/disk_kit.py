"""An I/O process of the disk tier that the test plays."""

from __future__ import annotations

import os

import msgspec

from kvstrata.tiers.disk.format import BatchKind
from kvstrata.tiers.disk.process import Frames, frame
from kvstrata.tiers.disk.tasks import Answers, Batch, Done, Forget, Task, WriteBatch


class Played:
    """One life of the I/O process, played by the test: what was sent lies in `outbox` until `answer`."""

    def __init__(self, *_: object) -> None:
        self.ended = self.silent = self.rung = False
        self.outbox = bytearray()
        self.pieces: list[bytes] = []
        self.jobs = os.open(os.devnull, os.O_WRONLY)

    def send(self) -> None:
        pass

    def fetch(self) -> list[bytes]:
        pieces, self.pieces = self.pieces, []
        return pieces

    @property
    def news(self) -> bool:
        return bool(self.pieces) or self.ended

    def wait(self, timeout: float) -> bool:
        return True

    def release(self) -> None:
        os.close(self.jobs)

    def answer(self) -> list[Task | Forget]:
        """Everything that was asked is done."""
        tasks: list[Task | Forget] = []
        for message in Frames().feed(bytes(self.outbox)):
            tasks += msgspec.msgpack.decode(message, type=Batch).items
        self.outbox.clear()
        answers = [
            Done(task.task_id, digests=bytes(len(task.keys) // 36 * 16) if stores(task) else b"")
            for task in tasks
            if not isinstance(task, Forget)
        ]
        if answers:
            self.pieces.append(frame(msgspec.msgpack.encode(Answers(answers))))
        return tasks


def stores(task: Task | Forget) -> bool:
    return isinstance(task, WriteBatch) and task.kind == BatchKind.RECORDS
