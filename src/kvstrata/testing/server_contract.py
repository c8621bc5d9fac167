"""The contract suite for tiers over a server (tiers/server): hooks that are the same whatever the server is.

`ObjectTierContract` goes on for object stores: a subclass says which store, and has the whole suite.
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import obstore
import pytest
from obstore.store import ObjectStore

from kvstrata.testing.faulty_store import FaultyClient
from kvstrata.testing.tier_contract import TierContract
from kvstrata.testing.tier_harness import LAYOUT_TAG, NAMESPACE
from kvstrata.tiers.base import Tier
from kvstrata.tiers.common.record import HEADER_BYTES
from kvstrata.tiers.object import ObjectTier
from kvstrata.tiers.server import ServerTier
from kvstrata.types import FailCause, OffloadKey

SCOPE = NAMESPACE + LAYOUT_TAG.to_bytes(8, "big")
PART = "engine"


class ServerTierContract(TierContract):
    """Requests fail on command; what a record takes is its header, its payload and `overhead`."""

    overhead: ClassVar[int] = 0

    @pytest.fixture(autouse=True)
    def _clients(self) -> None:
        self.clients: list[FaultyClient] = []

    def faulty(self, tier: ServerTier) -> Tier:
        """The tier, its requests at the mercy of `fail_reads` and `fail_writes`. For use in `make`."""
        client: Any = FaultyClient(tier._client)
        tier._client = client
        self.clients.append(client)
        return tier

    def capacity(self, chunks: int) -> int:
        """Header, payload and overhead of each."""
        return chunks * (HEADER_BYTES + self.overhead + self.chunk_bytes)

    def fail_reads(self, tier: Tier, failing: bool) -> None:
        """Of all tiers of the test: they share the server."""
        for client in self.clients:
            client.failing_reads = FailCause.IO_ERROR if failing else None

    def fail_writes(self, tier: Tier, failing: bool) -> None:
        """Of all tiers of the test: they share the server."""
        for client in self.clients:
            client.failing_writes = FailCause.IO_ERROR if failing else None

    def index_entries(self, tier: Tier) -> int:
        """All tables of the engine of server tiers."""
        assert isinstance(tier, ServerTier)
        index = tier._index
        tables = (index.entries, index.fresh, index.dying, tier._pending, tier._touched, tier._waiting, tier._removed)
        return sum(map(len, tables)) + len(tier._jobs.open) + len(list(tier._tasks()))


class ObjectTierContract(ServerTierContract):
    """`open_tier` makes a tier of the part `PART` below `self.prefix`; `raw` is a way to the same bucket beside it."""

    raw: ObjectStore
    prefix: str
    _numbers = itertools.count(1)

    @pytest.fixture(autouse=True)
    def _prefix(self) -> None:
        self.prefix = f"test-{next(self._numbers)}"

    def open_tier(self, limit: int | None) -> ObjectTier:
        """A tier that is not open yet."""
        raise NotImplementedError

    def make(self, limit: int | None) -> Tier:
        """A tier whose requests fail on command."""
        return self.faulty(self.open_tier(limit))

    def _path(self, key: OffloadKey) -> str:
        return f"{self.prefix}/parts/{PART}/{SCOPE.hex()}/{key.hex()}"

    def damage(self, tier: Tier, key: OffloadKey) -> None:
        """Another last byte."""
        data = bytearray(obstore.get(self.raw, self._path(key)).bytes())
        data[-1] ^= 0xFF
        obstore.put(self.raw, self._path(key), bytes(data))

    def delete(self, tier: Tier, key: OffloadKey) -> None:
        """The object goes."""
        obstore.delete(self.raw, self._path(key))

    def truncate(self, tier: Tier, key: OffloadKey) -> None:
        """The first half of it."""
        data = bytes(obstore.get(self.raw, self._path(key)).bytes())
        obstore.put(self.raw, self._path(key), data[: len(data) // 2])

    def recount(self) -> int:
        """What a list of the parts shows."""
        return sum(meta["size"] for page in obstore.list(self.raw, prefix=f"{self.prefix}/parts") for meta in page)
