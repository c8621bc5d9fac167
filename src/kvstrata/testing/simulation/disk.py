"""The real disk tier on a simulated device, with an own account of what it must have, and what must be durable."""

from __future__ import annotations

import errno
from itertools import islice

import numpy as np

from kvstrata.runtime.guard import GuardedTier
from kvstrata.testing.choices import Choices
from kvstrata.testing.executor import ManualExecutor
from kvstrata.testing.simfs import FaultyFiles, SimDisk, SimFiles
from kvstrata.testing.simulation.content import Content
from kvstrata.testing.simulation.faults import Faults
from kvstrata.testing.simulation.watch import WatchedJob
from kvstrata.testing.world_checks import demand
from kvstrata.tiers.disk import DiskTier
from kvstrata.types import Flushed, KeysDone, KeysRemoved, OffloadKey, Presence, TierEvent, TierJob

PATH = "/disk"
SEGMENT = 16_384


class SimDiskTier:
    """A device that outlives processes, and the tier of the process of now."""

    def __init__(self, name: str, choices: Choices, faults: Faults, largest: int) -> None:
        self.name = name
        self.choices = choices
        self.faults = faults
        self.disk = SimDisk()
        self.limit = SEGMENT * (256 if not faults.rate else choices.pick((16, 8, 32)))
        self.largest = largest
        self.seed = 0
        self.told: set[OffloadKey] = set()
        """What it said that it has taken, and has not said to be gone since."""
        self.safe: set[OffloadKey] = set()
        """The part of it that a flush has made durable."""
        self.flushes: dict[int, set[OffloadKey]] = {}
        self.must: set[OffloadKey] = set()
        """What the next process has to find."""
        self.rotten = False
        self.events = 0
        """Device I/O that was done."""
        self._puts = 0
        self._stated: tuple[object, ...] = ()
        """Of what the presence of all that it told of was looked at last."""
        self.tier: DiskTier
        self.executor: ManualExecutor
        self.files: FaultyFiles
        self.begin()

    def begin(self) -> DiskTier:
        """The tier of a new process, not open yet."""
        self.seed += 1
        self.files = FaultyFiles(SimFiles(self.disk, self.seed))
        self.executor = ManualExecutor(self.seed)
        self.tier = DiskTier(
            path=PATH, limit=self.limit, name=self.name, segment_bytes=SEGMENT, largest_chunk=self.largest,
            checkpoint_segments=3, files=self.files,
        )  # fmt: skip
        return self.tier

    def put(self, keys: list[OffloadKey], content: Content, region: memoryview) -> None:
        """Chunks of an earlier life, written before anything else happens; as many as primary can show at once."""
        at, offsets, lengths = 0, list[int](), list[int]()
        for key in keys:
            payload = content.chunk(key)
            if at + len(payload) > len(region):
                break
            region[at : at + len(payload)] = payload
            offsets.append(at)
            lengths.append(len(payload))
            at += len(payload)
        self._puts -= 1
        self.tier.submit_store(TierJob(self._puts, keys[: len(offsets)], offsets, lengths))
        for _ in range(20):
            self.executor.run_all()
            for event in self.tier.poll():
                if isinstance(event, KeysDone):
                    self.told.update(keys[i] for i in event.done)
                elif isinstance(event, KeysRemoved):
                    self.told.difference_update(event.keys)
            if not self.executor.pending:
                return

    # -- what it says

    def heard(self, event: TierEvent, job: WatchedJob | None) -> None:
        """It reports."""
        match event:
            case KeysDone() if job is not None and not job.load:
                self.told.update(job.keys[i] for i in event.done)
            case KeysRemoved():
                self.told.difference_update(event.keys)
                self.safe.difference_update(event.keys)
            case Flushed() if event.ticket in self.flushes:
                stored = self.flushes.pop(event.ticket)
                if event.ok:
                    self.safe |= stored & self.told

    def flush(self, guarded: GuardedTier) -> None:
        """What it has now is to become durable."""
        self.flushes[guarded.flush()] = set(self.told)

    # -- its process

    def work(self, percent: int) -> int:
        """Some of its I/O happens."""
        done = 0
        while self.executor.pending and self.choices.chance(percent):
            self.executor.run_at(self.choices.below(self.executor.pending))
            done += 1
            if self.executor.raised:
                demand(False, f"{self.name}: a task raised {self.executor.raised[:1]}")
            self.check_limit()
        self.events += done
        return done

    def check_limit(self) -> None:
        """What the files take never exceeds the limit, at any moment."""
        used = self.disk.allocated(PATH) if PATH in self.disk.directories else 0
        if used > self.limit:
            demand(False, f"{self.name}: its files take {used} bytes of {self.limit}")

    def _unheard(self) -> set[OffloadKey]:
        """Keys that it has given up, and will say so: evictions are told once no crash can undo them."""
        volume = self.tier._volume
        said = {key for event in self.tier._events if isinstance(event, KeysRemoved) for key in event.keys}
        return said if volume is None else said.union(volume.upkeep._departing)

    def check_presence(self) -> None:
        """All events are told: it has exactly what it said it has."""
        if not self.told or self.tier.status or self.files.faults:
            return
        self.tier.probe(list(islice(self.told, 1)))  # first: a tier that is asked may look at what was put off
        keys = self.told - self._unheard()
        volume = self.tier._volume
        if volume is not None:  # no row came or went, and the same is asked: the answers are the same
            index = volume.desk.index
            stated = index, index.changes, index.pending, keys
            if stated != self._stated:
                self._look(keys)
                self._stated = stated
        usage = self.tier.usage()
        if usage.bytes_held + usage.bytes_reserved > self.limit:
            demand(False, f"{self.name}: its own account exceeds the limit")
        if usage.keys < len(keys):
            demand(False, f"{self.name}: counts {usage.keys} keys, {len(keys)} are there")

    def _look(self, keys: set[OffloadKey]) -> None:
        """These must be there."""
        some = list(keys)
        gone = sum(answer != Presence.PRESENT for answer in self.tier.probe(some).tolist()) if some else 0
        demand(not gone, f"{self.name}: {gone} keys that it took and never gave up are not there")

    # -- faults

    def misbehave(self, kind: str) -> bool:
        """The device fails, fills up, or spoils bytes; whether it did."""
        match kind:
            case "device error":
                calls = self.choices.pick((("preadv",), ("pwritev",), ("sync",), ("preadv", "pwritev", "sync")))
                self.files.fail(*calls, code=errno.EIO, count=self.choices.pick((1, 3, 20)))
            case "device full":
                self.disk.others = self.disk.capacity if self.choices.below(2) else 0
            case "bit rot":
                return self._rot()
        return True

    def _rot(self) -> bool:
        self.rotten = True
        segments = (
            [name for name in self.disk.directories[PATH].names if name.startswith("segment-")]
            if self.disk.directories
            else []
        )
        data = self.disk.file(PATH, self.choices.pick(sorted(segments))) if segments else bytearray()
        if not data:
            return False
        for _ in range(self.choices.between(1, 6)):
            data[self.choices.below(len(data))] ^= 1 + self.choices.below(255)
        return True

    def heal(self) -> None:
        """The device is well again."""
        self.files.heal()
        self.disk.others = 0

    def die(self, *, power: bool, renamed: bool) -> None:
        """The process ends, or the power does; what was not flushed may be gone. `renamed`: a new namespace follows."""
        if self.told:
            held = list(self.told)
            found = self.tier.probe(held) if not self.tier.status else [0] * len(held)
            self.told = {key for key, answer in zip(held, found, strict=True) if answer == Presence.PRESENT}
        self.safe &= self.told  # the rest was given up, though that may not have been told yet
        self.heal()
        if power:
            self.disk.power_cut(self.choices.below(1 << 30))
        else:
            files = self.files.inner
            assert isinstance(files, SimFiles)
            files.kill()
        self.flushes.clear()
        self.must = set() if self.rotten or renamed else set(self.safe if power else self.told)

    def check_recovered(self) -> None:
        """The new process has found what was durable, and nothing that nobody stored."""
        keys = list(self.must - self._unheard())
        found = self.tier.probe(keys) if keys else np.zeros(0, np.int8)
        gone = int((found != Presence.PRESENT).sum())
        demand(
            not gone or bool(self.tier.status),
            f"{self.name}: {gone} of {len(keys)} durable chunks are gone after a restart",
        )
        self.told = {key for key, answer in zip(keys, found.tolist(), strict=True) if answer == Presence.PRESENT}
        self.safe &= self.told
        self.must = set()
