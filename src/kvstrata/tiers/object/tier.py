"""The object tier: S3, GCS, Azure and compatible stores, through obstore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from kvstrata.errors import ConfigError
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.server.client import StoreClient
from kvstrata.tiers.server.tier import CommonOptions, ServerSettings, ServerTier
from kvstrata.types import Capabilities, Locality, Medium

if TYPE_CHECKING:
    from obstore.store import ObjectStore


TASK_KEYS = 8
TASK_BYTES = 16 << 20
"""Small tasks, so that already one job of an engine keeps every connection busy."""


class ObjectTier(ServerTier):
    """One object per chunk below `url` (s3://BUCKET/PREFIX, gs://..., az://..., file:///FOLDER, memory://).

    `limit`: bytes that this writer's objects may take; the oldest are deleted. `shared_limit`: bytes that all writers
    may claim together. `part`: this writer's name, see docs/tiers.md. `endpoint`, `region`: of a compatible store.
    `credentials`: a reference (default, env:PREFIX, profile:NAME, file:/PATH), never the secret. `connections`: most
    requests of one batch at once. `multipart_bytes`: above it an object is written in pieces. `probe_cost_s`: what
    one existence request takes, for the choice of how to probe. `store`: a store of obstore, for tests and embedding.
    """

    medium = Medium.OBJECT
    locality = Locality.SHARED

    def __init__(
        self,
        url: str = "",
        *,
        name: str = "object",
        limit: int | None = None,
        part: str = "",
        endpoint: str = "",
        region: str = "",
        credentials: str = "",
        connections: int = 16,
        multipart_bytes: int = 64 << 20,
        probe_cost_s: float = 0.02,
        store: ObjectStore | None = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        settings = self._settings_from(name, common, limit=limit, part=part, task_keys=TASK_KEYS, task_bytes=TASK_BYTES)
        self.url = url
        self.capabilities = Capabilities(sync_probe=False, probe_cost_s=probe_cost_s, shared=True)
        self._how = {"credentials": credentials, "endpoint": endpoint, "region": region}
        self._store = store
        super().__init__(self._make_client(settings, connections, multipart_bytes), settings)

    def __repr__(self) -> str:
        return f"ObjectTier({self.url!r}, name={self.name!r})"

    def _make_client(self, settings: ServerSettings, connections: int, multipart_bytes: int) -> StoreClient:
        try:
            from kvstrata.tiers.object import client, places
        except ImportError as error:
            raise ConfigError(f"tier {settings.name}: needs obstore: pip install 'kvstrata[object]'") from error
        at = f"tier {settings.name}"
        for option, value in (("connections", connections), ("multipart_bytes", multipart_bytes)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{at}: {option}: {value!r} must be a whole number, at least 1")
        location = places.locate(self.url or ("memory://" if self._store is not None else ""), f"{at}: url")

        def open_store() -> Any:
            if self._store is not None:
                return self._store
            found = places.credentials_of(location.kind, self._how["credentials"], f"{at}: credentials")
            return places.open_store(
                location,
                credentials=found,
                endpoint=self._how["endpoint"],
                region=self._how["region"],
                timeout_s=settings.timeout_s,
            )

        return client.ObjectClient(
            location,
            open_store,
            lambda: None if self._context is None else self._context.clock,
            connections=connections,
            tasks=settings.width,
            multipart_bytes=multipart_bytes,
        )

    def open(self, context: TierContext) -> None:
        """As every server tier; a reference to credentials that leads nowhere is an error here, not at the store."""
        from kvstrata.tiers.object import places

        location = places.locate(self.url or "memory://", f"tier {self.name}: url")
        places.credentials_of(location.kind, self._how["credentials"], f"tier {self.name}: credentials")
        super().open(context)
