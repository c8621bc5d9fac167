"""The object tier keeps the tier contract, on a real S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import obstore
import pytest
from obstore.store import S3Store
from servers import S3Server
from services_kit import find_server

from kvstrata.testing.faulty_store import FaultyClient
from kvstrata.testing.tier_contract import TierContract
from kvstrata.testing.tier_harness import LAYOUT_TAG, NAMESPACE
from kvstrata.tiers.base import Tier
from kvstrata.tiers.common.record import HEADER_BYTES
from kvstrata.tiers.object import ObjectTier
from kvstrata.types import FailCause, OffloadKey

SCOPE = NAMESPACE.hex() + LAYOUT_TAG.to_bytes(8, "big").hex()


@pytest.fixture(scope="module")
def shared_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One server for all tests of the module; each has a prefix of its own."""
    find_server("object")
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


class TestObjectTierS3(TierContract):
    strict_lru: ClassVar[bool] = False
    """S3 keeps the time of the last change by the second: the order over a restart is not exact."""
    count = 0

    @pytest.fixture(autouse=True)
    def _server(self, shared_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("KVS_SECRET_ACCESS_KEY", "test")
        self.server = shared_s3
        self.clients: list[FaultyClient] = []
        type(self).count += 1
        self.prefix = f"test-{self.count}"
        self.raw = S3Store(
            S3Server.BUCKET,
            endpoint=shared_s3.endpoint,
            region="us-east-1",
            access_key_id="test",
            secret_access_key="test",
            client_options={"allow_http": True},
        )

    def make(self, limit: int | None) -> Tier:
        tier = ObjectTier(
            f"s3://{S3Server.BUCKET}/{self.prefix}",
            endpoint=self.server.endpoint,
            region="us-east-1",
            credentials="env:KVS",
            limit=limit,
            part="engine",
        )
        tier._client = FaultyClient(tier._client)
        self.clients.append(tier._client)
        return tier

    def capacity(self, chunks: int) -> int:
        return chunks * (HEADER_BYTES + self.chunk_bytes)

    def path(self, key: OffloadKey) -> str:
        return f"{self.prefix}/parts/engine/{SCOPE}/{key.hex()}"

    def damage(self, tier: Tier, key: OffloadKey) -> None:
        data = bytearray(obstore.get(self.raw, self.path(key)).bytes())
        data[-1] ^= 0xFF
        obstore.put(self.raw, self.path(key), bytes(data))

    def delete(self, tier: Tier, key: OffloadKey) -> None:
        obstore.delete(self.raw, self.path(key))

    def truncate(self, tier: Tier, key: OffloadKey) -> None:
        data = bytes(obstore.get(self.raw, self.path(key)).bytes())
        obstore.put(self.raw, self.path(key), data[: len(data) // 2])

    def fail_reads(self, tier: Tier, failing: bool) -> None:
        for client in self.clients:
            client.failing_reads = FailCause.IO_ERROR if failing else None

    def fail_writes(self, tier: Tier, failing: bool) -> None:
        for client in self.clients:
            client.failing_writes = FailCause.IO_ERROR if failing else None

    def recount(self) -> int:
        return sum(meta["size"] for page in obstore.list(self.raw, prefix=f"{self.prefix}/parts") for meta in page)

    def index_entries(self, tier: Tier) -> int:
        assert isinstance(tier, ObjectTier)
        index = tier._index
        tables = (index.entries, index.fresh, index.dying, tier._pending, tier._touched, tier._waiting, tier._removed)
        return sum(map(len, tables)) + len(tier._jobs.open) + len(list(tier._tasks()))
