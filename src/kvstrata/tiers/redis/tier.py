"""The redis tier: Redis or Valkey, one server or a cluster, through redis-py with hiredis."""

from __future__ import annotations

import re
from typing import Any, Unpack
from urllib.parse import urlsplit

from kvstrata.errors import ConfigError
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.server.client import StoreClient
from kvstrata.tiers.server.secrets import read_secret
from kvstrata.tiers.server.tier import CommonOptions, ServerSettings, ServerTier
from kvstrata.types import Capabilities, Locality, Medium

_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
READ_SIZE = 256 << 10
"""Bytes of one read from a socket."""
WIDTH = 2
"""Batches at once. The client is bound by the interpreter's lock: more threads only wait for each other."""
TASK_BYTES = 16 << 20
"""Most payload of one pipeline: all of its answers are in memory at once."""


class RedisTier(ServerTier):
    """One value per chunk at `url` (redis://HOST:PORT/DB, rediss:// with TLS, unix:///SOCKET).

    `url` may be a reference (env:NAME, file:/PATH) if it holds a password; `password` is a reference, always.
    `limit`: bytes that this writer's values may take; the coldest are deleted. The server's `maxmemory` is the hard
    one: what it evicts is a miss. `ttl_s`: values expire so long after their last use. `cluster`: the server is one
    node of a cluster. `ca_file`, `cert_file`, `key_file`: for TLS. `part`, `shared_limit`: see docs/tiers.md.
    """

    medium = Medium.MEMORY_STORE
    locality = Locality.SHARED

    def __init__(
        self,
        url: str = "",
        *,
        name: str = "redis",
        limit: int | None = None,
        part: str = "",
        prefix: str = "kvstrata",
        username: str = "",
        password: str = "",
        cluster: bool = False,
        ca_file: str = "",
        cert_file: str = "",
        key_file: str = "",
        ttl_s: float | None = None,
        probe_cost_s: float = 0.0005,
        **common: Unpack[CommonOptions],
    ) -> None:
        settings = self._settings_from(
            name, common, limit=limit, part=part, timeout_s=2.0, task_bytes=TASK_BYTES, width=WIDTH
        )
        if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
            raise ConfigError(f"tier {name}: prefix: {prefix!r} must be 1 to 64 letters, digits or any of _ . : -")
        if ttl_s is not None and (not isinstance(ttl_s, int | float) or isinstance(ttl_s, bool) or ttl_s <= 0):
            raise ConfigError(f"tier {name}: ttl_s: {ttl_s!r} must be a number of seconds above 0")
        self.capabilities = Capabilities(sync_probe=False, probe_cost_s=probe_cost_s, shared=True)
        self._url = url
        self._login = (username, password)
        self._cluster = cluster
        self._tls = {"ssl_ca_certs": ca_file, "ssl_certfile": cert_file, "ssl_keyfile": key_file}
        self.where = _shown(url, f"tier {name}: url")
        super().__init__(self._make_client(settings, prefix, ttl_s), settings)

    def __repr__(self) -> str:
        return f"RedisTier({self.where!r}, name={self.name!r})"

    def _make_client(self, settings: ServerSettings, prefix: str, ttl_s: float | None) -> StoreClient:
        try:
            from kvstrata.tiers.redis.client import RedisClient
        except ImportError as error:
            raise ConfigError(f"tier {settings.name}: needs redis: pip install 'kvstrata[redis]'") from error
        return RedisClient(
            self.where,
            self._connect,
            lambda: None if self._context is None else self._context.clock,
            prefix=prefix,
            ttl_s=ttl_s,
            cluster=self._cluster,
        )

    def _credentials(self) -> dict[str, str]:
        """URL and login with what the references stand for. Raises `ConfigError`."""
        at = f"tier {self.name}"
        username, password = self._login
        referred = self._url.startswith(("env:", "file:"))
        found = {"url": read_secret(self._url, f"{at}: url") if referred else self._url}
        if username:
            found["username"] = username
        if password:
            found["password"] = read_secret(password, f"{at}: password")
        return found

    def open(self, context: TierContext) -> None:
        """As every server tier; a reference that leads nowhere is an error here, not at the server."""
        self._credentials()
        super().open(context)

    def _connect(self, timeout_s: float) -> Any:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        from kvstrata.tiers.redis.wire import Packer

        how: dict[str, Any] = {
            **self._credentials(),
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "socket_read_size": READ_SIZE,
            # A connection that the server has closed meanwhile is made again, once; nothing else is tried again here.
            "retry": Retry(NoBackoff(), 1, supported_errors=(redis.exceptions.ConnectionError,)),
        }
        how |= {option: path for option, path in self._tls.items() if path}
        url = how.pop("url")
        if self._cluster:
            return redis.RedisCluster.from_url(url, **how)
        return redis.Redis.from_url(url, command_packer=Packer(), **how)


def _shown(url: str, option: str) -> str:
    """A URL as it may be shown and logged. Raises `ConfigError` for one with a password in it."""
    if not isinstance(url, str) or not url:
        raise ConfigError(f"{option}: is needed, as redis://HOST:PORT/DB, or as a reference env:NAME or file:/PATH")
    if url.startswith(("env:", "file:")):
        return url
    try:
        parts = urlsplit(url)
        secret = parts.password is not None or "password=" in parts.query
        hostname = parts.hostname
    except ValueError:
        raise ConfigError(f"{option}: is no URL") from None
    if secret:
        raise ConfigError(
            f"{option}: must hold no password; give it as password: env:NAME, or the whole URL as env:NAME"
        )
    if parts.scheme not in ("redis", "rediss", "unix") or not (hostname or parts.scheme == "unix"):
        raise ConfigError(f"{option}: {url!r} must be redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///SOCKET")
    return url
