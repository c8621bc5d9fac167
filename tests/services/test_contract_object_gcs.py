"""The object tier keeps the tier contract over GCS's protocol.

That is S3's, but for the condition of a write and the credentials: `s3_server.py` translates both, and moto
does the rest. A server of GCS's own that knows that condition could not be had.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from obstore.store import GCSStore
from servers import S3Server

from kvstrata.testing.server_contract import PART, ObjectTierContract
from kvstrata.tiers.object import ObjectTier


class TestObjectTierGcs(ObjectTierContract):
    strict_lru: ClassVar[bool] = False

    @pytest.fixture(autouse=True)
    def _server(self, shared_s3: S3Server, tmp_path: Path) -> None:
        self.account = shared_s3.gcs_account(tmp_path)
        self.raw = GCSStore(
            S3Server.BUCKET, service_account_path=str(self.account), client_options={"allow_http": True}
        )

    def open_tier(self, limit: int | None) -> ObjectTier:
        return ObjectTier(
            f"gs://{S3Server.BUCKET}/{self.prefix}",
            endpoint="http://",
            credentials=f"file:{self.account}",
            limit=limit,
            part=PART,
        )
