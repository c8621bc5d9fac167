"""The mooncake tier keeps the tier contract, on a real master."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from servers import MooncakeServer
from services_kit import find_server

from kvstrata.testing.faulty_store import FaultyClient
from kvstrata.testing.tier_contract import TierContract
from kvstrata.testing.tier_harness import LAYOUT_TAG, NAMESPACE
from kvstrata.tiers.base import Tier
from kvstrata.tiers.common.record import HEADER_BYTES
from kvstrata.tiers.mooncake import MooncakeTier
from kvstrata.types import FailCause, OffloadKey

SEGMENT = 64 << 20
SCOPE = NAMESPACE.hex() + LAYOUT_TAG.to_bytes(8, "big").hex()


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MooncakeServer, Any]]:
    """One master and one connection for all tests of the module; each finds the store empty."""
    find_server("mooncake")
    from mooncake.store import MooncakeDistributedStore

    with MooncakeServer(tmp_path_factory.mktemp("mooncake")) as server:
        store = MooncakeDistributedStore()
        assert store.setup("127.0.0.1", server.metadata, SEGMENT, 1 << 20, "tcp", "", server.master) == 0
        yield server, store
        store.close()


class TestMooncakeTier(TierContract):
    strict_lru = False  # the store keeps no time of use: after a restart the order is any

    @pytest.fixture(autouse=True)
    def _server(self, connection: tuple[MooncakeServer, Any]) -> None:
        self.server, self.store = connection
        self.store.remove_all(True)
        self.clients: list[FaultyClient] = []

    def make(self, limit: int | None) -> Tier:
        tier = MooncakeTier(limit=limit, part="engine", admin=self.server.admin, store=self.store)
        tier._client = FaultyClient(tier._client)
        self.clients.append(tier._client)
        return tier

    def capacity(self, chunks: int) -> int:
        return chunks * (HEADER_BYTES + self.chunk_bytes)

    def name(self, key: OffloadKey) -> str:
        return f"kvstrata/chunk/engine/{SCOPE}/{key.hex()}"

    def damage(self, tier: Tier, key: OffloadKey) -> None:
        value = bytearray(self.store.get(self.name(key)))
        value[-1] ^= 0xFF
        assert self.store.upsert(self.name(key), bytes(value)) == 0

    def delete(self, tier: Tier, key: OffloadKey) -> None:
        self.store.remove(self.name(key), True)

    def truncate(self, tier: Tier, key: OffloadKey) -> None:
        value = bytes(self.store.get(self.name(key)))
        assert self.store.remove(self.name(key), True) == 0
        assert self.store.put(self.name(key), value[: self.chunk_bytes // 2]) == 0

    def fail_reads(self, tier: Tier, failing: bool) -> None:
        for client in self.clients:
            client.failing_reads = FailCause.IO_ERROR if failing else None

    def fail_writes(self, tier: Tier, failing: bool) -> None:
        for client in self.clients:
            client.failing_writes = FailCause.IO_ERROR if failing else None

    def recount(self) -> int:
        tier = MooncakeTier(admin=self.server.admin, store=self.store)
        return sum(
            self.store.get_size(name) for name in tier._mooncake._all_names() if name.startswith("kvstrata/chunk/")
        )

    def index_entries(self, tier: Tier) -> int:
        assert isinstance(tier, MooncakeTier)
        index = tier._index
        tables = (index.entries, index.fresh, index.dying, tier._pending, tier._touched, tier._waiting, tier._removed)
        return sum(map(len, tables)) + len(tier._jobs.open) + len(list(tier._tasks()))
