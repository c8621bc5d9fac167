"""Segments that are made before they are needed: how many, within the limit, and what a new opening makes of them."""

from __future__ import annotations

from pathlib import Path

from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.executor import ThreadExecutor
from kvstrata.testing.tier_harness import LAYOUT_TAG, NAMESPACE, chunk_keys
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.disk import DiskTier
from kvstrata.tiers.disk.segment import SegmentState
from kvstrata.types import KeysDone, TierJob

CHUNK = 4096
SEGMENT = 1 << 20


def opened(place: Path, limit: int) -> tuple[DiskTier, ThreadExecutor, memoryview]:
    executor, region = ThreadExecutor("spares", threads=2), memoryview(bytearray(64 * CHUNK))
    tier = DiskTier(path=str(place), limit=limit, segment_bytes=SEGMENT, largest_chunk=CHUNK, io_process=False)
    tier.open(TierContext(region, NAMESPACE, LAYOUT_TAG, SystemClock(), executor))
    assert tier.drain(30.0)
    return tier, executor, region


def closed(tier: DiskTier, executor: ThreadExecutor) -> None:
    tier.close()
    executor.close(5.0)


def states(tier: DiskTier) -> list[SegmentState]:
    assert tier._volume is not None
    return [segment.state for segment in tier._volume.desk.space.segments.values()]


def store(tier: DiskTier, job_id: int, start: int) -> int:
    tier.submit_store(TierJob(job_id, chunk_keys(64, start=start), [n * CHUNK for n in range(64)], [CHUNK] * 64))
    assert tier.drain(30.0)
    return sum(len(event.done) for event in tier.poll() if isinstance(event, KeysDone))


def test_a_few_files_are_made_ahead_and_never_above_the_limit(tmp_path: Path) -> None:
    tier, executor, _ = opened(tmp_path / "roomy", 12 * SEGMENT)
    assert states(tier) == [SegmentState.SPARE] * 4
    closed(tier, executor)
    tier, executor, _ = opened(tmp_path / "tight", 3 * SEGMENT)
    assert states(tier) == [SegmentState.SPARE] * 2
    usage = tier.usage()
    assert usage.bytes_held + usage.bytes_reserved <= 3 * SEGMENT
    closed(tier, executor)


def test_spares_are_spares_again_after_an_opening_and_the_active_one_goes_on(tmp_path: Path) -> None:
    tier, executor, _ = opened(tmp_path / "tier", 12 * SEGMENT)
    assert store(tier, 1, 0) == 64
    before = states(tier)
    assert before.count(SegmentState.ACTIVE) == 1
    assert before.count(SegmentState.SPARE) == 4
    closed(tier, executor)
    tier, executor, _ = opened(tmp_path / "tier", 12 * SEGMENT)
    assert sorted(s.value for s in states(tier)) == sorted(s.value for s in before)
    assert tier._volume is not None
    space = tier._volume.desk.space
    assert space.active is not None
    assert [segment.seq for segment in space.spares] == sorted(segment.seq for segment in space.spares)
    assert space.active.seq < space.spares[0].seq
    cursor = space.active.cursor
    assert store(tier, 1, 1000) == 64
    assert space.active.cursor > cursor
    assert (tier.probe(chunk_keys(64)) == 2).all()
    closed(tier, executor)
