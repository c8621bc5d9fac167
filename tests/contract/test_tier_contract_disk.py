"""The disk tier keeps the tier contract, on real files."""

from __future__ import annotations

import errno

import pytest

from kvstrata.errors import ConfigError
from kvstrata.testing.simfs import FaultyFiles
from kvstrata.testing.tier_contract import TierContract
from kvstrata.testing.tier_harness import TierHarness, chunk_key, chunk_keys
from kvstrata.tiers.base import Tier
from kvstrata.tiers.disk import DiskTier
from kvstrata.tiers.disk.io import SystemFiles
from kvstrata.tiers.disk.segment import SEGMENT_SLACK, divide
from kvstrata.types import OffloadKey, Presence


class DiskContract(TierContract):
    """Few chunks go into a segment, so that each limit of the suite holds few of them."""

    strict_lru = False

    @property
    def segment_bytes(self) -> int:
        return 2 * 4096 + -(-2 * self.chunk_bytes // 4096) * 4096

    def make(self, limit: int | None) -> Tier:
        files = FaultyFiles(SystemFiles())
        return DiskTier(path=str(self.place / "data"), limit=limit, segment_bytes=self.segment_bytes, files=files)

    def capacity(self, chunks: int) -> int:
        per_segment = (self.segment_bytes - 2 * 4096) // self.chunk_bytes
        segments = max(chunks // per_segment + 1, 2)  # one is always empty
        room = segments * (self.segment_bytes + SEGMENT_SLACK)
        limit = room
        while True:
            sizes = self._divide(limit)
            if sizes is not None and limit - sizes >= room:
                return limit
            limit += 4096

    def _divide(self, limit: int) -> int | None:
        try:
            return divide(limit, self.segment_bytes, 1).overhead
        except ConfigError:
            return None

    @staticmethod
    def files(tier: Tier) -> FaultyFiles:
        assert isinstance(tier, DiskTier)
        assert isinstance(tier._files, FaultyFiles)
        return tier._files

    def damage(self, tier: Tier, key: OffloadKey) -> None:
        assert isinstance(tier, DiskTier)
        assert tier.damage(key)

    def truncate(self, tier: Tier, key: OffloadKey) -> None:
        assert isinstance(tier, DiskTier)
        assert tier._live is not None
        place = tier._live.place_of(key)
        assert place is not None
        path = self.place / "data" / f"segment-{place.segment:08x}.kvs"
        content = bytearray(path.read_bytes())
        content[place.offset + place.length // 2 : place.offset + place.length] = bytes(-(-place.length // 2))
        path.write_bytes(content)

    def fail_reads(self, tier: Tier, failing: bool) -> None:
        files = self.files(tier)
        files.faults = [fault for fault in files.faults if "preadv" not in fault.calls]
        if failing:
            files.fail("preadv", code=errno.EIO)

    def fail_writes(self, tier: Tier, failing: bool) -> None:
        files = self.files(tier)
        files.faults = [fault for fault in files.faults if "pwritev" not in fault.calls]
        if failing:
            files.fail("pwritev", "allocate", "sync", code=errno.EIO)

    def recount(self) -> int:
        folder = self.place / "data"
        return sum(path.stat().st_blocks * 512 for path in folder.iterdir()) if folder.exists() else 0

    def index_entries(self, tier: Tier) -> int:
        assert isinstance(tier, DiskTier)
        volume = tier._live
        assert volume is not None
        waiting = len(volume.writes.waiters) + len(volume.writes.unwritten) + len(volume.writes.queue)
        return waiting + len(volume.desk.ops) + sum(index.taken for index in volume.desk.indexes.values())

    # Segments are preallocated: what is not held stays allocated, and is told as reserved.

    def test_removal_is_idempotent_and_accounted(self) -> None:
        rig = self.rig()
        keys = chunk_keys(4)
        rig.store(keys)
        held = rig.tier.usage().bytes_held
        assert held > 0
        for _ in range(2):
            rig.tier.remove([*keys[:2], chunk_key(77)])
            assert Presence.PRESENT not in rig.probe(keys[:2])
            rig.settle()
        assert rig.probe(keys) == [Presence.ABSENT] * 2 + [Presence.PRESENT] * 2
        rig.tier.remove(keys)
        rig.settle()
        usage = rig.tier.usage()
        assert usage.keys == 0
        assert usage.bytes_held == 0
        assert usage.bytes_reserved >= self.recount()

    def test_usage_is_true_at_every_instant(self) -> None:
        rig = self.rig(chunks=12, seed=5)

        def measure() -> None:
            usage = rig.tier.usage()
            assert self.recount() <= usage.bytes_held + usage.bytes_reserved

        rig.checks.append(measure)
        keys = chunk_keys(40)
        for number in range(40):
            picked = [keys[(number * 7 + step * 5) % 40] for step in range(3)]
            match number % 4:
                case 0 | 1:
                    rig.submit_store(picked)
                case 2:
                    rig.submit_load(picked)
                case _:
                    rig.tier.remove(picked)
            rig.step()
        rig.settle()
        assert rig.tier.usage().keys == len(rig.present(keys))


class TestDiskTierWithSmallOddChunks(DiskContract):
    chunk_bytes = 1000


class TestDiskTierWithWholeSectors(DiskContract):
    chunk_bytes = 8192


@pytest.mark.parametrize("limit", [1, 4096, 60_000])
def test_a_limit_too_small_for_two_segments_is_a_config_error(tmp_path, limit: int) -> None:
    tier = DiskTier(path=str(tmp_path / "data"), limit=limit)
    with pytest.raises(ConfigError, match="limit"):
        tier.open(TierHarness(tier, chunk_bytes=64).context())
