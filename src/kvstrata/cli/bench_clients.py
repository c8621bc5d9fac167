"""The bare client libraries that `kvstrata bench tier` measures beside the tiers: the same bytes, nothing else.

Each moves a list of buffers by the library's own batch calls, `width` of them in flight. What comes back is left in
the library's memory: no header, no check, no copy.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvstrata.errors import ConfigError
from kvstrata.runtime.executor import ThreadExecutor
from kvstrata.tiers.base import Tier
from kvstrata.tiers.object import ObjectTier
from kvstrata.tiers.redis import RedisTier

WIDTHS = (1, 4, 16)
LONG_S = 600.0


class Bare(Protocol):
    """One client library on the tier's own server."""

    batch: int
    """Chunks of one call."""

    def store(self, names: Sequence[str], chunks: Sequence[memoryview], width: int) -> None:
        """Write all, `width` calls in flight."""
        ...

    def load(self, names: Sequence[str], width: int) -> int:
        """Read all, `width` calls in flight; the number of bytes that came."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Delete all."""
        ...

    def close(self) -> None:
        """Let go of the server."""
        ...


class BareObjects:
    """obstore: its asynchronous calls, gathered."""

    batch = 1

    def __init__(self, tier: ObjectTier) -> None:
        import obstore

        client: Any = tier._client
        self._library = obstore
        self._store = client._open_store()
        self._prefix = f"{client.base}bare/"

    def _gather(self, calls: Sequence[Callable[[], Any]], width: int) -> list[Any]:
        async def run() -> list[Any]:
            gate = asyncio.Semaphore(width)

            async def one(call: Callable[[], Any]) -> Any:
                async with gate:
                    return await call()

            return list(await asyncio.gather(*(one(call) for call in calls)))

        return asyncio.run(run())

    def store(self, names: Sequence[str], chunks: Sequence[memoryview], width: int) -> None:
        """One PUT per chunk."""

        def put(name: str, chunk: memoryview) -> Callable[[], Any]:
            return lambda: self._library.put_async(self._store, self._prefix + name, chunk, use_multipart=False)

        self._gather([put(name, chunk) for name, chunk in zip(names, chunks, strict=True)], width)

    def load(self, names: Sequence[str], width: int) -> int:
        """One GET per chunk."""

        async def get(name: str) -> int:
            found = await self._library.get_async(self._store, self._prefix + name)
            return len(await found.bytes_async())

        def call(name: str) -> Callable[[], Any]:
            return lambda: get(name)

        return sum(self._gather([call(name) for name in names], width))

    def remove(self, names: Sequence[str]) -> None:
        """Bulk delete."""
        self._library.delete(self._store, [self._prefix + name for name in names])

    def close(self) -> None:
        """Nothing is held."""


class BareRedis:
    """redis-py: pipelines of 16 commands, one connection per pipeline in flight."""

    batch = 16

    def __init__(self, tier: RedisTier) -> None:
        import redis

        found = dict(tier._credentials())
        self._connection: Any = redis.Redis.from_url(found.pop("url"), socket_timeout=60.0, **found)

    def _run(self, names: Sequence[str], width: int, work: Callable[[int, int], None]) -> None:
        executor = ThreadExecutor("bare", width)
        for at in range(0, len(names), self.batch):
            executor.submit(functools.partial(work, at, min(at + self.batch, len(names))))
        finished = executor.close(LONG_S)
        if not finished or executor.statistics().failed:
            raise ConfigError(f"the bare client failed: {executor.statistics().last_failure or 'it did not end'}")

    def store(self, names: Sequence[str], chunks: Sequence[memoryview], width: int) -> None:
        """SET in pipelines."""

        def work(first: int, last: int) -> None:
            pipe = self._connection.pipeline(transaction=False)
            for index in range(first, last):
                pipe.set(f"bare:{names[index]}", chunks[index])
            pipe.execute()

        self._run(names, width, work)

    def load(self, names: Sequence[str], width: int) -> int:
        """GET in pipelines."""
        sizes: list[int] = []

        def work(first: int, last: int) -> None:
            pipe = self._connection.pipeline(transaction=False)
            for index in range(first, last):
                pipe.get(f"bare:{names[index]}")
            sizes.append(sum(map(len, pipe.execute())))

        self._run(names, width, work)
        return sum(sizes)

    def remove(self, names: Sequence[str]) -> None:
        """UNLINK."""
        self._connection.unlink(*(f"bare:{name}" for name in names))

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()


def bare_client(tier: Tier) -> Bare | None:
    """The library below a tier, connected to the same place; None if it has none."""
    if isinstance(tier, ObjectTier):
        return BareObjects(tier)
    if isinstance(tier, RedisTier):
        return BareRedis(tier)
    return None
