"""How chunks lie in Redis or Valkey, and how batches of them go there and back.

    PREFIX:c:SCOPE KEY        one record, a string; scope (namespace, layout) and key as they are, 60 bytes
    PREFIX:part:PART          sorted set: scope and key of what a writer stored, by the time of last use in seconds
    PREFIX:claims             hash: the claims of parts, see `common.claims`

All writers share the records: a key is stored by whoever comes first, and counted by that one. A batch is one
pipeline. No command enumerates keys; a writer finds its own again in its sorted set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import redis
import redis.exceptions as errors

from kvstrata.tiers.base import Clock
from kvstrata.tiers.common.claims import PlaceError
from kvstrata.tiers.common.index import Name
from kvstrata.tiers.common.record import HEADER_BYTES, Identity, check_header
from kvstrata.tiers.common.tasks import cut
from kvstrata.tiers.redis.replies import Terms, read_straight, version_of
from kvstrata.tiers.redis.wire import Pieces
from kvstrata.tiers.server.client import ClientSetup, FoundRecord, ReadItem, WriteItem, full_name, short_name
from kvstrata.types import FailCause, OffloadKey

T = TypeVar("T")
Connection: TypeAlias = Any
"""A `redis.Redis` or a `redis.RedisCluster`; their types differ, their commands do not."""

PAGE = 1000
READ_BYTES = 1 << 20
"""About so much is asked for at once."""
PATIENCE = 2
"""One record may take so many time-outs to arrive; each piece of it one."""
OVERHEAD_BYTES = 256
"""What a record takes besides its bytes: names in the key space and in the sorted set, and their tables."""

# Delete a record if it still begins with the bytes that were read; the first argument is the last of their places.
_DISCARD = """
if redis.sha1hex(redis.call('GETRANGE', KEYS[1], 0, ARGV[1])) == ARGV[2] then
    return redis.call('DEL', KEYS[1])
end
return 0
"""

_FULL = ("OOM", "MISCONF")
_REFUSED = ("NOAUTH", "WRONGPASS", "NOPERM", "READONLY", "DENIED", "WRONGTYPE")


def cause_of(error: BaseException) -> FailCause:
    """What an error of the library means. Whatever is not known may pass."""
    text = str(error)
    if isinstance(error, errors.TimeoutError | TimeoutError):
        return FailCause.TIMEOUT
    if isinstance(error, errors.OutOfMemoryError) or text.startswith(_FULL):
        return FailCause.NO_SPACE
    refusing = errors.AuthenticationError | errors.AuthorizationError | errors.NoPermissionError | errors.ReadOnlyError
    if isinstance(error, refusing) or text.startswith(_REFUSED):
        return FailCause.REFUSED
    return FailCause.IO_ERROR


def explain(error: BaseException, where: str) -> PlaceError:
    """One line that names the setting to look at. Nothing of the error's own text: a URL may stand in it."""
    text = str(error)
    if isinstance(error, errors.NoPermissionError) or text.startswith("NOPERM"):
        return PlaceError(
            f"{where}: the user may not run what the tier needs; check username and its ACL", permanent=True
        )
    if isinstance(error, errors.AuthenticationError) or text.startswith(("NOAUTH", "WRONGPASS")):
        return PlaceError(f"{where}: the user or password is refused; check username and password", permanent=True)
    if isinstance(error, errors.ReadOnlyError) or text.startswith("READONLY"):
        return PlaceError(f"{where} is a read-only replica; check url", permanent=True)
    if text.startswith("WRONGTYPE"):
        return PlaceError(f"{where}: others use the same key prefix for something else; check prefix", permanent=True)
    if isinstance(error, errors.RedisClusterException):
        return PlaceError(f"{where} is no cluster, or none of its nodes answers; check url and cluster, or wait")
    return PlaceError(f"{where} does not answer ({type(error).__name__}); check url, or wait")


