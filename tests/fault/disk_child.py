"""A process that is killed again and again: serves requests to run the disk tier under load until it dies.

Reads one JSON line per life, forks, and lets the fork work; tells "gone" when it has died. The fork tells what it does
line by line: `S a b` a store of chunks a to b was handed over, `D n...` chunks that were reported stored, `R n...`
chunks that were told as removed, `P phase` what it is about to do.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import numpy as np

from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.executor import Signal, ThreadExecutor
from kvstrata.testing.simfs import FaultyFiles
from kvstrata.testing.tier_harness import LAYOUT_TAG, NAMESPACE, chunk_key, payload_of
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.disk import DiskTier, snapshot, upkeep
from kvstrata.tiers.disk.io import SystemFiles
from kvstrata.types import JobEnded, KeysDone, KeysRemoved, TierJob

CHUNK = 6000
PER_JOB = 4
DEPTH = 6


def tell(line: str) -> None:
    os.write(1, (line + "\n").encode())


class Life:
    """One life: opens the tier, stores fresh chunks until it is killed, or kills itself in the phase it was told."""

    def __init__(self, wish: dict[str, object]) -> None:
        self.files = FaultyFiles(SystemFiles())
        self.phase = "open"
        self.left = int(str(wish["calls"]))
        self.wish = str(wish["phase"])
        self.first = int(str(wish["first"]))
        self.tier = DiskTier(
            path=str(wish["path"]), limit=int(str(wish["limit"])), segment_bytes=98_304, checkpoint_segments=2,
            largest_chunk=1, files=self.files, width=6, write_depth=4,
        )  # fmt: skip
        self.files.before = self.met

    def met(self, call: str) -> None:
        if self.phase == self.wish and self.wish != "store":
            self.left -= 1
            if self.left < 0:
                tell(f"P dies in {self.phase} at {call}")
                os.kill(os.getpid(), signal.SIGKILL)

    def enter(self, phase: str) -> str:
        before, self.phase = self.phase, phase
        tell(f"P {phase}")
        return before

    def run(self) -> None:
        region = memoryview(bytearray(PER_JOB * CHUNK * (DEPTH + 2)))
        woken = Signal()
        executor = ThreadExecutor("disk", threads=8)
        self.watch()
        self.tier.open(TierContext(region, NAMESPACE, LAYOUT_TAG, SystemClock(), executor, woken.set))
        self.enter("store")
        numbers = {chunk_key(n): n for n in range(self.first + 4000)}
        free = list(range(DEPTH))
        jobs: dict[int, tuple[int, TierJob]] = {}
        following = self.first
        late: list[str] = []  # told behind the next submissions, so that a store is in flight whenever it dies
        while following < self.first + 4000:
            while free:
                slot = free.pop()
                keys = [chunk_key(n) for n in range(following, following + PER_JOB)]
                offsets = [(slot * PER_JOB + i) * CHUNK for i in range(PER_JOB)]
                for key, offset in zip(keys, offsets, strict=True):
                    region[offset : offset + CHUNK] = payload_of(key, CHUNK)
                job = TierJob(following, keys, offsets, [CHUNK] * PER_JOB)
                jobs[job.job_id] = (slot, job)
                tell(f"S {following} {following + PER_JOB}")
                self.tier.submit_store(job)
                following += PER_JOB
                if following % 64 == 0:
                    self.tier.flush()
            for line in late:
                tell(line)
            late.clear()
            woken.wait(1.0)
            woken.clear()
            for event in self.tier.poll():
                if isinstance(event, KeysDone) and event.done:
                    late.append("D " + " ".join(str(numbers[jobs[event.job_id][1].keys[i]]) for i in event.done))
                elif isinstance(event, JobEnded):
                    free.append(jobs.pop(event.job_id)[0])
                elif isinstance(event, KeysRemoved):
                    late.append("R " + " ".join(str(numbers[key]) for key in event.keys))

    def watch(self) -> None:
        life = self
        write, reclaim = snapshot.Snapshot.write, upkeep.Upkeep._reclaim

        def write_told(this: snapshot.Snapshot, files: object, directory: int) -> None:
            before = life.enter("checkpoint")
            write(this, files, directory)  # type: ignore[arg-type]
            life.enter(before)

        def reclaim_told(this: upkeep.Upkeep, victim: object) -> None:
            life.enter("reclaim")
            reclaim(this, victim)  # type: ignore[arg-type]

        snapshot.Snapshot.write = write_told  # type: ignore[method-assign]
        upkeep.Upkeep._reclaim = reclaim_told  # type: ignore[method-assign,assignment]


def main() -> None:
    np.zeros(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                Life(json.loads(line)).run()
            finally:
                os._exit(0)
        tell(f"I {child}")
        os.waitpid(child, 0)
        tell("gone")


if __name__ == "__main__":
    main()
