"""I/O in a process of its own, and what its death, or the engine's, does."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.errors import ConfigError
from kvstrata.primary.region import SharedRegion
from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.executor import Signal, ThreadExecutor
from kvstrata.testing.tier_harness import LAYOUT_TAG, NAMESPACE, chunk_keys
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.disk import DiskTier, process
from kvstrata.tiers.disk import tier as disk_tier
from kvstrata.tiers.disk.acquire import acquire
from kvstrata.tiers.disk.io import SystemFiles
from kvstrata.tiers.disk.segment import divide
from kvstrata.types import FailCause, JobEnded, KeysDone, TierEvent, TierJob

CHUNK = 32_768
COUNT = 64


class Rig:
    """A tier with an I/O process, polled by hand."""

    def __init__(self, place: Path, **settings: object) -> None:
        self.region = SharedRegion(2 * COUNT * CHUNK).open()
        self.view = np.frombuffer(self.region.view, np.uint8)
        self.view[: COUNT * CHUNK] = np.random.default_rng(5).integers(0, 256, COUNT * CHUNK, dtype=np.uint8)
        self.executor = ThreadExecutor("tier", threads=4)
        self.woken = Signal()
        self.tier = DiskTier(path=str(place), limit=64 << 20, largest_chunk=CHUNK, **settings)  # type: ignore[arg-type]
        self.jobs = 0
        self.tier.open(self.context())

    def context(self) -> TierContext:
        region, clock = self.region, SystemClock()
        return TierContext(region.view, NAMESPACE, LAYOUT_TAG, clock, self.executor, self.woken.set, region.fileno())

    def job(self, half: int) -> TierJob:
        self.jobs += 1
        return TierJob(
            self.jobs, chunk_keys(COUNT), [(half * COUNT + n) * CHUNK for n in range(COUNT)], [CHUNK] * COUNT
        )

    def until(self, wanted: object, rounds: int = 2000) -> list[TierEvent]:
        events: list[TierEvent] = []
        for _ in range(rounds):
            self.woken.clear()
            events += self.tier.poll()
            if wanted(events):  # type: ignore[operator]
                return events
            self.woken.wait(0.05)
        raise AssertionError(f"nothing came: {events}")

    def run(self, kind: str, half: int) -> tuple[int, set[FailCause]]:
        job = self.job(half)
        (self.tier.submit_store if kind == "store" else self.tier.submit_load)(job)
        events = self.until(lambda seen: any(isinstance(e, JobEnded) and e.job_id == job.job_id for e in seen))
        mine = [event for event in events if isinstance(event, KeysDone) and event.job_id == job.job_id]
        done = sum(len(event.done) for event in mine)
        return done, {cause for event in mine for _, cause in event.failed}

    def end(self) -> None:
        self.tier.close()
        self.executor.close(5.0)
        del self.view
        self.region.close()


@pytest.fixture(params=[True, False], ids=["queue", "threads"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "tier", call_queue=request.param)
    yield made
    made.end()


def ends(pid: int, seconds: float) -> bool:
    """Whether a process ends within so many seconds."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


@pytest.mark.slow
def test_many_single_loads_at_once_all_end_without_a_poll_between(rig: Rig) -> None:
    assert rig.run("store", 0) == (COUNT, set())
    keys, half = chunk_keys(COUNT), COUNT * CHUNK
    for number in range(5 * COUNT):
        rig.tier.submit_load(TierJob(1000 + number, [keys[number % COUNT]], [half + number % COUNT * CHUNK], [CHUNK]))
    assert rig.tier.drain(30.0)
    events = rig.tier.poll()
    assert sum(isinstance(event, JobEnded) for event in events) == 5 * COUNT
    assert sum(len(event.done) for event in events if isinstance(event, KeysDone)) == 5 * COUNT
    assert (rig.view[:half] == rig.view[half:]).all()


