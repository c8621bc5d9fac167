"""How chunks lie in an object store, and how batches of them go there and back.

    PREFIX/claims/PART                    the claim of a part, see `common.claims`
    PREFIX/parts/PART/SCOPE/KEY           one record: hex of scope (namespace, layout) and key

Every writer has a part of its own; reads look into all. Which parts there are is listed at most once per `PARTS_S`,
beside the requests that need it. A batch is one task whose requests run side by side; all tasks together have at most
`connections` transfers under way.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import obstore
from obstore.store import ObjectStore

from kvstrata.tiers.base import Clock
from kvstrata.tiers.common.claims import OWNER, PlaceError
from kvstrata.tiers.common.index import Name
from kvstrata.tiers.common.memo import Memo
from kvstrata.tiers.common.record import HEADER_BYTES, Identity
from kvstrata.tiers.object.places import EXISTING, MISSING, Location, cause_of, explain
from kvstrata.tiers.server.client import (
    SCOPE_BYTES,
    ClientSetup,
    FoundRecord,
    ReadItem,
    WriteItem,
    full_name,
    short_name,
)
from kvstrata.types import KEY_BYTES, FailCause, OffloadKey

T = TypeVar("T")

PARTS_S = 1.0
"""How long the list of parts is believed."""
LIST_PAGE = 1000
MULTIPART_PIECE = 16 << 20

_RECORD = re.compile(f"([0-9a-f]{{{2 * SCOPE_BYTES}}})/([0-9a-f]{{{2 * KEY_BYTES}}})")


class ObjectClaims:
    """Claims as objects; a create fails if the object is there."""

    def __init__(self, client: ObjectClient) -> None:
        self._client = client

    def _call(self, call: Callable[[ObjectStore], T]) -> T:
        store = self._client.store
        if store is None:
            raise PlaceError("is not connected")
        try:
            return call(store)
        except (*MISSING, *EXISTING):
            raise
        except Exception as error:
            raise explain(error, self._client.location) from None

    def _path(self, name: str) -> str:
        return f"{self._client.base}claims/{name}"

    def create(self, name: str, data: bytes) -> bool:
        """Put, if there is no such object."""
        try:
            self._call(lambda store: obstore.put(store, self._path(name), data, mode="create"))
        except MISSING as error:
            raise explain(error, self._client.location) from None
        except EXISTING:
            return False
        return True

    def replace(self, name: str, data: bytes) -> None:
        """Put."""
        try:
            self._call(lambda store: obstore.put(store, self._path(name), data))
        except MISSING as error:
            raise explain(error, self._client.location) from None

    def read(self, name: str) -> bytes | None:
        """Get."""
        try:
            return self._call(lambda store: bytes(obstore.get(store, self._path(name)).bytes()))
        except MISSING:
            return None

    def delete(self, name: str) -> None:
        """Delete."""
        try:
            self._call(lambda store: obstore.delete(store, self._path(name)))
        except MISSING:
            return

    def names(self) -> list[str]:
        """List."""
        start = self._path("")
        try:
            pages = self._call(lambda store: list(obstore.list(store, prefix=start.rstrip("/"), chunk_size=LIST_PAGE)))
        except MISSING as error:
            raise explain(error, self._client.location) from None
        return [meta["path"].removeprefix(start) for page in pages for meta in page]


class ObjectClient:
    """A `StoreClient` (server/client.py) over one store of obstore."""

    overhead = 0
    unit = 1
    trusts_index = True

    def __init__(
        self,
        location: Location,
        open_store: Callable[[], ObjectStore],
        clock: Callable[[], Clock | None],
        *,
        connections: int,
        tasks: int,
        multipart_bytes: int,
    ) -> None:
        self.location = location
        self.base = f"{location.prefix}/" if location.prefix else ""
        self.store: ObjectStore | None = None
        self.claims = ObjectClaims(self)
        self._open_store = open_store
        self._clock = clock
        self._connections = connections
        self._width = max(connections // tasks, 1)
        """Transfers of one batch at once: so many batches are under way together."""
        self._multipart_bytes = multipart_bytes
        self._identity = Identity(bytes(16), 0)
        self._part = ""
        self._verify = True
        self._parts: list[str] = []
        self._parts_until = 0.0
        self._where = Memo()
        self._bad = Memo()
        self._loops: list[asyncio.AbstractEventLoop] = []

    def open(self, setup: ClientSetup) -> None:
        """Make the store and list the claims: the first request shows whether bucket, region and credentials work."""
        self.close()
        self._identity, self._part, self._verify = setup.identity, setup.part, setup.verify
        self.store = self._open_store()
        self._set_parts(self.claims.names())

    def close(self) -> None:
        """Let go of the store."""
        self.store = None
        while self._loops:
            self._loops.pop().close()
        self._where.clear()
        self._bad.clear()

    # batches

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a batch on a loop of this worker's own; loops are used again."""
        try:
            loop = self._loops.pop()
        except IndexError:
            loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(work)
        finally:
            if self.store is None:
                loop.close()
            else:
                self._loops.append(loop)

    async def _all(self, work: Sequence[Awaitable[T]], width: int = 0) -> list[T]:
        gate = asyncio.Semaphore(width or self._connections)

        async def one(part: Awaitable[T]) -> T:
            async with gate:
                return await part

        return list(await asyncio.gather(*(one(part) for part in work)))

    def _path(self, part: str, name: Name) -> str:
        full = full_name(self._identity, name)
        return f"{self.base}parts/{part}/{full[:SCOPE_BYTES].hex()}/{full[SCOPE_BYTES:].hex()}"

    # parts

    def _set_parts(self, names: list[str]) -> None:
        parts = {name.partition(".")[0] for name in names if name and not name.endswith(OWNER)}
        self._parts = sorted(parts - {self._part})
        self._parts_until = self._now() + PARTS_S

    def _now(self) -> float:
        clock = self._clock()
        return 0.0 if clock is None else clock.monotonic()

    def _stale(self) -> bool:
        return self._now() >= self._parts_until

    async def _list_parts(self, store: ObjectStore) -> list[str]:
        """Parts that were not known; an error leaves the list as it is."""
        known = set(self._parts)
        try:
            start = f"{self.base}claims"
            pages = [page async for page in obstore.list(store, prefix=start, chunk_size=LIST_PAGE)]
        except Exception:
            return []
        self._set_parts([meta["path"].removeprefix(start + "/") for page in pages for meta in page])
        return [part for part in self._parts if part not in known]

    # StoreClient

    def exists(self, keys: Sequence[OffloadKey], *, own: bool) -> list[bool | FailCause]:
        """One HEAD per key and part, all at once."""
        store = self.store
        if store is None:
            return [FailCause.REFUSED] * len(keys)
        return self._run(self._exists(store, keys, own=own))

    async def _exists(self, store: ObjectStore, keys: Sequence[OffloadKey], *, own: bool) -> list[bool | FailCause]:
        parts = [self._part, *self._parts] if own else list(self._parts)
        asking = self._all([self._head(store, key, part) for part in parts for key in keys])
        if self._stale():
            answers, new = await asyncio.gather(asking, self._list_parts(store))
            answers += await self._all([self._head(store, key, part) for part in new for key in keys])
        else:
            answers = await asking
        return [_merge(answers[index :: len(keys)]) for index in range(len(keys))]

    async def _head(self, store: ObjectStore, key: OffloadKey, part: str) -> bool | FailCause:
        path = self._path(part, key)
        try:
            meta = await obstore.head_async(store, path)
        except Exception as error:
            cause = cause_of(error)
            return False if cause is FailCause.GONE else cause
        if meta["size"] < HEADER_BYTES or self._bad.get(path) == _version(meta):
            return False
        if part != self._part:
            self._where.note(key.hex(), part)
        return True

    def read(self, items: Sequence[ReadItem]) -> None:
        """One GET per record; the payload is copied once, from the library's memory into primary."""
        store = self.store
        if store is not None and items:
            self._run(self._all([self._read(store, item) for item in items], self._width))

    async def _read(self, store: ObjectStore, item: ReadItem) -> None:
        for part in self._candidates(item):
            await self._read_from(store, item, part)
            if item.failed is not FailCause.GONE:
                return

    def _candidates(self, item: ReadItem) -> list[str]:
        """The parts to look into, the likeliest first."""
        item.failed = FailCause.GONE
        if item.own:
            return [self._part]
        hint = self._where.get(item.key.hex())
        parts = [part for part in self._parts if part != hint]
        if item.own is None:
            parts.insert(0, self._part)
        return parts if hint is None else [hint, *parts]

    async def _read_from(self, store: ObjectStore, item: ReadItem, part: str) -> None:
        path = self._path(part, item.key)
        try:
            found = await obstore.get_async(store, path)
            version = _version(found.meta)
            if self._bad.get(path) == version:
                return
            if found.meta["size"] != HEADER_BYTES + len(item.target):
                item.failed = FailCause.WRONG_SIZE
            else:
                item.accept(memoryview(await found.bytes_async()), self._identity, verify=self._verify)
        except Exception as error:
            item.failed = cause_of(error)
            return
        if item.failed is not None and item.failed.is_content:
            item.version = (part, version)
            self._bad.note(path, version)

    def write(self, items: Sequence[WriteItem]) -> None:
        """One PUT per record, straight from primary; in several pieces only above `multipart_bytes`."""
        store = self.store
        if store is None:
            for item in items:
                item.fail(FailCause.REFUSED)
            return
        self._run(self._all([self._write(store, item) for item in items], self._width))

    async def _write(self, store: ObjectStore, item: WriteItem) -> None:
        size = HEADER_BYTES + len(item.payload)
        try:
            await obstore.put_async(
                store,
                self._path(self._part, item.key),
                [item.header(self._identity), item.payload],
                use_multipart=size > self._multipart_bytes,
                chunk_size=MULTIPART_PIECE,
            )
        except Exception as error:
            cause = cause_of(error)
            item.fail(cause, uncertain=cause in (FailCause.TIMEOUT, FailCause.IO_ERROR))
        else:
            item.failed, item.uncertain = None, False

    def remove(self, names: Sequence[Name]) -> list[bool]:
        """One request for many, where the store can; else one by one."""
        store = self.store
        if store is None:
            return [False] * len(names)
        paths = [self._path(self._part, name) for name in names]
        return self._run(self._remove(store, paths))

    async def _remove(self, store: ObjectStore, paths: list[str]) -> list[bool]:
        try:
            await obstore.delete_async(store, paths)
        except Exception as error:
            if len(paths) == 1 or cause_of(error) is not FailCause.GONE:
                return [cause_of(error) is FailCause.GONE] * len(paths)
            return [done for path in paths for done in await self._remove(store, [path])]
        return [True] * len(paths)

    def discard(self, items: Sequence[ReadItem]) -> list[bool]:
        """Delete bad objects of the own part. Since they were read, no bad version is served from any part."""
        store = self.store
        if store is None:
            return [False] * len(items)
        return self._run(self._all([self._discard(store, item) for item in items]))

    async def _discard(self, store: ObjectStore, item: ReadItem) -> bool:
        if not isinstance(item.version, tuple):
            return True
        part, version = item.version
        path = self._path(part, item.key)
        if part != self._part:
            return True
        try:
            if _version(await obstore.head_async(store, path)) == version:
                await obstore.delete_async(store, path)
        except Exception as error:
            return cause_of(error) is FailCause.GONE
        return True

    def touch(self, stamps: Sequence[tuple[OffloadKey, int]]) -> None:
        """Objects keep no time of last use."""

    def scan(self) -> Iterator[list[FoundRecord]]:
        """List the own part."""
        store = self.store
        if store is None:
            raise PlaceError("is not connected")
        start = f"{self.base}parts/{self._part}"
        try:
            for page in obstore.list(store, prefix=start, chunk_size=LIST_PAGE):
                yield [found for meta in page if (found := self._found(start, meta)) is not None]
        except Exception as error:
            raise explain(error, self.location) from None

    def _found(self, start: str, meta: Any) -> FoundRecord | None:
        match = _RECORD.fullmatch(meta["path"].removeprefix(start + "/"))
        if match is None:
            return None
        name = short_name(self._identity, bytes.fromhex(match[1] + match[2]))
        return FoundRecord(name, meta["size"], int(meta["last_modified"].timestamp() * 1e9))


def _merge(answers: Sequence[bool | FailCause]) -> bool | FailCause:
    """One part that has it is enough; absent only if every part says so."""
    if True in answers:
        return True
    return next((answer for answer in answers if answer is not False), False)


def _version(meta: Any) -> str:
    """What tells two versions of one object apart."""
    return f"{meta['e_tag']} {meta['version']} {meta['last_modified']} {meta['size']}"
