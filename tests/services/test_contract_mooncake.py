"""The mooncake tier keeps the tier contract, on a real master."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from servers import MooncakeServer
from services_kit import find_server

from kvstrata.testing.server_contract import PART, SCOPE, ServerTierContract
from kvstrata.tiers.base import Tier
from kvstrata.tiers.common.record import HEADER_BYTES
from kvstrata.tiers.mooncake import MooncakeTier
from kvstrata.types import OffloadKey

SEGMENT = 64 << 20


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


class TestMooncakeTier(ServerTierContract):
    """Without tail room: header and payload are two pieces."""

    strict_lru = False  # the store keeps no time of use: after a restart the order is any

    @pytest.fixture(autouse=True)
    def _server(self, connection: tuple[MooncakeServer, Any]) -> None:
        self.server, self.store = connection
        self.store.remove_all(True)

    def make(self, limit: int | None) -> Tier:
        return self.faulty(MooncakeTier(limit=limit, part=PART, admin=self.server.admin, store=self.store))

    def name(self, key: OffloadKey) -> str:
        return f"kvstrata/record/{PART}/{SCOPE.hex()}/{key.hex()}"

    def damage(self, tier: Tier, key: OffloadKey) -> None:
        value = bytearray(self.store.get(self.name(key)))
        value[0] ^= 0xFF
        assert self.store.upsert(self.name(key), bytes(value)) == 0

    def delete(self, tier: Tier, key: OffloadKey) -> None:
        self.store.remove(self.name(key), True)

    def truncate(self, tier: Tier, key: OffloadKey) -> None:
        value = bytes(self.store.get(self.name(key)))
        assert self.store.remove(self.name(key), True) == 0
        assert self.store.put(self.name(key), value[: self.chunk_bytes // 2]) == 0

    def recount(self) -> int:
        tier = MooncakeTier(admin=self.server.admin, store=self.store)
        return sum(
            self.store.get_size(name) for name in tier._mooncake._all_names() if name.startswith("kvstrata/record/")
        )


class TestMooncakeTierWithTailRoom(TestMooncakeTier):
    """The header stands behind its payload, and nothing is written behind that."""

    tail_room = HEADER_BYTES
