"""After many opens and closes, and after opens that failed at every call, nothing is left of any of them.

Counted are threads, descriptors, files of shared memory, child processes, and the memory that Python and NumPy hold.
The first rounds are not counted: caches of the interpreter and of libraries fill in them. `make soak` does 1000 rounds
of everything.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstrata.core.manager import TieringOffloadingManager
from kvstrata.core.settings import CoreConfig
from kvstrata.errors import KVStrataError
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import FullAttention
from kvstrata.primary import region as region_module
from kvstrata.primary.region import AnonymousRegion, SharedRegion
from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.driver import Driver
from kvstrata.runtime.executor import ThreadExecutor
from kvstrata.runtime.guard import GuardedTier
from kvstrata.testing.faulty_files import FaultyFileSystem
from kvstrata.testing.simfs import FaultyFiles
from kvstrata.testing.tier_harness import TierHarness, chunk_keys
from kvstrata.tiers.base import Tier, TierContext
from kvstrata.tiers.disk import DiskTier
from kvstrata.tiers.disk.io import SystemFiles
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.memory import MemoryTier
from kvstrata.tiers.registry import make_tier

CHUNK = 1000
LIMIT = 1_000_000
WARM_UP = 12
PER_ROUND = 200
"""Bytes that may be left of each round: a tenth of the smallest thing that could leak (a buffer, an index, a tier)."""
SLACK = 100_000
"""Bytes that may be left in all: logging, interned names and the like, which come once and not per round."""


@dataclass(frozen=True)
class Footprint:
    """What this process holds of the machine."""

    threads: int
    descriptors: int
    shared_files: int
    children: int
    mappings: int
    """Of regions that others can map."""


def footprint() -> Footprint:
    """Counted by looking, not by asking anybody."""
    threads = len(sys._current_frames())  # Python's own: libraries keep pools that breathe
    children = 0
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):
            children += len(Path(f"/proc/self/task/{thread}/children").read_text(encoding="ascii").split())
    shared = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").count("memfd:kvstrata")
    return Footprint(threads, len(os.listdir("/proc/self/fd")), len(shared), children, maps)


def settled(expected: Footprint) -> Footprint:
    """The footprint, once threads that were told to end have had their turn to do so."""
    found = footprint()
    for _ in range(2000):
        if found == expected:
            break
        os.sched_yield()
        found = footprint()
    return found


def at_rest() -> Footprint:
    """The footprint, once what earlier tests have told to end has ended: it must not be counted as ours."""
    gc.collect()
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(0.1)  # those that an earlier test has abandoned stay, before and after
    return footprint()


def check_rounds(one: Callable[[], None], rounds: int, warm_up: int = WARM_UP) -> None:
    """Do `one` many times; nothing may be left."""
    before = at_rest()
    for _ in range(warm_up):
        one()
    gc.collect()
    tracemalloc.start()
    try:
        one()
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        for _ in range(rounds):
            one()
        gc.collect()
        left = tracemalloc.get_traced_memory()[0] - held
    finally:
        tracemalloc.stop()
    after = settled(before)
    assert after == before
    assert left <= SLACK + PER_ROUND * rounds, f"{left} bytes are left of {rounds} rounds"


def rounds(most: int) -> pytest.MarkDecorator:
    """So many rounds by default, 1000 in the soak."""
    counts: list[object] = [most]
    if most < 1000:
        counts.append(pytest.param(1000, marks=pytest.mark.soak))
    return pytest.mark.parametrize("count", counts)


# regions


@rounds(1000)
@pytest.mark.parametrize("kind", [AnonymousRegion, SharedRegion])
def test_regions(kind: type[AnonymousRegion | SharedRegion], count: int) -> None:
    def one() -> None:
        with kind(1 << 16, rooms=list) as region:
            region.view[0] = 1

    check_rounds(one, count)


SYSTEM_CALLS = {
    "memfd": (os, "memfd_create"),
    "size": (os, "ftruncate"),
    "map": (region_module, "map_shared"),
    "touch": (os, "pwrite"),
    "room": (os, "posix_fallocate"),
}


@pytest.mark.parametrize("call", SYSTEM_CALLS)
def test_a_region_that_fails_to_open_leaves_nothing(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*unused: object, **unused_too: object) -> None:
        raise OSError(errno.ENOMEM, "injected")

    def one() -> None:
        region = SharedRegion(1 << 16, rooms=list)
        with monkeypatch.context() as patched:
            patched.setattr(*SYSTEM_CALLS[call], refuse)
            with pytest.raises(KVStrataError, match="does not fit"):
                region.open()
        region.open()  # the same object works as soon as the machine does
        region.close()

    check_rounds(one, 50)


# tiers, on real files


def tier_of(kind: str, place: Path) -> Tier:
    match kind:
        case "memory":
            return MemoryTier(limit=LIMIT)
        case "fs":
            return FsTier(str(place), limit=LIMIT, files=FaultyFileSystem())
        case "part":
            return make_tier("fs", path=str(place), part="a", limit=LIMIT)
        case "object":
            store = pytest.importorskip("obstore.store", reason="the object tier is built on obstore").MemoryStore()
            return make_tier("object", url="memory://here", part="a", limit=LIMIT, store=store)
    files = FaultyFiles(SystemFiles())
    return DiskTier(path=str(place), limit=LIMIT, segment_bytes=65_536, largest_chunk=CHUNK, files=files)


def use(tier: Tier) -> None:
    """Open, store, load, close, all by hand."""
    rig = TierHarness(tier, chunk_bytes=CHUNK, slots=8).open()
    keys = chunk_keys(2)
    rig.store(keys)
    rig.check_loaded(rig.load(keys))
    rig.close()
    assert not rig.executor.raised
    if isinstance(tier, FsTier) and isinstance(tier._files, FaultyFileSystem):
        tier._files.log.clear()  # the double's own


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "fs", "part", "disk", "object"])
@rounds(100)
def test_tiers(kind: str, count: int, tmp_path: Path) -> None:
    if kind == "object":
        use(tier_of(kind, tmp_path / "place"))  # the library starts threads of its own, once
    check_rounds(lambda: use(tier_of(kind, tmp_path / "place")), count)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "fs", "disk"])
@rounds(60)
def test_one_tier_that_is_opened_again_and_again(kind: str, count: int, tmp_path: Path) -> None:
    tier = tier_of(kind, tmp_path / "place")
    check_rounds(lambda: use(tier), count)


class KthCall:
    """Fails the k-th file call, and no other."""

    def __init__(self, k: int, code: int) -> None:
        self.left = k
        self.code = code
        self.struck = False

    def __call__(self, *unused: object) -> None:
        self.left -= 1
        if self.left == 0:
            self.struck = True
            raise OSError(self.code, "injected")


@contextmanager
def failing(tier: Tier, fault: KthCall) -> Iterator[None]:
    """The k-th file call of this tier fails from here on, until the block is left."""
    if isinstance(tier, FsTier):
        files = tier._files
        assert isinstance(files, FaultyFileSystem)
        files._enter = lambda call, name="": fault()  # type: ignore[method-assign]
        yield
        del files._enter  # type: ignore[method-assign]
    else:
        assert isinstance(tier, DiskTier)
        assert isinstance(tier._files, FaultyFiles)
        tier._files.before = fault
        yield
        tier._files.before = None


@pytest.mark.slow
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize("kind", ["fs", "disk"])
def test_an_open_that_fails_at_its_k_th_call_leaves_nothing(kind: str, code: int, used: bool, tmp_path: Path) -> None:
    place = tmp_path / "place"
    if used:
        use(tier_of(kind, place))
    use(tier_of(kind, tmp_path / "other"))  # what a first use loads is loaded
    before = at_rest()
    for k in range(1, 500):
        tier, fault = tier_of(kind, place), KthCall(k, code)
        rig = TierHarness(tier, chunk_bytes=CHUNK, slots=8)
        with failing(tier, fault):
            with suppress(KVStrataError, OSError):
                rig.open()
            rig.executor.run_all()
        rig.close()
        rig.executor.run_all()
        assert settled(before) == before, f"call {k}"
        if not fault.struck:
            break
    else:
        pytest.fail("no open went through")
    assert k > 5, "the open makes more calls than that"
    use(tier_of(kind, place))
    assert settled(before) == before


# a driver with its thread, tiers with theirs, and an I/O process


LAYOUT = Layout((Group(FullAttention(), 16, chunk_bytes=CHUNK),))


def serve(place: Path, *, io_process: bool) -> None:
    """Everything that one engine has: region, executor, tiers behind guards, manager, driver and its thread."""
    region = SharedRegion(64 * CHUNK, rooms=list).open()
    tiers: list[Tier] = [MemoryTier(limit=LIMIT), FsTier(str(place / "fs"), limit=LIMIT)]
    how = {"segment_bytes": 65_536, "largest_chunk": CHUNK, "io_process": io_process}
    tiers.append(DiskTier(path=str(place / "disk"), limit=LIMIT, **how))  # type: ignore[arg-type]
    guards = [GuardedTier(tier) for tier in tiers]
    manager = TieringOffloadingManager(LAYOUT, CoreConfig(capacity_bytes=64 * CHUNK), guards)
    driver: Driver[TieringOffloadingManager] = Driver(manager, guards, SystemClock())
    executors = [ThreadExecutor("leaks", 2) for _ in guards]  # each tier has, and closes, its own
    for guard, executor in zip(guards, executors, strict=True):
        guard.open(TierContext(region.view, bytes(16), 1, SystemClock(), executor, driver.wake, region.fileno()))
        assert guard.open_error is None
    driver.start()
    with driver.step() as core:
        core.add_request("r", [chunk_keys(4)])
        plan = core.prepare_store("r", [(0, i) for i in range(4)])
        assert plan is not None
        core.complete_store(plan.job_id)
        core.finish("r")
    assert driver.close(10.0)
    for executor in executors:
        assert executor.close(5.0)
    region.close()


@pytest.mark.slow
@rounds(25)
def test_a_driver_with_its_tiers(count: int, tmp_path: Path) -> None:
    tmp_path.joinpath("fs").mkdir(mode=0o700)
    check_rounds(lambda: serve(tmp_path, io_process=False), count)


@pytest.mark.slow
@rounds(2)
def test_a_driver_with_an_io_process(count: int, tmp_path: Path) -> None:
    tmp_path.joinpath("fs").mkdir(mode=0o700)
    check_rounds(lambda: serve(tmp_path, io_process=True), count, warm_up=2)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "good"), [("pipe", 0), ("pipe", 2), ("popen", 0)])
def test_an_io_process_that_cannot_be_started_leaves_nothing(
    call: str, good: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import subprocess

    from kvstrata.tiers.disk import process

    region = SharedRegion(1 << 16, rooms=list).open()
    place = tmp_path / "disk"

    def one(*, broken: bool) -> None:
        executor = ThreadExecutor("leaks", 2)
        tier = DiskTier(path=str(place), limit=LIMIT, segment_bytes=65_536, largest_chunk=CHUNK)
        context = TierContext(region.view, bytes(16), 1, SystemClock(), executor, lambda: None, region.fileno())
        with monkeypatch.context() as patched:
            if broken:
                place_of, name = (os, "pipe") if call == "pipe" else (subprocess, "Popen")
                patched.setattr(place_of, name, refuse_after(good, getattr(place_of, name)))
            with suppress(OSError):
                tier.open(context)
            assert not broken or tier.io_process_id is None
            tier.poll()
            tier.close(2.0)
        executor.close(2.0)

    def refuse_after(left: int, really: Callable[..., object]) -> Callable[..., object]:
        def call_it(*args: object, **named: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.EMFILE, "injected")
            return really(*args, **named)

        return call_it

    assert process.subprocess is subprocess
    before = at_rest()
    one(broken=False)
    for _ in range(5):
        one(broken=True)
    after = settled(before)
    assert after == before
    one(broken=False)
    after = settled(before)
    assert after == before
    region.close()