class RedisClaims:
    """Claims as fields of one hash; a create is HSETNX."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    def _call(self, call: Callable[[Connection, bytes], T]) -> T:
        connection = self._client.connection
        if connection is None:
            raise PlaceError("is not connected")
        try:
            return call(connection, self._client.prefix + b":claims")
        except Exception as error:
            raise explain(error, self._client.where) from None

    def create(self, name: str, data: bytes) -> bool:
        """Set, if there is no such field."""
        return bool(self._call(lambda to, key: to.hsetnx(key, name, data)))

    def replace(self, name: str, data: bytes) -> None:
        """Set."""
        self._call(lambda to, key: to.hset(key, name, data))

    def read(self, name: str) -> bytes | None:
        """Get."""
        found: bytes | None = self._call(lambda to, key: to.hget(key, name))
        return found

    def delete(self, name: str) -> None:
        """Delete."""
        self._call(lambda to, key: to.hdel(key, name))

    def names(self) -> list[str]:
        """The fields of the hash: two or three per engine."""
        found: list[bytes] = self._call(lambda to, key: to.hkeys(key))
        return [name.decode("utf-8", "replace") for name in found]


class RedisClient:
    """A `StoreClient` (server/client.py) over Redis or Valkey.

    `trusts_index` is False: the server evicts and lets expire by itself, and an evicted key is a miss.
    """

    overhead = OVERHEAD_BYTES
    unit = 1
    trusts_index = False

    def __init__(
        self,
        where: str,
        connect: Callable[[float], Connection],
        clock: Callable[[], Clock | None],
        *,
        prefix: str,
        ttl_s: float | None,
        cluster: bool,
    ) -> None:
        self.where = where
        self.prefix = prefix.encode()
        self.connection: Connection | None = None
        self.claims = RedisClaims(self)
        self._connect = connect
        self._ttl_ms = None if ttl_s is None else max(int(ttl_s * 1000), 1)
        self._cluster = cluster
        self._identity = Identity(bytes(16), 0)
        self._verify = True
        self._own = b""
        self._clock = clock
        self._timeout_s = 0.0

    def open(self, setup: ClientSetup) -> None:
        """Connect, and read the claims: that shows whether address, user and password work."""
        self.close()
        self._identity, self._verify, self._timeout_s = setup.identity, setup.verify, setup.timeout_s
        self._own = self.prefix + b":part:" + setup.part.encode()
        try:
            self.connection = self._connect(setup.timeout_s)
        except PlaceError:
            raise
        except Exception as error:
            raise explain(error, self.where) from None
        self.claims.names()

    def close(self) -> None:
        """Close all connections."""
        connection, self.connection = self.connection, None
        if connection is not None:
            try:
                connection.close()
            except (redis.RedisError, OSError):
                return

    def _now(self) -> float:
        clock = self._clock()
        return 0.0 if clock is None else clock.monotonic()

    def _name(self, name: Name) -> bytes:
        return self.prefix + b":c:" + full_name(self._identity, name)

    def _pipeline(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send all commands at once; their results, an exception in the place of one that failed. Raises."""
        connection = self.connection
        if connection is None:
            raise errors.ConnectionError("not connected")
        if not commands:
            return []
        with connection.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            results: list[Any] = pipe.execute(raise_on_error=False)
        return results

    def _heads(self, keys: Sequence[OffloadKey]) -> list[bool | FailCause]:
        """Per key, whether the header and the length of its value are what a load would accept. Raises."""
        names = [self._name(key) for key in keys]
        commands = [("GETRANGE", name, 0, HEADER_BYTES - 1) for name in names] + [("STRLEN", name) for name in names]
        results = self._pipeline(commands)
        return [self._judge(key, *results[index :: len(keys)]) for index, key in enumerate(keys)]

    def _judge(self, key: OffloadKey, head: Any, length: Any) -> bool | FailCause:
        for result in (head, length):
            if isinstance(result, Exception):
                cause = cause_of(result)
                return False if str(result).startswith("WRONGTYPE") else cause
        header = check_header(head, self._identity, key)
        return not isinstance(header, FailCause) and length == HEADER_BYTES + header.payload_bytes

    # StoreClient

    def exists(self, keys: Sequence[OffloadKey], *, own: bool) -> list[bool | FailCause]:
        """Header and length of each value, in one pipeline."""
        try:
            return self._heads(keys)
        except Exception as error:
            return [cause_of(error)] * len(keys)

    def read(self, items: Sequence[ReadItem]) -> None:
        """One GETRANGE per record. The payload goes from the socket into primary; a cluster's is copied there."""
        connection = self.connection
        left: Sequence[ReadItem] = items
        if connection is not None and not self._cluster:
            terms = Terms(self._identity, self._verify, PATIENCE * self._timeout_s, self._now, cause_of_value)
            left = read_straight(connection.connection_pool, _groups(items), self._asking, terms)
        for group in _groups(left):
            self._read(group)

    def _asking(self, items: Sequence[ReadItem]) -> list[tuple[Any, ...]]:
        """Of a value that is too long only one byte too much is asked for."""
        names = [self._name(item.key) for item in items]
        commands: list[tuple[Any, ...]] = [
            ("GETRANGE", name, 0, HEADER_BYTES + len(item.target)) for name, item in zip(names, items, strict=True)
        ]
        if self._ttl_ms is not None:  # whoever uses a value keeps it alive
            commands += [("PEXPIRE", name, self._ttl_ms) for name in names]
        return commands

    def _read(self, items: Sequence[ReadItem]) -> None:
        """One pipeline."""
        try:
            results = self._pipeline(self._asking(items))[: len(items)]
        except Exception as error:
            results = [error] * len(items)
        for index, (item, value) in enumerate(zip(items, results, strict=True)):
            results[index] = None  # a value need not live until the last one is copied
            if isinstance(value, Exception):
                item.failed = cause_of_value(value)
            elif not value:
                item.failed = FailCause.GONE
            elif not item.accept(memoryview(value), self._identity, verify=self._verify):
                item.version = version_of(value)

    def write(self, items: Sequence[WriteItem]) -> None:
        """Note the batch in the own set, then write what is not there. The set is never behind the records."""
        noted = [("ZADD", self._own, *(word for item in items for word in (item.stamp / 1e9, self._full(item.key))))]
        try:
            if self._cluster:
                _raise_first(self._pipeline(noted))
                noted = []
            results = self._pipeline(noted + [self._set(item, "NX") for item in items])
            _raise_first(results[: len(noted)])
        except Exception as error:
            for item in items:
                item.fail(cause_of(error), uncertain=True)
            return
        there = [item for item, result in zip(items, results[len(noted) :], strict=True) if _settle(item, result)]
        if there:
            self._meet(there)

    def _set(self, item: WriteItem, *condition: str) -> tuple[Any, ...]:
        value = Pieces(item.header(self._identity), item.payload)
        expiry = () if self._ttl_ms is None else ("PX", self._ttl_ms)
        return ("SET", self._name(item.key), value.join() if self._cluster else value, *condition, *expiry)

    def _full(self, key: OffloadKey) -> bytes:
        return full_name(self._identity, key)

    def _meet(self, items: list[WriteItem]) -> None:
        """Something is there already: another writer's record, which will do, or nonsense, which is written over."""
        try:
            good = self._heads([item.key for item in items])
            bad = [item for item, answer in zip(items, good, strict=True) if answer is not True]
            others = [item for item, answer in zip(items, good, strict=True) if answer is True]
            for item in others:
                item.failed, item.foreign = None, True
            if others:
                self._pipeline([("ZREM", self._own, *(self._full(item.key) for item in others))])
            for item, result in zip(bad, self._pipeline([self._set(item) for item in bad]), strict=True):
                _settle(item, result)
        except Exception as error:
            for item in items:
                if item.failed is not None:
                    item.fail(cause_of(error), uncertain=True)

    def remove(self, names: Sequence[Name]) -> list[bool]:
        """Delete the records, then forget them in the own set."""
        try:
            results = self._pipeline([("UNLINK", self._name(name)) for name in names])
            gone = [not isinstance(result, Exception) for result in results]
            done = [full_name(self._identity, name) for name, ok in zip(names, gone, strict=True) if ok]
            if done:
                _raise_first(self._pipeline([("ZREM", self._own, *done)]))
        except Exception:
            return [False] * len(names)
        return gone

    def discard(self, items: Sequence[ReadItem]) -> list[bool]:
        """Delete each record if it still is what was read."""
        commands = [
            ("EVAL", _DISCARD, 1, self._name(item.key), HEADER_BYTES + len(item.target), str(item.version))
            for item in items
        ]
        try:
            results = [self._pipeline([command])[0] for command in commands]
            gone = [item for item, result in zip(items, results, strict=True) if result == 1]
            if gone:
                _raise_first(self._pipeline([("ZREM", self._own, *(self._full(item.key) for item in gone))]))
        except Exception:
            return [False] * len(items)
        return [not isinstance(result, Exception) for result in results]

    def touch(self, stamps: Sequence[tuple[OffloadKey, int]]) -> None:
        """Note the times, and let what was used live as long as something new."""
        words = [word for key, stamp in stamps for word in (stamp / 1e9, self._full(key))]
        commands: list[tuple[Any, ...]] = [("ZADD", self._own, "XX", *words)]
        if self._ttl_ms is not None:
            commands += [("PEXPIRE", self._name(key), self._ttl_ms) for key, _ in stamps]
        try:
            self._pipeline(commands)
        except Exception:
            return  # colder than it should be

    def scan(self) -> Iterator[list[FoundRecord]]:
        """The own set, in any order; what the server has dropped meanwhile is forgotten there, too."""
        cursor = 0
        while True:
            try:
                cursor, page = _raise_first(self._pipeline([("ZSCAN", self._own, cursor, "COUNT", PAGE)]))[0]
                found, dropped = self._sizes(_pairs(page))
                if dropped:
                    _raise_first(self._pipeline([("ZREM", self._own, *dropped)]))
            except Exception as error:
                raise explain(error, self.where) from None
            if found:
                yield found
            cursor = int(cursor)
            if not cursor:
                return

    def _sizes(self, page: list[tuple[bytes, float]]) -> tuple[list[FoundRecord], list[bytes]]:
        """The records of a page that are there, and the names of those that are not. Raises."""
        lengths = _raise_first(self._pipeline([("STRLEN", self.prefix + b":c:" + full) for full, _ in page]))
        found, dropped = [], []
        for (full, score), length in zip(page, lengths, strict=True):
            if not length:
                dropped.append(full)
                continue
            found.append(FoundRecord(short_name(self._identity, full), length + OVERHEAD_BYTES, int(score * 1e9)))
        return found, dropped


def _groups(items: Sequence[ReadItem]) -> list[list[ReadItem]]:
    """What is asked for together: its answers are still in the processor's cache when they are used."""
    return cut(items, lambda item: len(item.target), len(items), READ_BYTES)


def cause_of_value(error: BaseException) -> FailCause:
    """What an error means that stands in the place of a value."""
    return FailCause.FOREIGN if str(error).startswith("WRONGTYPE") else cause_of(error)


def _pairs(page: Any) -> list[tuple[bytes, float]]:
    """Members and scores, as either version of the protocol gives them."""
    if page and not isinstance(page[0], list | tuple):
        page = list(zip(page[::2], page[1::2], strict=True))
    return [(bytes(member), float(score)) for member, score in page]


def _raise_first(results: list[Any]) -> list[Any]:
    """The results, if none of them is an exception."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _settle(item: WriteItem, result: Any) -> bool:
    """The outcome of one SET; True if something was there already."""
    if isinstance(result, Exception):
        item.fail(cause_of(result), uncertain=False)
    elif result is None:
        return True
    else:
        item.failed, item.uncertain = None, False
    return False
