"""Places for the tiers that come with kvstrata, so that one scenario runs against each of them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstrata.testing.faulty_files import FaultyFileSystem
from kvstrata.testing.simfs import FaultyFiles
from kvstrata.testing.stack import CoreStack
from kvstrata.testing.tier_harness import NAMESPACE, TierHarness
from kvstrata.tiers.base import Tier
from kvstrata.tiers.disk import DiskTier
from kvstrata.tiers.disk.io import SystemFiles
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.memory import MemoryTier
from kvstrata.types import OffloadKey

CHUNK = 5000
LASTING = ("fs", "disk")
ALL = ("memory", *LASTING)


@dataclass
class Place:
    """Where tiers of one kind are made, one after the other or several at once."""

    kind: str
    root: Path
    chunk: int = CHUNK
    files: FaultyFileSystem = field(default_factory=FaultyFileSystem)
    """File calls of the fs tiers made here."""
    disk_files: FaultyFiles = field(default_factory=lambda: FaultyFiles(SystemFiles()))

    def tier(self, limit: int | None = None, **how: object) -> Tier:
        """A tier that is not open."""
        match self.kind:
            case "memory":
                return MemoryTier(limit=limit, **how)  # type: ignore[arg-type]
            case "fs":
                return FsTier(str(self.root), limit=limit, files=self.files, **how)  # type: ignore[arg-type]
        how = {"segment_bytes": 65_536, "largest_chunk": self.chunk, **how}
        return DiskTier(path=str(self.root), limit=limit, files=self.disk_files, **how)  # type: ignore[arg-type]

    def rig(self, limit: int | None = None, *, seed: int | None = None, namespace: bytes = NAMESPACE,
            layout_tag: int = 1, trims: bool = False, **how: object) -> TierHarness:  # fmt: skip
        """An open tier with its harness. `trims`: the place holds more than the limit until opening is through."""
        tier = self.tier(limit, **how)
        rig = TierHarness(
            tier, chunk_bytes=self.chunk, slots=256, seed=seed, namespace=namespace, layout_tag=layout_tag
        )
        rig.over_limit_at_open = trims
        rig.open()
        rig.over_limit_at_open = False
        return rig

    def file_of(self, key: OffloadKey) -> Path:
        """The file of a chunk of the fs tier."""
        (found,) = self.root.rglob(key.hex())
        return found

    def used(self) -> int:
        """Bytes that all files in the place take now, found by looking."""
        files = (os.path.join(folder, name) for folder, _, names in os.walk(self.root) for name in names)
        return sum(os.stat(file).st_blocks * 512 for file in files)

    def fail_reads(self, code: int, times: int | None = None) -> None:
        """Reads of payloads fail."""
        self.files.fail("read", code=code, times=times)
        self.disk_files.fail("preadv", code=code)

    def heal(self) -> None:
        """Nothing fails any more."""
        self.files.clear()
        self.disk_files.faults.clear()


def places(*kinds: str) -> pytest.MarkDecorator:
    """Run against a place of each of these kinds."""
    return pytest.mark.parametrize("place", kinds, indirect=True)


def count_probes(tier: FsTier) -> list[OffloadKey]:
    """The keys that the tier is probed for from now on."""
    seen: list[OffloadKey] = []
    probe = tier.probe

    def counted(keys: list[OffloadKey]) -> object:
        seen.extend(keys)
        return probe(keys)

    tier.probe = counted  # type: ignore[method-assign, assignment]
    return seen


def empty_primary(stack: CoreStack, keys: list[OffloadKey]) -> None:
    """Evict chunks from primary; the tiers keep theirs."""
    slots = stack.core.residency.find(keys)
    stack.core.residency.evict(slots[slots >= 0])


def clean(stack: CoreStack) -> None:
    """Nothing is under way and nothing is held."""
    stack.check()
    assert stack.core.idle
    residency = stack.core.residency
    assert residency.pinned_bytes == residency.reserved_bytes == residency.quarantined_bytes == 0


def turn(stack: CoreStack, name: str, seed: str, tokens: int) -> int:
    """A request that asks until it has its answer, and ends; returns the tokens that it was brought."""
    stack.add(name, tokens, seed=seed)
    hit = stack.poll_until_answered(name, 0, tokens)
    plan = stack.take(name, hit)
    if plan is not None:
        assert stack.complete_load(plan)
    stack.finish(name)
    return hit
