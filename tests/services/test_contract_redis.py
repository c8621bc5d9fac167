"""The redis tier keeps the tier contract, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import redis
from servers import RedisServer
from services_kit import find_server

from kvstrata.testing.faulty_store import FaultyClient
from kvstrata.testing.tier_contract import TierContract
from kvstrata.testing.tier_harness import LAYOUT_TAG, NAMESPACE
from kvstrata.tiers.base import Tier
from kvstrata.tiers.common.record import HEADER_BYTES
from kvstrata.tiers.redis import RedisTier
from kvstrata.tiers.redis.client import OVERHEAD_BYTES
from kvstrata.types import FailCause, OffloadKey


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all tests of the module; each finds it empty."""
    find_server("redis")
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


class TestRedisTier(TierContract):
    server: RedisServer
    overhead: ClassVar[int] = HEADER_BYTES + OVERHEAD_BYTES

    @pytest.fixture(autouse=True)
    def _server(self, shared_redis: RedisServer) -> Iterator[None]:
        self.server = shared_redis
        self.clients: list[FaultyClient] = []
        self.raw: Any = redis.Redis.from_url(shared_redis.url)
        self.raw.flushall()
        yield
        self.raw.close()

    def make(self, limit: int | None) -> Tier:
        tier = RedisTier(self.server.url, limit=limit, part="engine")
        tier._client = FaultyClient(tier._client)
        self.clients.append(tier._client)
        return tier

    def capacity(self, chunks: int) -> int:
        return chunks * (self.overhead + self.chunk_bytes)

    def name(self, key: OffloadKey) -> bytes:
        return b"kvstrata:c:" + NAMESPACE + LAYOUT_TAG.to_bytes(8, "big") + key

    def damage(self, tier: Tier, key: OffloadKey) -> None:
        value = bytearray(self.raw.get(self.name(key)))
        value[-1] ^= 0xFF
        self.raw.set(self.name(key), bytes(value))

    def delete(self, tier: Tier, key: OffloadKey) -> None:
        self.raw.delete(self.name(key))

    def truncate(self, tier: Tier, key: OffloadKey) -> None:
        self.raw.set(self.name(key), self.raw.get(self.name(key))[: self.chunk_bytes // 2])

    def fail_reads(self, tier: Tier, failing: bool) -> None:
        for client in self.clients:
            client.failing_reads = FailCause.IO_ERROR if failing else None

    def fail_writes(self, tier: Tier, failing: bool) -> None:
        for client in self.clients:
            client.failing_writes = FailCause.IO_ERROR if failing else None

    def recount(self) -> int:
        names = [name for name in self.raw.keys("*") if name.startswith(b"kvstrata:c:")]
        return sum(self.raw.strlen(name) + OVERHEAD_BYTES for name in names)

    def index_entries(self, tier: Tier) -> int:
        assert isinstance(tier, RedisTier)
        index = tier._index
        tables = (index.entries, index.fresh, index.dying, tier._pending, tier._touched, tier._waiting, tier._removed)
        return sum(map(len, tables)) + len(tier._jobs.open) + len(list(tier._tasks()))
