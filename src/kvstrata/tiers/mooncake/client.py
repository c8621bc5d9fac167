"""How chunks lie in a Mooncake Store, and how batches of them go there and back.

    PREFIX/record/PART/SCOPE/KEY    one record: hex of scope (namespace, layout) and key

Each record is one object, its payload and then its header. The payload goes straight from and into primary, so nothing
is copied in this process. With tail room the header stands right behind it there, and both are one transfer; without,
it goes from and into a small registered arena, a second piece of the same object. The payload is verified where it has
arrived. A read takes its item's permit before the transfer: what may be written to is not given up.

A call to a master that hangs ends by the library's own bound, which is set to the tier's time-out before the library is
loaded; what moves bytes has other bounds. Calls release the interpreter lock, so one that hangs costs one worker and
nothing else.

One batch of each direction moves at a time: the library spreads each over its own threads, and two at once only take
the processors from each other. Digests are made and checked while another batch moves. Who calls the library spins
until the bytes are there; so long calls are made on a thread that lets those go first that move and check bytes.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from kvstrata.tiers.base import Clock, Executor
from kvstrata.tiers.common.claims import PlaceError
from kvstrata.tiers.common.index import Name
from kvstrata.tiers.common.memo import Memo
from kvstrata.tiers.common.record import HEADER_BYTES, Identity, check_header, check_payload
from kvstrata.tiers.mooncake.arena import RECORDS, Arena, Block, Place, Turn, address_of
from kvstrata.tiers.mooncake.claims import ALREADY_THERE, NOT_FOUND, MooncakeClaims
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

BAD_S = 60.0
"""How long a bad record of another writer is not served: the store gives no version to tell it from a better one."""
NO_ROOM = -200
BAD_PARAMETERS = -600
TRANSFER_FAILED = -800
TIMED_OUT = -901
LONG_CALL = 4 << 20
"""A call that moves fewer bytes is over before another thread has begun it."""
SCAN_PAGE = 1000
NO_HEADER = bytes(HEADER_BYTES)
RECORDS_IN = "record"
OLD_RECORDS_IN = "chunk"
"""Where records lay that had their header first."""

_RECORD = re.compile(f"([0-9a-f]{{{2 * SCOPE_BYTES}}})/([0-9a-f]{{{2 * KEY_BYTES}}})")


RPC_BOUNDS = ("MC_RPC_TIMEOUT_MS", "MC_RPC_CONNECT_TIMEOUT_MS")
"""What the library reads for the longest time of a call to the master, when it is first used in a process."""


_hurried: list[bool] = []


def end_without_good_bye() -> None:
    """Have this process end at once when its time has come, after all that Python does at its end; idempotent.

    The library's exit handler says good-bye to servers that do not answer, one time-out after the other, and now and
    then aborts. C's own buffers are written out first; exit handlers in C that were there before this call are passed
    over. Nothing is done where the C library has no `on_exit`.
    """
    c: Any = ctypes.CDLL(None)
    if _hurried or not (hasattr(c, "on_exit") and hasattr(c, "fcloseall")):
        return
    _hurried.append(True)
    for step in (c._exit, c.fcloseall):  # the last one that is registered is the first one that is called
        c.on_exit(step, None)  # with the exit status, which is what `_exit` takes


GOOD_BYE_S = 1.0
"""So long a server may take to show that it is there before the library says good-bye to it."""


def library(timeout_s: float | None = None) -> Any:
    """The package's module; with `timeout_s`, calls to the master end in that time unless the environment says another.

    Raises `ImportError`, also if libibverbs is missing.
    """
    for name in RPC_BOUNDS if timeout_s is not None else ():
        os.environ.setdefault(name, str(max(int(1000 * (timeout_s or 0)), 1)))
    return importlib.import_module("mooncake.store")


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the store is, and what this process adds to it."""

    master: str
    metadata: str
    hostname: str
    protocol: str
    devices: str
    segment: int
    admin: str
    """URL of the master's HTTP server, or empty."""


