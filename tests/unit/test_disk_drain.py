"""Draining while a checkpoint is being written: the workers do not answer for it."""

from __future__ import annotations

from kvstrata.testing.clock import ManualClock
from kvstrata.testing.executor import ManualExecutor
from kvstrata.testing.simfs import SimDisk, SimFiles
from kvstrata.testing.tier_harness import LAYOUT_TAG, NAMESPACE, chunk_keys
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.disk import DiskTier
from kvstrata.tiers.disk.recover import CHECKPOINT_NAME
from kvstrata.tiers.disk.volume import Volume
from kvstrata.types import TierJob

CHUNK = 4096


class Elsewhere(ManualExecutor):
    """While somebody waits for the workers these do not answer, but one task goes on, as on a thread of its own."""

    def wait_idle(self, timeout: float) -> bool:
        self.run_next()
        return False


def with_a_checkpoint_in_the_making() -> tuple[DiskTier, Volume, Elsewhere, SimFiles]:
    files, executor = SimFiles(SimDisk()), Elsewhere()
    region = memoryview(bytearray(64 * CHUNK))
    tier = DiskTier(
        path="/tier", limit=4 << 20, segment_bytes=1 << 19, largest_chunk=CHUNK, checkpoint_segments=1, files=files
    )
    tier.open(TierContext(region, NAMESPACE, LAYOUT_TAG, ManualClock(), executor))
    volume = tier._volume
    assert volume is not None
    for number in range(100):
        job = TierJob(number, chunk_keys(64, start=64 * number), [n * CHUNK for n in range(64)], [CHUNK] * 64)
        tier.submit_store(job)
        while executor.run_next():
            tier.poll()
            snapshot = volume.upkeep.snapshot
            if volume.saving and snapshot is not None and snapshot.running:
                return tier, volume, executor, files
    raise AssertionError("no checkpoint was begun")


def test_drain_waits_for_a_checkpoint_in_the_making() -> None:
    tier, volume, _, files = with_a_checkpoint_in_the_making()
    assert not volume.idle
    assert tier.drain(30.0)
    assert volume.idle
    directory = files.open_directory("/tier", create=False)
    assert files.stat(directory, CHECKPOINT_NAME) is not None
    tier.close()


def test_drain_of_a_checkpoint_that_hangs_ends() -> None:
    tier, volume, executor, _ = with_a_checkpoint_in_the_making()
    while executor.drop_next():  # the task that writes it is among them
        pass
    assert not tier.drain(1.0)
    assert not volume.idle
