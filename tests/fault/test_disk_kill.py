"""Kill -9 at many instants under load, on real files: it opens again, serves what was stored, and does not grow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import disk_child
import numpy as np
import pytest

from kvstrata.testing.tier_harness import TierHarness, chunk_key
from kvstrata.tiers.disk import DiskTier

LIMIT = 1_500_000


@dataclass
class Record:
    """What the parent knows of the child's lives."""

    submitted: set[int] = field(default_factory=set)
    stored: set[int] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)
    phases: list[str] = field(default_factory=list)
    in_flight: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)

    def apply(self, line: str) -> None:
        kind, _, rest = line.partition(" ")
        numbers = [int(word) for word in rest.split()] if kind in "SDR" else []
        match kind:
            case "S":
                self.submitted |= set(range(*numbers))
                self.in_flight |= set(range(*numbers))
            case "D":
                self.stored |= set(numbers)
                self.in_flight -= set(numbers)
            case "R":
                self.removed |= set(numbers)
            case "P":
                self.phases.append(rest)


class Children:
    """The process whose forks are killed."""

    def __init__(self) -> None:
        source = str(Path(disk_child.__file__))
        self.process = subprocess.Popen(
            [sys.executable, source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def live(self, record: Record, wish: dict[str, object], kill_after: int) -> None:
        """One life; it is killed after so many lines, unless it kills itself before."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(wish) + "\n")
        self.process.stdin.flush()
        pid = 0
        for count, line in enumerate(self.process.stdout):
            if line == "gone\n":
                return
            if line.startswith("I "):
                pid = int(line[2:])
                continue
            record.apply(line.strip())
            if count >= kill_after and pid:
                os.kill(pid, signal.SIGKILL)
                kill_after = 1 << 60

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def children() -> Iterator[Children]:
    some = Children()
    yield some
    some.end()


def allocated(place: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in place.iterdir())


def check(place: Path, record: Record) -> None:
    """Open again in this process: everything is there that must be, and nothing is wrong."""
    tier = DiskTier(path=str(place), limit=LIMIT, segment_bytes=98_304, largest_chunk=1)
    rig = TierHarness(tier, chunk_bytes=disk_child.CHUNK, slots=400)
    rig.open()
    numbers = sorted(record.submitted)
    keys = {chunk_key(n): n for n in numbers}
    found = {keys[key] for key in rig.present(list(keys))}
    told = {keys[key] for key in rig.removed}
    for start in range(0, len(found), 300):
        part = sorted(found)[start : start + 300]
        loaded = rig.load([chunk_key(n) for n in part])
        assert loaded.ok, {n: cause for n, cause in zip(part, loaded.causes, strict=True) if cause}
        rig.check_loaded(loaded)
    missing = record.stored - found - told
    # Of what was never read the oldest goes first: whatever is missing was stored before everything that is there.
    cold, gone = found - record.read, missing - record.read
    assert not gone or not cold or max(gone) < min(cold), f"{sorted(gone)} are gone, {sorted(cold)} are there"
    assert not record.removed & found, "evicted chunks came back"
    assert allocated(place) <= LIMIT
    names = {path.name for path in place.iterdir()}
    assert not {name for name in names if name.endswith(".tmp")}
    rig.close()
    assert allocated(place) <= LIMIT
    record.removed |= {n for n in numbers if n not in found or n in told}
    record.stored &= found - told
    record.read |= found
    record.in_flight.clear()


def run(children: Children, place: Path, plan: dict[str, int], seed: int) -> Record:
    rng = np.random.default_rng(seed)
    record, first = Record(), 0
    wishes = [phase for phase, count in plan.items() for _ in range(count)]
    seen = 0
    for phase in [str(each) for each in rng.permutation(wishes)]:
        calls = int(rng.integers(0, {"open": 12, "checkpoint": 5, "reclaim": 8, "store": 1}[phase]))
        wish = {"path": str(place), "limit": LIMIT, "phase": phase, "calls": calls, "first": first}
        children.live(record, wish, int(rng.integers(20, 250)) if phase == "store" else 3000)
        if phase != "open":
            assert record.in_flight, "no store was in flight when it died"
        if phase != "store":
            assert any(each.startswith(f"dies in {phase}") for each in record.phases[seen:]), record.phases[seen:]
        seen = len(record.phases)
        check(place, record)
        first = max(record.submitted, default=-1) + 1
    return record


@pytest.mark.slow
def test_kill_at_24_instants(children: Children, tmp_path: Path) -> None:
    record = run(children, tmp_path / "tier", {"store": 10, "reclaim": 5, "checkpoint": 5, "open": 4}, seed=1)
    assert record.submitted


@pytest.mark.soak
@pytest.mark.parametrize("seed", [2, 3])
def test_kill_at_200_instants(children: Children, tmp_path: Path, seed: int) -> None:
    plan = {"store": 60, "reclaim": 15, "checkpoint": 15, "open": 10}
    run(children, tmp_path / "tier", plan, seed)