@pytest.mark.slow
def test_what_was_stored_is_loaded_and_survives_close(rig: Rig, tmp_path: Path) -> None:
    assert rig.tier.statistics().io_process
    assert rig.run("store", 0) == (COUNT, set())
    assert rig.run("load", 1) == (COUNT, set())
    half = COUNT * CHUNK
    assert (rig.view[:half] == rig.view[half:]).all()
    assert rig.tier.self_test() is None
    pid = rig.tier.io_process_id
    assert pid is not None
    rig.tier.close()
    assert ends(pid, 1.0)
    again = Rig(tmp_path / "tier")
    assert (again.tier.probe(chunk_keys(COUNT)) == 2).all()
    assert again.run("load", 1) == (COUNT, set())
    assert (again.view[half:] == rig.view[half:]).all()
    again.end()


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let the I/O process be this program."""
    (folder / "another_worker.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(process, "WORKER_MODULE", "another_worker")


def test_an_opening_waits_for_the_io_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that starts slowly must not use up the clocks of the first jobs."""
    there = tmp_path / "there"
    program(
        tmp_path,
        monkeypatch,
        f"from kvstrata.runtime.disk_worker import main; open({str(there)!r}, 'w').close(); main()",
    )
    rig = Rig(tmp_path / "tier")
    try:
        assert there.exists()
        assert rig.run("store", 0) == (COUNT, set())
    finally:
        rig.end()


def test_an_opening_waits_for_an_io_process_that_hangs_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program(tmp_path, monkeypatch, "import signal; signal.pause()")
    monkeypatch.setattr(disk_tier, "START_S", 0.01)
    Rig(tmp_path / "tier").end()
    assert "its I/O process is not there" in caplog.text


def test_an_opening_goes_on_without_an_io_process_that_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program(tmp_path, monkeypatch, "raise SystemExit(1)")
    rig = Rig(tmp_path / "tier")
    try:
        assert "its I/O process is not there" in caplog.text
        assert rig.run("store", 0) == (0, {FailCause.IO_ERROR})
    finally:
        rig.end()


@pytest.mark.scenario_80
@pytest.mark.scenario_79
@pytest.mark.slow
def test_kill_of_the_io_process_fails_every_job_and_it_comes_back(rig: Rig) -> None:
    assert rig.run("store", 0) == (COUNT, set())
    first = rig.tier.io_process_id
    assert first is not None
    os.kill(first, signal.SIGSTOP)  # what is handed over now stays in its hands
    jobs = [rig.job(1) for _ in range(5)]
    for job in jobs:
        rig.tier.submit_load(job)
    ticket = rig.tier.flush()
    os.kill(first, signal.SIGKILL)
    wanted = {job.job_id for job in jobs}
    events = rig.until(lambda seen: wanted <= {e.job_id for e in seen if isinstance(e, JobEnded)})
    assert {cause for e in events if isinstance(e, KeysDone) for _, cause in e.failed} == {FailCause.IO_ERROR}
    assert ticket
    rig.until(lambda seen: rig.tier.io_process_id not in (None, first))
    assert rig.run("load", 1) == (COUNT, set())
    half = COUNT * CHUNK
    assert (rig.view[:half] == rig.view[half:]).all()


@pytest.mark.slow
def test_an_io_process_that_hangs_does_not_keep_close(rig: Rig) -> None:
    pid = rig.tier.io_process_id
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    job = rig.job(0)
    rig.tier.submit_store(job)
    rig.tier.close(timeout=0.3)
    assert ends(pid, 1.0)
    assert any(isinstance(event, JobEnded) and event.job_id == job.job_id for event in rig.tier.poll())


ENGINE = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_disk_process import Rig
rig = Rig(Path(sys.argv[1]))
assert rig.run("store", 0)[0] == 64
print(rig.tier.io_process_id, flush=True)
for _ in range(10_000):
    rig.tier.submit_load(rig.job(1))
    rig.until(lambda seen: True)