class MooncakeClient:
    """A `StoreClient` (server/client.py) over one Mooncake Store."""

    overhead = 0
    unit = 1
    trusts_index = False

    def __init__(
        self,
        connection: Connection,
        prefix: str,
        clock: Callable[[], Clock | None],
        *,
        replicas: int = 1,
        store: Any = None,
    ) -> None:
        self.connection = connection
        self.prefix = prefix
        self.store: Any = None
        self.region = memoryview(b"")
        """All of primary, set before `open`."""
        self.tail_room = 0
        """So many bytes behind each payload in primary are this tier's, set before `open`."""
        self.yielding: Executor | None = None
        """Where long calls are made, set before `open`; None: by whoever wants them."""
        self._given = store
        self._clock = clock
        self._replicas = replicas
        self.claims = MooncakeClaims(self, prefix, lambda: self._config(pinned=True))
        self._arena = Arena()
        self._reading, self._preparing, self._writing = Turn(), Turn(), Turn()
        self._registered: list[int] = []
        self._identity = Identity(bytes(16), 0)
        self._part = ""
        self._verify = True
        self._timeout_s = 5.0
        self._parts: list[str] = []
        self._where = Memo()
        self._bad = Memo()

    def _config(self, *, pinned: bool = False) -> Any:
        config = library().ReplicateConfig()
        config.replica_num = self._replicas
        config.with_hard_pin = pinned
        return config

    # connection

    def open(self, setup: ClientSetup) -> None:
        """Connect, register primary once, and list the parts."""
        self.close()
        self._identity, self._part, self._verify = setup.identity, setup.part, setup.verify
        self._timeout_s = setup.timeout_s
        self.store = self._given or self._connect()
        try:
            self._register()
            self._parts = [part for part in self.claims.parts() if part != self._part]
        except PlaceError:
            self.close()
            raise

    def _connect(self) -> Any:
        at, store = self.connection, library().MooncakeDistributedStore()
        self._look_for_servers(self._timeout_s)  # the library itself would try for a minute and a half
        code = store.setup(
            at.hostname, at.metadata, at.segment, len(self._arena.view), at.protocol, at.devices, at.master
        )
        if code != 0:
            raise PlaceError(f"master {at.master} or metadata server {at.metadata} cannot be used (code {code})")
        # Only `close` gives it up: what is freed while the interpreter ends says good-bye, whoever answers.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
        return store

    def _look_for_servers(self, timeout_s: float) -> None:
        """Whether both servers can be reached at all. Raises `PlaceError`."""
        at = self.connection
        host, _, port = at.master.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
        except (OSError, ValueError) as error:
            raise PlaceError(f"master {at.master} cannot be reached: {error}") from None
        if not at.metadata.startswith("http"):
            return
        try:
            urllib.request.urlopen(f"{at.metadata}?key=kvstrata", timeout=timeout_s).close()
        except urllib.error.HTTPError as answer:
            answer.close()  # it answers: there is no such key
        except (OSError, ValueError) as error:
            raise PlaceError(f"metadata server {at.metadata} cannot be reached: {error}") from None

    def _register(self) -> None:
        for what, view in (("primary", self.region), ("its headers", self._arena.view)):
            if not len(view):
                continue
            address = address_of(view)
            code = self.store.register_buffer(address, len(view))
            if code != 0:
                raise PlaceError(f"does not take {len(view)} bytes of memory for {what} (code {code})", permanent=True)
            self._registered.append(address)

    def close(self) -> None:
        """Disconnect. A store that was given is only let go of; one whose servers do not answer is left as it is.

        Its good-bye would outlast everybody's patience, and the library keeps the interpreter's lock meanwhile.
        """
        store, self.store = self.store, None
        registered, self._registered = self._registered, []
        self._where.clear()
        self._bad.clear()
        if store is None:
            return
        if store is not self._given and not self._answers(store):
            end_without_good_bye()
            return
        for address in registered:
            store.unregister_buffer(address)
        if store is not self._given:
            store.close()
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(store))

    @property
    def is_left(self) -> bool:
        """Whether there still is a connection of our own."""
        return self.store is not None and self.store is not self._given

    def _answers(self, store: Any) -> bool:
        """Whether the master and its metadata server are well. The library's own call may take three time-outs."""
        try:
            self._look_for_servers(min(GOOD_BYE_S, self._timeout_s))
        except PlaceError:
            return False
        return int(store.is_exist(self.prefix)) >= 0

    # names

    def _path(self, part: str, name: Name) -> str:
        full = full_name(self._identity, name)
        return f"{self.prefix}/{RECORDS_IN}/{part}/{full[:SCOPE_BYTES].hex()}/{full[SCOPE_BYTES:].hex()}"

    def _now(self) -> float:
        clock = self._clock()
        return 0.0 if clock is None else clock.monotonic()

    def _is_bad(self, path: str) -> bool:
        until = self._bad.get(path)
        return until is not None and self._now() < float(until)

    # StoreClient

    def exists(self, keys: Sequence[OffloadKey], *, own: bool) -> list[bool | FailCause]:
        """All keys in all parts by one call, which also tells of new parts; those take a second one."""
        if self.store is None:
            return [FailCause.REFUSED] * len(keys)
        answers: list[bool | FailCause] = [False] * len(keys)
        parts = [self._part, *self._parts] if own else list(self._parts)
        new = self._ask(keys, parts, answers, look=True)
        if new:
            self._ask(keys, new, answers, look=False)
        return answers

    def _ask(
        self, keys: Sequence[OffloadKey], parts: list[str], answers: list[bool | FailCause], *, look: bool
    ) -> list[str]:
        """Fill `answers` by what `parts` have, the first one first; with `look`, returns parts that are new."""
        paths = [self._path(part, key) for part in parts for key in keys]
        places = self.claims.places if look else []
        codes = _as_many(self.store.batch_is_exist(paths + places), len(paths) + len(places))
        for at, code in enumerate(codes[: len(paths)]):
            part, index = parts[at // len(keys)], at % len(keys)
            if code == 1 and answers[index] is not True and not self._is_bad(paths[at]):
                answers[index] = True
                if part != self._part:
                    self._where.note(keys[index].hex(), part)
            elif code < 0 and answers[index] is False and code != NOT_FOUND:
                answers[index] = cause_of(code)
        try:
            new = self.claims.note_places(codes[len(paths) :])
        except PlaceError:
            return []
        self._parts += [part for part in new if part != self._part and part not in self._parts]
        return [part for part in new if part != self._part]

    def read(self, items: Sequence[ReadItem]) -> None:
        """Find out which part has what, then read it all by one call per `RECORDS` records."""
        if self.store is None:
            return
        left = self._locate(items)
        while left:
            batch: dict[str, ReadItem] = {}
            later: list[tuple[ReadItem, str]] = []
            for item, path in left:  # one call takes each name once
                if path in batch or len(batch) == RECORDS:
                    later.append((item, path))
                else:
                    batch[path] = item
            self._with_block([(item, path) for path, item in batch.items()], self._fetch)
            left = later

    def _locate(self, items: Sequence[ReadItem]) -> list[tuple[ReadItem, str]]:
        """The items that some part has, each with its object."""
        found: list[tuple[ReadItem, str]] = []
        unknown: list[ReadItem] = []
        for item in items:
            item.failed = FailCause.GONE
            hint = self._where.get(item.key.hex())
            if item.own:
                found.append((item, self._path(self._part, item.key)))
            elif hint is not None:
                found.append((item, self._path(hint, item.key)))
            else:
                unknown.append(item)
        if unknown:
            there = self.exists([item.key for item in unknown], own=True)
            for item, answer in zip(unknown, there, strict=True):
                if answer is True:
                    found.append((item, self._path(self._where.get(item.key.hex()) or self._part, item.key)))
                elif answer is not False:
                    item.failed = answer
        return [(item, path) for item, path in found if not self._is_bad(path)]

    def _with_block(self, batch: Sequence[Any], work: Callable[[Block, Sequence[Any]], None]) -> None:
        """Do one batch with an own piece of the arena; refused if too many hang."""
        block = self._arena.lend()
        if block is None:
            for entry in batch:
                item = entry[0] if isinstance(entry, tuple) else entry
                item.failed = FailCause.REFUSED
            return
        work(block, batch)
        self._arena.take_back(block)  # not if the call failed in a way that says nothing of what still runs

    def _place(self, block: Block, payload: memoryview) -> Place | None:
        return block.place(payload, self.region, self.tail_room)

    def _fetch(self, block: Block, batch: Sequence[tuple[ReadItem, str]]) -> None:
        with self._reading:
            reading, codes = self._get(block, batch)
        for (item, path, place), code in zip(reading, codes, strict=True):
            item.failed = self._judge(item, code, path, place)
            if item.failed is not None and item.failed.is_content:
                item.version = path

    def _get(
        self, block: Block, batch: Sequence[tuple[ReadItem, str]]
    ) -> tuple[list[tuple[ReadItem, str, Place]], list[int]]:
        """One call. What was read, from where, to which place, and the library's code for each."""
        reading: list[tuple[ReadItem, str, Place]] = []
        for item, path in batch:
            place = self._place(block, item.target)
            if place is None or not item.take_permit():
                item.failed = FailCause.REFUSED if place is None else FailCause.TIMEOUT
                continue
            place.header[:] = NO_HEADER  # what lies there may be a good header, of an earlier job
            reading.append((item, path, place))
        if not reading:
            return [], []
        paths = [path for _, path, _ in reading]
        pieces = [place.pointers for _, _, place in reading], [place.sizes for _, _, place in reading]
        size = sum(len(item.target) for item, _, _ in reading)
        given = self._call(lambda: self.store.batch_get_into_multi_buffers(paths, *pieces), size)
        return reading, _as_many(given, len(reading))

    def _call(self, work: Callable[[], Sequence[int]], size: int) -> Sequence[int]:
        """Have the library move `size` bytes. Raises what it raises."""
        if self.yielding is None or size < LONG_CALL:
            return work()
        answer: SimpleQueue[Sequence[int] | BaseException] = SimpleQueue()

        def run() -> None:
            try:
                answer.put(work())
            except BaseException as error:
                answer.put(error)

        self.yielding.submit(run)
        given = answer.get()
        if isinstance(given, BaseException):
            raise given
        return given

    def _judge(self, item: ReadItem, code: int, path: str, place: Place) -> FailCause | None:
        """What came: nothing wrong, or why it is not what was asked for."""
        wanted = HEADER_BYTES + len(item.target)
        if code != wanted:
            if code in (BAD_PARAMETERS, TRANSFER_FAILED):
                size = self.store.get_size(path)
                if size >= 0 and size != wanted:
                    return FailCause.WRONG_SIZE
            return FailCause.WRONG_SIZE if code >= 0 else cause_of(code)
        header = check_header(bytes(place.header), self._identity, item.key)
        if isinstance(header, FailCause):
            return header
        if header.payload_bytes != len(place.payload):
            return FailCause.WRONG_SIZE
        bad = check_payload(header, self._identity, place.payload, verify=self._verify)
        if bad is not None:
            return bad
        if place.is_copy:
            item.target[:] = place.payload
        return None

    def write(self, items: Sequence[WriteItem]) -> None:
        """One call per `RECORDS` records, straight from primary."""
        if self.store is None:
            for item in items:
                item.fail(FailCause.REFUSED)
            return
        for start in range(0, len(items), RECORDS):
            self._with_block(items[start : start + RECORDS], self._put)

    def _put(self, block: Block, batch: Sequence[WriteItem]) -> None:
        with self._preparing:
            writing = self._prepared(block, batch)
        if not writing:
            return
        paths = [self._path(self._part, item.key) for item, _ in writing]
        pieces = [place.pointers for _, place in writing], [place.sizes for _, place in writing]
        size = sum(len(item.payload) for item, _ in writing)
        with self._writing:
            given = self._call(lambda: self.store.batch_put_from_multi_buffers(paths, *pieces, self._config()), size)
        for (item, _), code in zip(writing, _as_many(given, len(paths)), strict=True):
            if code in (0, ALREADY_THERE):
                item.failed, item.uncertain = None, False
            else:
                item.fail(cause_of(code), uncertain=code not in (NO_ROOM, BAD_PARAMETERS))

    def _prepared(self, block: Block, batch: Sequence[WriteItem]) -> list[tuple[WriteItem, Place]]:
        """The records of a batch, with their headers, where they can be read from."""
        writing: list[tuple[WriteItem, Place]] = []
        for item in batch:
            place = self._place(block, item.payload)
            if place is None:
                item.fail(FailCause.REFUSED)
                continue
            if place.is_copy:
                place.payload[:] = item.payload
            place.header[:] = item.header(self._identity)
            writing.append((item, place))
        return writing

    def remove(self, names: Sequence[Name]) -> list[bool]:
        """One call, whoever reads them."""
        return self._remove([self._path(self._part, name) for name in names])

    def _remove(self, paths: list[str]) -> list[bool]:
        store = self.store
        if store is None or not paths:
            return [False] * len(paths)
        return [code in (0, NOT_FOUND) for code in _as_many(store.batch_remove(paths, True), len(paths))]

    def discard(self, items: Sequence[ReadItem]) -> list[bool]:
        """Remove bad records of the own part; those of others are not served for a while."""
        mine = self._path(self._part, b"").rpartition("/")[0]
        done = [True] * len(items)
        for index, item in enumerate(items):
            path = item.version
            if not isinstance(path, str):
                continue
            if path.startswith(mine):
                done[index] = self._remove([path])[0]
            else:
                self._bad.note(path, str(self._now() + BAD_S))
        return done

    def touch(self, stamps: Sequence[tuple[OffloadKey, int]]) -> None:
        """The store's own clock of use goes by reads."""

    def scan(self) -> Iterator[list[FoundRecord]]:
        """What lies in the own part, if the master's HTTP server can tell; else the part is cleared: what cannot be
        counted must not stay. Nor must records of the old order, which nobody reads any more.
        """
        store = self.store
        if store is None:
            raise PlaceError("is not connected")
        start = f"{self.prefix}/{RECORDS_IN}/{self._part}/"
        self._clear(f"{self.prefix}/{OLD_RECORDS_IN}/{self._part}/")
        if not self.connection.admin:
            self._clear(start)
            return
        names = [name for name in self._all_names() if name.startswith(start)]
        for at in range(0, len(names), SCAN_PAGE):
            yield [found for name in names[at : at + SCAN_PAGE] if (found := self._found(start, name)) is not None]

    def _clear(self, start: str) -> None:
        """Remove all objects whose names begin so."""
        code = self.store.remove_by_regex(f"^{re.escape(start)}", True)
        if code < 0:
            raise PlaceError(f"the own part cannot be cleared (code {code})")

    def _all_names(self) -> list[str]:
        url = f"{self.connection.admin}/get_all_keys"
        try:
            with urllib.request.urlopen(url, timeout=self._timeout_s) as answer:
                return str(answer.read().decode("utf-8", "replace")).splitlines()
        except (OSError, urllib.error.URLError) as error:
            raise PlaceError(f"{url}: {error}") from None

    def _found(self, start: str, name: str) -> FoundRecord | None:
        match = _RECORD.fullmatch(name.removeprefix(start))
        if match is None:
            return None
        size = self.store.get_size(name)
        if size == NOT_FOUND:
            return None
        if size < 0:
            raise PlaceError(f"does not tell a size (code {size})")
        return FoundRecord(short_name(self._identity, bytes.fromhex(match[1] + match[2])), size, 0)


def cause_of(code: int) -> FailCause:
    """What an error code of the store means. What is not listed may pass: the data is kept."""
    if code == NOT_FOUND:
        return FailCause.GONE
    if code == NO_ROOM:
        return FailCause.NO_SPACE
    return FailCause.TIMEOUT if code == TIMED_OUT else FailCause.IO_ERROR


def _as_many(codes: Sequence[int], count: int) -> list[int]:
    """One code per entry; an answer of another length says nothing about any."""
    return [int(code) for code in codes] if len(codes) == count else [TRANSFER_FAILED] * count
