"""The bare client libraries that `kvstrata bench tier` measures beside the tiers: the same bytes, nothing else.

Each moves a list of buffers by the library's own batch calls of `batch` chunks, `width` of them in flight. What comes
back is left in the library's memory: no header, no check, no copy.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvstrata.errors import ConfigError
from kvstrata.runtime.executor import ThreadExecutor
from kvstrata.tiers.base import Tier
from kvstrata.tiers.mooncake import MooncakeTier
from kvstrata.tiers.mooncake.arena import address_of
from kvstrata.tiers.object import ObjectTier
from kvstrata.tiers.redis import RedisTier

WIDTHS = (1, 4, 16)
LONG_S = 600.0


class Bare(Protocol):
    """One client library on the tier's own server."""

    batches: tuple[int, ...]
    """Chunks of one call that are worth trying."""

    def store(self, names: Sequence[str], chunks: Sequence[memoryview], width: int, batch: int) -> None:
        """Write all, `width` calls in flight."""
        ...

    def load(self, names: Sequence[str], width: int, batch: int) -> int:
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

    batches: tuple[int, ...] = (1,)

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

    def store(self, names: Sequence[str], chunks: Sequence[memoryview], width: int, batch: int) -> None:
        """One PUT per chunk."""

        def put(name: str, chunk: memoryview) -> Callable[[], Any]:
            return lambda: self._library.put_async(self._store, self._prefix + name, chunk, use_multipart=False)

        self._gather([put(name, chunk) for name, chunk in zip(names, chunks, strict=True)], width)

    def load(self, names: Sequence[str], width: int, batch: int) -> int:
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


def _run(names: Sequence[str], batch: int, width: int, work: Callable[[int, int], None]) -> None:
    """Call `work(first, last)` for batches of names, on `width` threads."""
    executor = ThreadExecutor("bare", width)
    for at in range(0, len(names), batch):
        executor.submit(functools.partial(work, at, min(at + batch, len(names))))
    finished = executor.close(LONG_S)
    if not finished or executor.statistics().failed:
        raise ConfigError(f"the bare client failed: {executor.statistics().last_failure or 'it did not end'}")


class BareRedis:
    """redis-py: pipelines of commands, one connection per pipeline in flight."""

    batches: tuple[int, ...] = (1, 4, 16)

    def __init__(self, tier: RedisTier) -> None:
        import redis

        found = dict(tier._credentials())
        self._connection: Any = redis.Redis.from_url(found.pop("url"), socket_timeout=60.0, **found)

    def store(self, names: Sequence[str], chunks: Sequence[memoryview], width: int, batch: int) -> None:
        """SET in pipelines."""

        def work(first: int, last: int) -> None:
            pipe = self._connection.pipeline(transaction=False)
            for index in range(first, last):
                pipe.set(f"bare:{names[index]}", chunks[index])
            pipe.execute()

        _run(names, batch, width, work)

    def load(self, names: Sequence[str], width: int, batch: int) -> int:
        """GET in pipelines."""
        sizes: list[int] = []

        def work(first: int, last: int) -> None:
            pipe = self._connection.pipeline(transaction=False)
            for index in range(first, last):
                pipe.get(f"bare:{names[index]}")
            sizes.append(sum(map(len, pipe.execute())))

        _run(names, batch, width, work)
        return sum(sizes)

    def remove(self, names: Sequence[str]) -> None:
        """UNLINK."""
        self._connection.unlink(*(f"bare:{name}" for name in names))

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()


class BareMooncake:
    """Mooncake's own batches, straight from and into registered memory, over the tier's connection."""

    batches: tuple[int, ...] = (16, 64)

    def __init__(self, tier: MooncakeTier) -> None:
        client = tier._mooncake
        self._store: Any = client.store
        self._start = address_of(client.region)
        self._turn = 0
        self._sizes: dict[str, tuple[int, int]] = {}

    def _names(self, names: Sequence[str]) -> list[str]:
        return [f"bare/{self._turn}/{name}" for name in names]

    def store(self, names: Sequence[str], chunks: Sequence[memoryview], width: int, batch: int) -> None:
        """Under new names each time: what is there already would not be moved."""
        self._turn += 1
        fresh = self._names(names)
        self._sizes = {name: (address_of(chunk), len(chunk)) for name, chunk in zip(names, chunks, strict=True)}

        def work(first: int, last: int) -> None:
            places = [self._sizes[name] for name in names[first:last]]
            codes = self._store.batch_put_from(
                fresh[first:last], [at for at, _ in places], [size for _, size in places]
            )
            if any(codes):
                raise OSError(f"codes {set(codes)}: a larger segment?")

        _run(names, batch, width, work)

    def load(self, names: Sequence[str], width: int, batch: int) -> int:
        """Into where they came from."""
        fresh, came = self._names(names), []

        def work(first: int, last: int) -> None:
            places = [self._sizes[name] for name in names[first:last]]
            came.extend(self._store.batch_get_into(fresh[first:last], [at for at, _ in places], [n for _, n in places]))

        _run(names, batch, width, work)
        return sum(came)

    def remove(self, names: Sequence[str]) -> None:
        """All that this client stored."""
        self._store.remove_by_regex("^bare/", True)

    def close(self) -> None:
        """The connection is the tier's."""


def bare_client(tier: Tier) -> Bare | None:
    """The library below a tier, connected to the same place; None if it has none."""
    if isinstance(tier, ObjectTier):
        return BareObjects(tier)
    if isinstance(tier, RedisTier):
        return BareRedis(tier)
    if isinstance(tier, MooncakeTier):
        return BareMooncake(tier)
    return None