"""


@pytest.mark.slow
def test_kill_of_the_engine_ends_the_io_process_and_frees_the_directory(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(tmp_path / "tier"), here], stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None
    pid = int(engine.stdout.readline())
    os.kill(engine.pid, signal.SIGKILL)
    engine.wait(10)
    engine.stdout.close()
    assert ends(pid, 1.0)
    owned = acquire(SystemFiles(), str(tmp_path / "tier"), lambda found: divide(64 << 20, found, CHUNK))
    assert sum(index.count for index in owned.indexes.values()) == COUNT
    os.close(owned.lock)
    os.close(owned.directory)


WEIGHED = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_disk_process import Rig
Path("/proc/self/autogroup").write_text("5")
rig = Rig(Path(sys.argv[1]))
print(Path(f"/proc/{rig.tier.io_process_id}/autogroup").read_text())
rig.end()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="others may not change it twice in a tenth of a second")
@pytest.mark.skipif(not os.access("/proc/self/autogroup", os.R_OK), reason="the kernel groups no sessions")
def test_the_io_process_has_the_engines_weight_among_sessions(tmp_path: Path) -> None:
    """Else it gets no processor beside an engine that was given more and keeps all of them busy."""
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", WEIGHED, str(tmp_path / "tier"), here]
    said = subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True)
    assert said.stdout.split()[-1] == "5"


SAMPLER = """
import os, select, sys
most = samples = 0
while not select.select([sys.stdin], [], [], 0.001)[0]:
    total = 0
    with os.scandir(sys.argv[1]) as entries:
        for entry in entries:
            try:
                total += os.stat(entry.path).st_blocks * 512
            except FileNotFoundError:
                pass
    most, samples = max(most, total), samples + 1
print(most, total, samples, flush=True)
"""


@pytest.mark.scenario_16
@pytest.mark.slow
def test_the_limit_holds_at_every_millisecond_under_four_writers(tmp_path: Path) -> None:
    place = tmp_path / "tier"
    rig = Rig(place, checkpoint_segments=4)
    limit = rig.tier.usage().bytes_limit
    assert limit is not None
    sampler = subprocess.Popen(
        [sys.executable, "-c", SAMPLER, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    per_job, offered, running, stored = COUNT // 4, 0, {}, 0
    free = list(range(4))
    while offered < 3.2 * limit or running:
        while free and offered < 3.2 * limit:
            writer = free.pop()
            rig.jobs += 1
            keys = chunk_keys(per_job, start=rig.jobs * per_job)
            offsets = [(writer * per_job + n) * CHUNK for n in range(per_job)]
            running[rig.jobs] = writer
            rig.tier.submit_store(TierJob(rig.jobs, keys, offsets, [CHUNK] * per_job))
            offered += per_job * CHUNK
        events = rig.until(lambda seen: any(isinstance(each, JobEnded) for each in seen))
        free += [running.pop(each.job_id) for each in events if isinstance(each, JobEnded)]
        stored += sum(len(each.done) for each in events if isinstance(each, KeysDone))
        usage = rig.tier.usage()
        assert usage.bytes_held + usage.bytes_reserved <= limit
    said, _ = sampler.communicate("")
    most, last, samples = map(int, said.split())
    held = rig.tier.usage().bytes_held
    rig.end()
    assert samples > 20
    assert most <= limit
    assert last >= 0.85 * limit
    assert held >= 0.85 * limit
    assert stored * CHUNK >= 3 * limit


@pytest.mark.slow
def test_a_directory_that_vanishes_ends_the_io_process_and_a_new_one_follows(rig: Rig, tmp_path: Path) -> None:
    assert rig.run("store", 0) == (COUNT, set())
    first = rig.tier.io_process_id
    assert first is not None
    shutil.rmtree(tmp_path / "tier")
    rig.until(lambda seen: rig.tier.io_process_id not in (None, first))
    assert ends(first, 1.0)
    assert (rig.tier.probe(chunk_keys(COUNT)) == 0).all()
    assert rig.run("store", 0) == (COUNT, set())
    assert rig.run("load", 1) == (COUNT, set())


def test_an_io_process_needs_a_region_that_can_be_shared(tmp_path: Path) -> None:
    tier = DiskTier(path=str(tmp_path / "tier"), limit=64 << 20, io_process=True)
    context = TierContext(memoryview(bytearray(4096)), NAMESPACE, LAYOUT_TAG, SystemClock(), ThreadExecutor("none"))
    with pytest.raises(ConfigError, match="io_process"):
        tier.open(context)
