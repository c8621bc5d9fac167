"""The mooncake tier: one object per chunk in a Mooncake Store, zero copies."""

from __future__ import annotations

import re
from typing import Any, Unpack

from kvstrata.errors import ConfigError
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.common.record import HEADER_BYTES
from kvstrata.tiers.mooncake.arena import RECORDS
from kvstrata.tiers.mooncake.client import Connection, MooncakeClient, end_without_good_bye, library
from kvstrata.tiers.server.tier import CommonOptions, ServerTier
from kvstrata.types import Capabilities, Locality, Medium

_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,100}")
TASK_BYTES = 64 << 20
"""Most payload of one call. Over TCP few large calls move more than many small ones, which share the processors."""

WIDTH = 3
"""Batches at once: of those that go the same way one moves and one is checked."""


class MooncakeTier(ServerTier):
    """Chunks in the Mooncake Store of `master` (HOST:PORT), whose metadata server is at the URL `metadata`.

    `protocol`: tcp or rdma, with `devices` for the latter. `hostname`: how others reach this process. `segment`: bytes
    of memory that this process adds to the store; 0 if other processes bring the memory. `limit`: bytes that this
    writer's records may take; `shared_limit`, `part`: see docs/tiers.md. `admin`: URL of the master's HTTP server; with
    it a restarted engine finds what its part holds, without it it clears its part. `prefix`: what names in the store
    begin with. `replicas`: copies that the store keeps. `store`: a connected MooncakeDistributedStore, for tests and
    embedding.
    """

    medium = Medium.MEMORY_STORE
    locality = Locality.SHARED

    def __init__(
        self,
        master: str = "",
        metadata: str = "",
        *,
        name: str = "mooncake",
        limit: int | None = None,
        part: str = "",
        protocol: str = "tcp",
        devices: str = "",
        hostname: str = "127.0.0.1",
        segment: int = 0,
        admin: str = "",
        prefix: str = "kvstrata",
        replicas: int = 1,
        probe_cost_s: float = 0.001,
        store: Any = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        settings = self._settings_from(
            name, common, limit=limit, part=part, task_keys=RECORDS, task_bytes=TASK_BYTES, width=WIDTH
        )
        at = f"tier {name}"
        if store is None:
            for option, value in (("master", master), ("metadata", metadata)):
                if not isinstance(value, str) or not value:
                    raise ConfigError(f"{at}: {option}: is needed, the address of the Mooncake {option} server")
        _check(at, protocol, prefix, segment, replicas)
        _load(at, settings.timeout_s)
        self.capabilities = Capabilities(
            sync_probe=False, probe_cost_s=probe_cost_s, shared=True, tail_room=HEADER_BYTES
        )
        self._mooncake = MooncakeClient(
            Connection(master, metadata, hostname, protocol, devices, segment, admin.rstrip("/")),
            prefix,
            lambda: None if self._context is None else self._context.clock,
            replicas=replicas,
            store=store,
        )
        super().__init__(self._mooncake, settings)

    def open(self, context: TierContext) -> None:
        """As every tier over a server; primary is registered once, when the connection is made."""
        client = self._mooncake
        client.region, client.tail_room, client.yielding = context.region, context.tail_room, context.yielding
        super().open(context)

    def close(self, timeout: float = 5.0) -> None:
        """As every tier over a server. A master that has not answered in that time is not waited for again."""
        super().close(timeout)
        if self._mooncake.is_left:
            end_without_good_bye()


def _check(at: str, protocol: str, prefix: str, segment: int, replicas: int) -> None:
    """Raise `ConfigError` for an option that makes no sense."""
    if protocol not in ("tcp", "rdma"):
        raise ConfigError(f"{at}: protocol: {protocol!r} must be tcp or rdma")
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        raise ConfigError(f"{at}: prefix: {prefix!r} must be letters, digits, '-' or '_'")
    for option, count, least in (("segment", segment, 0), ("replicas", replicas, 1)):
        if not isinstance(count, int) or isinstance(count, bool) or count < least:
            raise ConfigError(f"{at}: {option}: {count!r} must be a whole number, at least {least}")


def _load(at: str, timeout_s: float) -> None:
    """Load the library; raises `ConfigError` if it cannot be."""
    try:
        library(timeout_s)
    except ImportError as error:
        raise ConfigError(
            f"{at}: needs mooncake-transfer-engine (pip install 'kvstrata[mooncake]') and libibverbs1: {error}"
        ) from error
