"""The object tier keeps the tier contract on a real S3 server."""

from __future__ import annotations

from typing import ClassVar

import pytest
from obstore.store import S3Store
from servers import S3Server

from kvstrata.testing.server_contract import PART, ObjectTierContract
from kvstrata.tiers.object import ObjectTier


class TestObjectTierS3(ObjectTierContract):
    strict_lru: ClassVar[bool] = False
    """S3 keeps the time of the last change by the second: the order over a restart is not exact."""

    @pytest.fixture(autouse=True)
    def _server(self, shared_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("KVS_SECRET_ACCESS_KEY", "test")
        self.server = shared_s3
        self.raw = S3Store(
            S3Server.BUCKET,
            endpoint=shared_s3.endpoint,
            region="us-east-1",
            access_key_id="test",
            secret_access_key="test",
            client_options={"allow_http": True},
        )

    def open_tier(self, limit: int | None) -> ObjectTier:
        return ObjectTier(
            f"s3://{S3Server.BUCKET}/{self.prefix}",
            endpoint=self.server.endpoint,
            region="us-east-1",
            credentials="env:KVS",
            limit=limit,
            part=PART,
        )
