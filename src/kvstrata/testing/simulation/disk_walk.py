"""The disk tier through several lives on a simulated device: what it serves after kills, power cuts and damage.

A plain model says what was stored, with which bytes, what a flush has made durable, and what was removed for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstrata.testing.simfs import FaultyFiles, SimDisk, SimFiles
from kvstrata.testing.tier_harness import NAMESPACE, POISON, TierHarness, chunk_keys, payload_of
from kvstrata.testing.world_checks import demand
from kvstrata.tiers.disk import DiskTier
from kvstrata.types import FailCause, KeysRemoved, OffloadKey, Presence

PATH = "/disk"
LIMIT = 400_000
SEGMENT = 40_960
KEYS = 80
SIZES = (700, 5000, 4096, 12_288)
LIVES = 3
STEPS = 30


@dataclass(slots=True)
class _Model:
    """What must be served, and what must not."""

    stored: set[OffloadKey] = field(default_factory=set)
    safe: set[OffloadKey] = field(default_factory=set)
    gone: set[OffloadKey] = field(default_factory=set)
    """Removed, and that is durable."""
    variants: dict[OffloadKey, set[int]] = field(default_factory=dict)
    """Bytes that a load may bring: every variant that was ever stored and not removed for good."""
    ever: dict[OffloadKey, set[int]] = field(default_factory=dict)
    """Every variant that was ever stored."""
    removed: dict[OffloadKey, int] = field(default_factory=dict)
    """Removed since the last flush, and the newest variant of then."""
    damaged: bool = False


class _EvenHarness(TierHarness):
    """A harness whose slots begin at sectors, so that large payloads are read and written in place."""

    def __init__(self, tier: DiskTier, *, chunk_bytes: int, slots: int, seed: int) -> None:
        super().__init__(tier, chunk_bytes=chunk_bytes, slots=slots, seed=seed)
        whole = np.full(slots * self._stride + 4096, POISON, np.uint8)
        start = -whole.ctypes.data % 4096
        self._view = whole.data[start : start + slots * self._stride]

    @property
    def _stride(self) -> int:
        return (2 * self.chunk_bytes + 511) // 512 * 512 + 512


class _Life:
    """One process's time with the directory."""

    def __init__(self, disk: SimDisk, seed: int, model: _Model, rng: np.random.Generator) -> None:
        self.disk, self.model, self.rng = disk, model, rng
        self.files = SimFiles(disk, seed)
        calls = FaultyFiles(self.files)
        calls.before = self._overtake
        self.held = np.random.default_rng([78, seed])
        self.inside = True
        tier = DiskTier(
            path=PATH, limit=LIMIT, segment_bytes=SEGMENT, checkpoint_segments=3, files=calls, largest_chunk=1,
        )  # fmt: skip
        self.tier = tier
        kind = _EvenHarness if seed % 2 else TierHarness
        self.rig = kind(tier, chunk_bytes=max(SIZES), slots=64, seed=seed).open()
        self.keys = chunk_keys(KEYS)
        self.stores: dict[int, tuple[list[OffloadKey], int]] = {}
        self.flushes: dict[int, tuple[set[OffloadKey], dict[OffloadKey, int]]] = {}
        self.loads: set[int] = set()
        self.odd: set[int] = set()
        """Loads that ask for another length than was stored."""
        self.told = 0
        self.variant = seed * 1000

    # -- while it lives

    def _overtake(self, call: str) -> None:
        """A read takes as long as it takes: stores may go by, as many as fill every segment once."""
        if call != "preadv" or self.inside or self.held.integers(12):
            return
        self.inside = True
        for _ in range(int(self.held.integers(1, 24))):
            if self.rig.free_slots < 16:  # the tier waits for this read: nothing more can be stored
                break
            self._store(self._picked(self.held))
            for _ in range(6):
                self.rig.step()
        self.inside = False

    def _store(self, picked: list[OffloadKey]) -> None:
        self.variant += 1
        size = SIZES[self.keys.index(picked[0]) % len(SIZES)]
        job = self.rig.submit_store(picked, variant=self.variant, length=size)
        self.stores[job] = picked, self.variant
        for key in picked:
            self.model.variants.setdefault(key, set()).add(self.variant)
            self.model.ever.setdefault(key, set()).add(self.variant)
            self.model.gone.discard(key)

    def step(self) -> None:
        """One call, and some of its I/O."""
        picked = self._picked(self.rng)
        if self.rig.free_slots < 8:
            self.rig.settle()
        match int(self.rng.integers(12)):
            case 0 | 1 | 2 | 3 | 4:
                self._store(picked)
            case 5:
                self.tier.remove(picked[:1])
                self.model.removed[picked[0]] = self.variant
                self.model.stored.discard(picked[0])
                self.model.safe.discard(picked[0])
            case 6 | 7:
                # A flush speaks of what was stored; a removal is on its way to the log like everything else.
                removed = {} if self.rig.executor.pending else dict(self.model.removed)
                self.flushes[self.tier.flush()] = set(self.model.stored), removed
            case 8:
                self.tier.touch(picked)
            case 9:
                self.loads.add(self._load(picked))
            case 10:
                job = self._load(picked, odd=int(self.rng.integers(4) == 0))
                self.loads.add(job)
        self.inside = False
        for _ in range(int(self.rng.integers(5))):
            self.rig.step()
        self.inside = True
        self._hear()
        demand(self.disk.allocated(PATH) <= LIMIT, f"its files take {self.disk.allocated(PATH)} bytes of {LIMIT}")

    def _picked(self, rng: np.random.Generator) -> list[OffloadKey]:
        first = int(rng.integers(KEYS))
        return [self.keys[(first + 4 * i) % KEYS] for i in range(int(rng.integers(1, 5)))]

    def _load(self, picked: list[OffloadKey], odd: int = 0) -> int:
        """Ask for keys; `odd`: with a length that is not theirs."""
        size = SIZES[(self.keys.index(picked[0]) + odd) % len(SIZES)]
        job = self.rig.submit_load(picked, length=size)
        if odd:
            self.odd.add(job)
        return job

    def _hear(self) -> None:
        rig, model = self.rig, self.model
        for key in rig.removed[self.told :]:
            model.stored.discard(key)
            model.safe.discard(key)
        self.told = len(rig.removed)
        for job, (wanted, _) in list(self.stores.items()):
            record = rig.jobs[job]
            if record.ended is not None:
                done = [wanted[i] for i in record.done]
                present = self.present(done)
                model.stored |= {key for key in done if key in present and key not in model.removed}
                del self.stores[job]
        for ticket, (stored, removed) in list(self.flushes.items()):
            if ticket in rig.flushed:
                if rig.flushed[ticket]:
                    self._flushed(stored, removed)
                del self.flushes[ticket]
        for job in list(self.loads):
            if rig.jobs[job].ended is not None:
                self.check_load(job)
                self.loads.discard(job)
        self._check_presence()

    def _flushed(self, stored: set[OffloadKey], removed: dict[OffloadKey, int]) -> None:
        model = self.model
        model.safe |= stored & model.stored
        for key, newest in removed.items():
            if model.removed.get(key) == newest:
                del model.removed[key]
            left = {variant for variant in model.variants.get(key, ()) if variant > newest}
            model.variants[key] = left
            if not left:
                model.gone.add(key)

    def present(self, keys: list[OffloadKey]) -> set[OffloadKey]:
        """Which of these it says it has."""
        answers: Sequence[int] = self.tier.probe(keys).tolist() if keys else []
        return {key for key, answer in zip(keys, answers, strict=True) if answer == Presence.PRESENT}

    def _check_presence(self) -> None:
        found = self.present(list(self.model.stored))  # first: a tier that is asked may look at what was put off
        volume = self.tier._volume
        leaving = set() if volume is None else set(volume.upkeep._departing)
        leaving.update(key for event in self.tier._events if isinstance(event, KeysRemoved) for key in event.keys)
        lacking = self.model.stored - leaving - found
        demand(
            not lacking or self.model.damaged,
            f"{len(lacking)} stored chunks are not there any more, and nobody was told",
        )

    def check_load(self, job: int) -> None:
        """What a load brought was stored; it fails only for a reason."""
        record = self.rig.jobs[job]
        for i, payload in record.payloads.items():
            key, size = record.job.keys[i], record.job.lengths[i]
            variants = (self.model.ever if self.model.damaged else self.model.variants).get(key, ())
            good = any(payload == payload_of(key, size, variant) for variant in variants)
            demand(
                good, f"a load of {key[:4].hex()} brought bytes that were not stored for it, or were removed for good"
            )
        fine = {FailCause.GONE, FailCause.WRONG_SIZE} if job in self.odd else {FailCause.GONE}
        bad = set(record.failed.values()) - fine
        demand(not bad or self.model.damaged, f"a load failed with {bad} on a device that is well")

    # -- its end, and its beginning

    def die(self, seed: int) -> None:
        """By a kill, by power, or in order; what was not told as removed may have been given up all the same."""
        held = self.present(self.keys)
        self.model.stored &= held
        self.model.safe &= held
        match int(self.rng.integers(3)):
            case 0:
                self.files.kill()
                self.model.safe = set(self.model.stored)
            case 1:
                self.disk.power_cut(seed)
                self.model.stored = set(self.model.safe)
            case _:
                self.rig.close()
                self._hear_last()
                self.model.safe = set(self.model.stored)
        self.model.removed.clear()

    def _hear_last(self) -> None:
        for key in self.rig.removed[self.told :]:
            self.model.stored.discard(key)

    def check_begun(self) -> None:
        """It has found what was durable, and nothing that was removed for good; what it has is right."""
        model, rig = self.model, self.rig
        demand(not self.tier.status, f"it does not open: {self.tier.status}")
        found = self.present(self.keys)
        gone = model.safe - found - set(rig.removed)
        demand(not gone or model.damaged, f"{len(gone)} of {len(model.safe)} durable chunks are gone")
        back = model.gone & found
        # Damage may take a removal out of the log, too; what comes back then is still what was stored.
        demand(not back or model.damaged, f"{len(back)} chunks that were removed for good are back")
        self.told = len(rig.removed)
        model.stored = model.stored & found if model.damaged else model.safe & found
        for number, size in enumerate(SIZES):
            mine = sorted(found & set(self.keys[number :: len(SIZES)]))
            if mine:
                job = rig.submit_load(mine, length=size)
                rig.settle()
                self.check_load(job)
                lost = {mine[i] for i in rig.jobs[job].failed}
                demand(
                    not lost & model.safe or model.damaged, f"{len(lost & model.safe)} durable chunks cannot be read"
                )
                model.stored -= lost
        model.safe &= model.stored


