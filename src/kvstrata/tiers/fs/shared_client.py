"""A directory that several engines share, as a `StoreClient` (server/client.py).

    PATH/claims/PART               the claim of a part, see `common.claims`
    PATH/parts/PART/...            what a writer stores, laid out as the directory of an engine alone (place.py)

Each writer writes, counts and evicts in its own part and reads all. Nothing relies on locks, on the order of times, or
on what a directory listing says: a file that is gone, stale, or not all there yet is a miss.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Sequence

from kvstrata.tiers.common.claims import PlaceError
from kvstrata.tiers.common.index import Name, Victim, is_served
from kvstrata.tiers.common.memo import Memo
from kvstrata.tiers.common.record import HEADER_BYTES, Identity
from kvstrata.tiers.fs.files import Access, FileStatus, FileSystem, cause_of, close_quietly
from kvstrata.tiers.fs.find import list_folders, scan_folder
from kvstrata.tiers.fs.place import (
    CLAIMS,
    DIRECTORY_FLAGS,
    LOCK_FILE,
    PARTS,
    TEMPORARY,
    TEMPORARY_NAME,
    Failure,
    Folders,
    Place,
    file_name,
    open_folder,
    read_record,
    remove_record,
    sync_records,
    write_record,
)
from kvstrata.tiers.fs.shared_claims import DirectoryClaims, list_names, place_error
from kvstrata.tiers.server.client import SCOPE_BYTES, ClientSetup, FoundRecord, ReadItem, WriteItem, scope_of
from kvstrata.types import FailCause, OffloadKey

NAMESPACE_BYTES = 16
_PART_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


class SharedClient:
    """Blocking work in a shared directory. Used by several workers at once: handles are made per batch."""

    overhead = 0
    trusts_index = False

    def __init__(self, path: str, files: FileSystem, access: Access, min_free: int) -> None:
        self.path = path
        self.files = files
        self.access = access
        self.unit = 4096
        self.claims = DirectoryClaims(self)
        self.unsynced: dict[Name, None] = {}
        """What was written since the last `sync`."""
        self._min_free = min_free
        self._identity = Identity(bytes(NAMESPACE_BYTES), 0)
        self._part = ""
        self._verify = True
        self._folders: dict[str, int] = {}
        self._own: Place | None = None
        self._strays: dict[str, OffloadKey] = {}
        """Temporary files of the own part that could not be removed, and the record that each was to become."""
        self._where = Memo()
        self._bad = Memo()

    # the directory

    def open(self, setup: ClientSetup) -> None:
        """Open the directory, made first if only its last part is missing, and check it."""
        self.close()
        self._identity, self._part, self._verify = setup.identity, setup.part, setup.verify
        try:
            self._open_folders()
        except OSError as error:
            self.close()
            raise place_error(error, self.path, permanent=True) from None

    def _open_folders(self) -> None:
        """Handles of the root, the claims and the parts. Raises `OSError`, and `PlaceError` for a wrong directory."""
        self._close_folders()
        flags = DIRECTORY_FLAGS & ~os.O_NOFOLLOW  # the operator named it: it may be a link
        try:
            root = self.files.open(self.path, flags)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                self.files.mkdir(self.path, self.access.folder_mode)
            root = self.files.open(self.path, flags)
            with contextlib.suppress(PermissionError):  # somebody else has made it in the meantime
                self.access.give(self.files, root, folder=True)
        self._folders["root"] = root
        mode = self.files.fstat(root).mode
        if mode & stat.S_IWOTH:
            raise PlaceError(f"{self.path} may be written by everybody; chunks in it cannot be trusted", permanent=True)
        if mode & stat.S_IWGRP and not self.access.mode & stat.S_IWGRP:
            raise PlaceError(f'{self.path} may be written by its group, which mode "0660" would say', permanent=True)
        if LOCK_FILE in self.files.names(root):
            raise PlaceError(f"{self.path} belongs to one engine alone; parts need another directory", permanent=True)
        for name in (CLAIMS, PARTS):
            self._folders[name] = open_folder(self.files, name, root, make=True, access=self.access)
        self.unit = max(self.files.device(root).block_bytes, 512)

    def _close_folders(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            own.close()
        folders, self._folders = self._folders, {}
        for fd in folders.values():
            close_quietly(self.files, fd)

    def close(self) -> None:
        """Let go of the directory."""
        self._close_folders()
        self._where.clear()
        self._bad.clear()

    def claims_fd(self) -> int:
        """The open directory of claims; if it was replaced, or the directory unmounted and mounted, the new one."""
        try:
            if self.files.fstat(self._folders[CLAIMS]).links:
                return self._folders[CLAIMS]
        except (OSError, KeyError):
            pass
        self._open_folders()
        return self._folders[CLAIMS]

    def _parts_fd(self) -> int:
        fd = self._folders.get(PARTS)
        if fd is None:
            raise FileNotFoundError(2, "is not open", self.path)
        return fd

    @contextlib.contextmanager
    def _reading(self) -> Iterator[_Readers]:
        """Handles of parts for one batch, opened at first use: nothing stale lives longer than a batch."""
        readers = _Readers(self)
        try:
            yield readers
        finally:
            readers.close()

    def open_part(self, part: str) -> Place:
        """A part to read in. Raises `OSError`."""
        root = self.files.open(part, DIRECTORY_FLAGS, dir_fd=self._parts_fd())
        return Place(self.files, self.path, self._identity, self._verify, root, -1, root, self.unit, "")

    def parts(self) -> list[str]:
        """The parts of others. Raises `OSError`."""
        names = list_names(self.files, self._parts_fd())
        return sorted(name for name in names if name != self._part and _PART_NAME.fullmatch(name))

    # presence and reading

    def exists(self, keys: Sequence[OffloadKey], *, own: bool) -> list[bool | FailCause]:
        """Look at the file of each key, part by part, until one has it."""
        answers: list[bool | FailCause] = [False] * len(keys)
        with self._reading() as readers:
            try:
                parts = ([self._part] if own else []) + self.parts()
            except OSError as error:
                return [cause_of(error)] * len(keys)
            for part in parts:
                for index, key in enumerate(keys):
                    if answers[index] is not True:
                        answers[index] = _better(answers[index], self._is_there(readers, part, key))
        return answers

    def _is_there(self, readers: _Readers, part: str, key: OffloadKey) -> bool | FailCause:
        status = readers.status(part, key)
        if isinstance(status, FailCause):
            return False if status is FailCause.GONE else status
        if not stat.S_ISREG(status.mode) or status.size < HEADER_BYTES:
            return False
        if self._bad.get(f"{part}/{key.hex()}") == _version(status):
            return False
        if part != self._part:
            self._where.note(key.hex(), part)
        return True

    def read(self, items: Sequence[ReadItem]) -> None:
        """Read each record straight into its place and verify it there."""
        with self._reading() as readers:
            others: list[str] | None = None
            for item in items:
                if not item.take_permit():
                    item.failed = FailCause.TIMEOUT
                    continue
                first = [self._part] if item.own is not False else []
                hint = self._where.get(item.key.hex())
                item.failed = FailCause.GONE
                if self._read_any(readers, item, first + ([hint] if hint else [])):
                    continue
                if others is None:
                    try:
                        others = self.parts()
                    except OSError as error:
                        item.failed = item.failed if item.failed.is_content else cause_of(error)
                        continue
                self._read_any(readers, item, [part for part in others if part != hint])

    def _read_any(self, readers: _Readers, item: ReadItem, parts: Sequence[str]) -> bool:
        """Read from the first part that has it whole; of several causes the one that says most stays."""
        for part in parts:
            failure = readers.read(part, item)
            if failure is None:
                item.failed = None
                return True
            if failure.cause.is_content or item.failed is FailCause.GONE:
                item.failed = failure.cause
            if failure.cause.is_content:
                item.version = (part, failure.inode)
                self._note_bad(readers, part, item.key, failure.inode)
        return False

    def _note_bad(self, readers: _Readers, part: str, key: OffloadKey, inode: int | None) -> None:
        """Remember the version that was bad: it is not shown again, a later one is."""
        status = readers.status(part, key)
        if not isinstance(status, FailCause) and status.inode == inode:
            self._bad.note(f"{part}/{key.hex()}", _version(status))

    def discard(self, items: Sequence[ReadItem]) -> list[bool]:
        """Remove bad files of the own part, the version that was read; those of others are not shown any more."""
        own, done = self._own, [True] * len(items)
        for index, item in enumerate(items):
            if own is None or not isinstance(item.version, tuple) or item.version[0] != self._part:
                continue
            inode = item.version[1]
            if inode is not None:
                with Folders(own) as folders:
                    done[index] = remove_record(folders, Victim(item.key, 0, inode)) is None
        return done

    # the own part

    def write(self, items: Sequence[WriteItem]) -> None:
        """Write each record under a temporary name and move it into its place."""
        place = self._own
        if place is None or not self._sweep():
            for item in items:
                item.fail(FailCause.REFUSED)
            return
        with Folders(place) as folders:
            free = place.free_bytes() if self._min_free else None
            for item in items:
                need = place.footprint(HEADER_BYTES + len(item.payload))
                if free is not None and free - need < self._min_free:
                    item.fail(FailCause.NO_SPACE)
                    continue
                written = write_record(folders, item.key, item.payload, item.digest, item.stamp)
                free = None if free is None else free - need
                if written.stray is not None:
                    self._strays[written.stray[0]] = item.key
                if written.failure is None:
                    self.unsynced[item.key] = None
                    item.failed, item.uncertain = None, False
                else:
                    # A move whose answer was lost may have happened.
                    cause = written.failure.cause
                    item.fail(cause, uncertain=cause not in (FailCause.NO_SPACE, FailCause.REFUSED) or _left(written))

    def _sweep(self) -> bool:
        """Remove temporary files that would not go before; False if some still do not."""
        own = self._own
        for name in list(self._strays) if own is not None else ():
            try:
                self.files.unlink(name, own.tmp_fd if own is not None else -1)
            except FileNotFoundError:
                pass
            except OSError:
                return False
            self._strays.pop(name, None)
        return True

    def remove(self, names: Sequence[Name]) -> list[bool]:
        """Remove files. A record is not gone while a temporary file of it takes room."""
        own = self._own
        if own is None:
            return [False] * len(names)
        swept = self._sweep()
        with Folders(own) as folders:
            done = [remove_record(folders, Victim(_file_name(name), 0)) is None for name in names]
        stuck = set() if swept else set(self._strays.values())
        for name in names:
            self.unsynced.pop(_file_name(name), None)
        return [ok and _file_name(name)[-36:] not in stuck for ok, name in zip(done, names, strict=True)]

    def touch(self, stamps: Sequence[tuple[OffloadKey, int]]) -> None:
        """Set times of own files. What fails is only colder than it should be."""
        own = self._own
        if own is None:
            return
        with Folders(own) as folders:
            for key, stamp in stamps:
                with contextlib.suppress(OSError):
                    self.files.set_mtime(file_name(key), stamp, folders.of(key))

    def sync(self) -> bool:
        """Make what was written durable; False if some of it could not be."""
        own = self._own
        names: list[Name] = []
        with contextlib.suppress(KeyError):  # workers add to it meanwhile
            while True:
                names.append(self.unsynced.popitem()[0])
        if own is None:
            return not names
        with Folders(own) as folders:
            ok = sync_records(folders, names, contents=True)
        if not ok:
            self.unsynced.update(dict.fromkeys(names))
        return ok

    def scan(self) -> Iterator[list[FoundRecord]]:
        """Open the own part and find what lies in it; temporary files of earlier owners go first."""
        try:
            place = self._open_own()
            for name in self.files.names(place.tmp_fd):
                if TEMPORARY_NAME.fullmatch(name):
                    with contextlib.suppress(FileNotFoundError):
                        self.files.unlink(name, place.tmp_fd)
            for namespace, fan in list_folders(place):
                with Folders(place) as folders:
                    found = scan_folder(folders, namespace, fan)
                yield [FoundRecord(self._name_of(one.name), one.allocated, one.mtime_ns) for one in found]
        except OSError as error:
            raise place_error(error, self.path) from None
        self._own = place

    def _open_own(self) -> Place:
        """The own part, made if need be. Raises `OSError`."""
        if self._own is not None:
            self._own.close()
            self._own = None
        self.claims_fd()  # opens the directory again if it was replaced
        root = open_folder(self.files, self._part, self._parts_fd(), make=True, access=self.access)
        try:
            tmp = open_folder(self.files, TEMPORARY, root, make=True, access=self.access)
        except OSError:
            close_quietly(self.files, root)
            raise
        owner = f"{os.getpid()}-{os.urandom(4).hex()}"
        return Place(
            self.files, self.path, self._identity, self._verify, root, -1, tmp, self.unit, owner, access=self.access
        )

    def _name_of(self, name: Name) -> Name:
        """A file's name in the index: the file system knows namespace and key, the index the layout, too."""
        if is_served(name):
            return name
        tag = scope_of(self._identity)[NAMESPACE_BYTES:]
        return name[:NAMESPACE_BYTES] + tag + name[NAMESPACE_BYTES:]


