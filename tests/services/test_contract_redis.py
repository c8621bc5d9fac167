"""The redis tier keeps the tier contract, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import redis
from servers import RedisServer
from services_kit import find_server

from kvstrata.testing.server_contract import PART, SCOPE, ServerTierContract
from kvstrata.tiers.base import Tier
from kvstrata.tiers.redis import RedisTier
from kvstrata.tiers.redis.client import OVERHEAD_BYTES
from kvstrata.types import OffloadKey


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all tests of the module; each finds it empty."""
    find_server("redis")
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


class TestRedisTier(ServerTierContract):
    server: RedisServer
    overhead: ClassVar[int] = OVERHEAD_BYTES

    @pytest.fixture(autouse=True)
    def _server(self, shared_redis: RedisServer) -> Iterator[None]:
        self.server = shared_redis
        self.raw: Any = redis.Redis.from_url(shared_redis.url)
        self.raw.flushall()
        yield
        self.raw.close()

    def make(self, limit: int | None) -> Tier:
        return self.faulty(RedisTier(self.server.url, limit=limit, part=PART))

    def name(self, key: OffloadKey) -> bytes:
        return b"kvstrata:c:" + SCOPE + key

    def damage(self, tier: Tier, key: OffloadKey) -> None:
        value = bytearray(self.raw.get(self.name(key)))
        value[-1] ^= 0xFF
        self.raw.set(self.name(key), bytes(value))

    def delete(self, tier: Tier, key: OffloadKey) -> None:
        self.raw.delete(self.name(key))

    def truncate(self, tier: Tier, key: OffloadKey) -> None:
        self.raw.set(self.name(key), self.raw.get(self.name(key))[: self.chunk_bytes // 2])

    def recount(self) -> int:
        names = [name for name in self.raw.keys("*") if name.startswith(b"kvstrata:c:")]
        return sum(self.raw.strlen(name) + OVERHEAD_BYTES for name in names)