def damage(disk: SimDisk, rng: np.random.Generator) -> None:
    """The device spoils something: flipped bits, a block in another's place, a file cut short."""
    names = sorted(disk.directories[PATH].names)
    segments = [name for name in names if name.startswith("segment-")]
    if not segments:
        return
    first, second = (disk.file(PATH, segments[int(i)]) for i in rng.integers(len(segments), size=2))
    a, b = (int(rng.integers(max(len(data) // 4096, 1))) * 4096 for data in (first, second))
    match int(rng.integers(5)):
        case 0:
            for _ in range(int(rng.integers(1, 30))):
                data = disk.file(PATH, segments[int(rng.integers(len(segments)))])
                if data:
                    data[int(rng.integers(len(data)))] ^= int(rng.integers(1, 256))
        case 1:
            first[a : a + 4096] = second[b : b + 4096]
        case 2:
            first[a : a + 4096] = bytes(min(4096, max(len(first) - a, 0)))
        case 3:
            del first[a + 4096 :]
        case _:
            for name in names:
                data = disk.file(PATH, name)
                if not name.startswith("segment-") and len(data) > 4096:
                    data[int(rng.integers(len(data)))] ^= 0xFF


def removals_outlive_what_they_remove() -> None:
    """A golden: segments are reclaimed oldest first, so that a removal goes later than what it removes."""
    disk = SimDisk()

    def life(seed: int) -> TierHarness:
        tier = DiskTier(
            path=PATH, limit=LIMIT, segment_bytes=SEGMENT, checkpoint_segments=1000, files=SimFiles(disk, seed),
            largest_chunk=1,
        )  # fmt: skip
        return TierHarness(tier, chunk_bytes=max(SIZES), slots=16).open()

    rig, keys = life(1), chunk_keys(60)
    at = 0
    while not rig.removed:
        rig.store(keys[at : at + 1])
        at += 1
    victim = rig.present(keys[:at])[0]
    rig.tier.remove([victim])
    demand(rig.flush(), "a flush fails on a device that is well")
    for key in keys[at : at + 8]:
        rig.store([key])
    files = rig.tier._files  # type: ignore[attr-defined]
    assert isinstance(files, SimFiles)
    files.kill()
    demand(not life(2).present([victim]), "a chunk that was removed for good is back")


def disk_walk(seed: int) -> None:
    """Some lives of one directory, all decided by the seed."""
    if seed % 10 == 0:
        removals_outlive_what_they_remove()
    rng = np.random.default_rng([77, seed])
    disk, model = SimDisk(), _Model()
    for number in range(LIVES):
        life = _Life(disk, 10 * seed + number, model, rng)
        life.check_begun()
        for _ in range(STEPS):
            life.step()
        life.die(seed + number)
        if rng.integers(3) == 0:
            model.damaged = True
            damage(disk, rng)
    life = _Life(disk, 10 * seed + LIVES, model, rng)
    life.check_begun()
    if rng.integers(2):
        assert life.rig.purge(NAMESPACE)
        demand(not life.present(life.keys), "chunks are there after a purge")
        disk.power_cut(seed)
        after = _Life(disk, 10 * seed + LIVES + 1, model, rng)
        demand(not after.present(after.keys), "chunks are back after a purge that was durable")
        after.rig.close()