class _Readers:
    """Handles of parts, and of folders in them, that one batch uses. Errors come back as causes."""

    def __init__(self, client: SharedClient) -> None:
        self._client = client
        self._open: dict[str, Folders] = {}

    def close(self) -> None:
        """Give all handles back."""
        for part in list(self._open):
            self._drop(part)

    def _drop(self, part: str) -> None:
        folders = self._open.pop(part, None)
        if folders is not None:
            folders.__exit__()
            close_quietly(self._client.files, folders.place.root_fd)

    def _of(self, part: str) -> Folders:
        folders = self._open.get(part)
        if folders is None:
            folders = self._open[part] = Folders(self._client.open_part(part))
        return folders

    def status(self, part: str, key: OffloadKey) -> FileStatus | FailCause:
        """Status of a key's file; a handle that has become stale is tried once more, anew."""
        cause = FailCause.GONE
        for _ in range(2):
            try:
                folders = self._of(part)
                return self._client.files.stat(file_name(key), folders.of(key))
            except OSError as error:
                cause = cause_of(error)
                if cause is not FailCause.IO_ERROR:
                    return cause
                self._drop(part)
        return cause

    def read(self, part: str, item: ReadItem) -> Failure | None:
        """Read one record; a handle that has become stale is tried once more, anew."""
        failure = Failure(FailCause.GONE)
        for _ in range(2):
            try:
                found = read_record(self._of(part), item.key, item.target)
            except OSError as error:
                found = Failure(cause_of(error))
            if found is None or found.cause is not FailCause.IO_ERROR:
                return found
            failure = found
            self._drop(part)
        return failure


def _better(known: bool | FailCause, answer: bool | FailCause) -> bool | FailCause:
    """One part that has it is enough; absent only if every part says so."""
    return answer if answer is True or known is False else known


def _left(written: object) -> bool:
    return getattr(written, "stray", None) is not None


def _file_name(name: Name) -> Name:
    """The index's name without the layout: what the file system goes by."""
    return name if is_served(name) else name[:NAMESPACE_BYTES] + name[SCOPE_BYTES:]


def _version(status: FileStatus) -> str:
    """What tells two versions of one file apart."""
    return f"{status.inode}-{status.size}-{status.mtime_ns}"
