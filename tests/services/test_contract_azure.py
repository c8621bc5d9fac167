"""The object tier keeps the tier contract on Azure's Blob protocol, spoken by Azurite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
from servers import AzureServer
from services_kit import find_server

from kvstrata.errors import ConfigError
from kvstrata.testing.server_contract import PART, ObjectTierContract
from kvstrata.testing.tier_harness import TierHarness
from kvstrata.tiers.object import ObjectTier


@pytest.fixture(scope="module")
def shared_azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    """One server for all tests of the module; each has a prefix of its own."""
    find_server("azure")
    with AzureServer(tmp_path_factory.mktemp("azure")) as server:
        yield server


class TestObjectTierAzure(ObjectTierContract):
    strict_lru: ClassVar[bool] = False

    @pytest.fixture(autouse=True)
    def _server(self, shared_azure: AzureServer, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in shared_azure.credentials("KVA").items():
            monkeypatch.setenv(name, value)
        self.server = shared_azure
        self.raw = shared_azure.store()

    def open_tier(self, limit: int | None) -> ObjectTier:
        return ObjectTier(
            f"az://{AzureServer.CONTAINER}/{self.prefix}",
            endpoint=self.server.endpoint,
            credentials="env:KVA",
            limit=limit,
            part=PART,
        )

    def test_a_container_that_is_missing_and_a_wrong_key_are_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(
            ConfigError, match=r"az://nobody/kv: there is no such bucket \(ContainerNotFound\); check url"
        ):
            self.rig_of(ObjectTier("az://nobody/kv", endpoint=self.server.endpoint, credentials="env:KVA"))
        other = "b" + AzureServer.KEY[1:]
        monkeypatch.setenv("KVA_ACCOUNT_KEY", other)
        with pytest.raises(ConfigError, match=r"the credentials are refused.*check credentials") as caught:
            self.rig_of(self.open_tier(None))
        assert other not in str(caught.value)

    def rig_of(self, tier: ObjectTier) -> None:
        """Open a tier, which fails."""
        TierHarness(tier, chunk_bytes=self.chunk_bytes).open()
