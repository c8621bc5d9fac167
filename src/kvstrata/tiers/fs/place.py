"""One directory that the fs tier owns, and what a worker does in it. Values come back, never an `OSError`.

    root/kvstrata-fs.lock          kernel lock of the owner
    root/tmp/PID-TOKEN-COUNT.tmp   files that are being written
    root/NAMESPACE/KK/KEY          one chunk: hex of the namespace, of the key's first byte, of the key

Everything is opened relative to a handle of the root, without following links. A file whose name does not have this
form belongs to somebody else and is left alone.

Inside the tier a file is called by its *name*: the key for what this tier serves, and namespace + key for what only
takes room (another namespace, or a record that a load would not accept).
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

import xxhash

from kvstrata.tiers.common.index import Name, Victim, is_served
from kvstrata.tiers.common.record import HEADER_BYTES, Identity, check_header, check_payload, make_header
from kvstrata.tiers.fs.files import PRIVATE, Access, FileStatus, FileSystem, cause_of, close_quietly
from kvstrata.types import FailCause, OffloadKey

NAMESPACE_BYTES = 16
LOCK_FILE = "kvstrata-fs.lock"
TEMPORARY = "tmp"
PARTS = "parts"
CLAIMS = "claims"
"""Where engines that share a directory keep their parts, and say so (shared_client.py)."""
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO under our name must not block a worker
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW

TEMPORARY_NAME = re.compile(r"\d{1,10}-[0-9a-f]{8}-\d+\.tmp")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a file could not be used. `inode` is that of the version that was read; None if none was."""

    cause: FailCause
    inode: int | None = None
    lost: bool = False
    """The directory itself is gone."""


@dataclass(frozen=True, slots=True)
class Written:
    """A record is in its place, or why it is not. `stray`: a temporary file that could not be removed, and its size."""

    allocated: int = 0
    failure: Failure | None = None
    stray: tuple[str, int] | None = None


@dataclass(slots=True)
class Place:
    """The open directory. Made by `attach.open_place`; `close` gives the handles and the lock back."""

    files: FileSystem
    path: str
    identity: Identity
    verify: bool
    root_fd: int
    lock_fd: int
    tmp_fd: int
    block_bytes: int
    owner: str
    """Process id and a random token: the beginning of every temporary file's name."""
    counter: Iterator[int] = field(default_factory=itertools.count)
    access: Access = PRIVATE

    def close(self) -> None:
        """Give all handles back; with the lock's, another engine may take the directory."""
        for fd in (self.tmp_fd, self.root_fd, self.lock_fd):
            close_quietly(self.files, fd)

    def footprint(self, size: int, allocated: int = 0) -> int:
        """Bytes that a file counts: as allocated, but never less than its size in whole blocks.

        File systems tell the allocation late, or leave out what lies in the inode.
        """
        return max(allocated, -(-size // self.block_bytes) * self.block_bytes)

    def free_bytes(self) -> int | None:
        """Space left on the device; None if it cannot be asked."""
        try:
            return self.files.device(self.root_fd).free_bytes
        except OSError:
            return None

    def lost(self) -> bool:
        """Whether the directory, or the part that writes need, was removed, or the device taken away."""
        try:
            return not all(self.files.fstat(fd).links for fd in (self.root_fd, self.tmp_fd))
        except OSError:
            return True

    def failure(self, error: OSError, inode: int | None = None) -> Failure:
        """What an error means; a missing file in a missing directory says nothing about the file."""
        cause = cause_of(error)
        if cause in (FailCause.GONE, FailCause.IO_ERROR) and self.lost():
            return Failure(FailCause.IO_ERROR, lost=True)
        return Failure(cause, inode)


def split_name(place: Place, name: Name) -> tuple[bytes, OffloadKey]:
    """Namespace and key of a name."""
    if is_served(name):
        return place.identity.namespace, name
    return name[:NAMESPACE_BYTES], name[NAMESPACE_BYTES:]


class Folders:
    """Handles of the directories that one task works in; opened at first use, closed with the `with` block."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._open: dict[str, int] = {}

    def __enter__(self) -> Folders:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            close_quietly(self.place.files, fd)
        self._open.clear()

    def of(self, name: Name, *, make: bool = False) -> int:
        """The directory that holds the file of `name`. Raises `OSError`."""
        namespace, key = split_name(self.place, name)
        return self.at(namespace.hex(), key[:1].hex(), make=make)

    def at(self, namespace: str, fan: str | None = None, *, make: bool = False) -> int:
        """The directory of a namespace, or one of its fan-out directories. Raises `OSError`."""
        path = namespace if fan is None else f"{namespace}/{fan}"
        fd = self._open.get(path)
        if fd is None:
            parent = self.place.root_fd if fan is None else self.at(namespace, make=make)
            fd = open_folder(self.place.files, fan or namespace, parent, make=make, access=self.place.access)
            self._open[path] = fd
        return fd


def open_folder(files: FileSystem, name: str, parent: int, *, make: bool = False, access: Access = PRIVATE) -> int:
    """A handle of a sub-directory, made first if need be. Raises `OSError`."""
    try:
        return files.open(name, DIRECTORY_FLAGS, dir_fd=parent)
    except FileNotFoundError:
        if not make:
            raise
    try:
        files.mkdir(name, access.folder_mode, dir_fd=parent)
    except FileExistsError:
        return files.open(name, DIRECTORY_FLAGS, dir_fd=parent)
    fd = files.open(name, DIRECTORY_FLAGS, dir_fd=parent)
    try:
        access.give(files, fd, folder=True)
    except OSError:
        close_quietly(files, fd)
        raise
    return fd


def file_name(key: OffloadKey) -> str:
    """The file of a key, in its fan-out directory."""
    return key.hex()


def write_record(
    folders: Folders, key: OffloadKey, payload: memoryview, digest: bytes | None, mtime_ns: int
) -> Written:
    """Write one record under a temporary name and move it into its place."""
    place = folders.place
    files = place.files
    header = make_header(place.identity, key, len(payload), digest or xxhash.xxh3_128_digest(payload), payload)
    temporary = f"{place.owner}-{next(place.counter)}.tmp"
    try:
        folder = folders.of(key, make=True)
        allocated = _write_temporary(place, temporary, [header, payload], mtime_ns)
        files.rename(temporary, file_name(key), place.tmp_fd, folder)
    except OSError as error:
        return Written(failure=place.failure(error), stray=_drop_temporary(place, temporary))
    return Written(place.footprint(HEADER_BYTES + len(payload), allocated))


def _write_temporary(place: Place, name: str, buffers: list[bytes | memoryview], mtime_ns: int) -> int:
    """Write, set the time, close; the close may be the first to tell of a write that failed. Returns the allocation."""
    files = place.files
    fd = files.open(name, WRITE_FLAGS, place.access.mode, place.tmp_fd)
    try:
        place.access.give(files, fd, folder=False)
        files.write(fd, buffers, 0)
        files.set_mtime(fd, mtime_ns)
        status = files.fstat(fd)
    except OSError:
        close_quietly(files, fd)
        raise
    files.close(fd)
    return status.allocated


def _drop_temporary(place: Place, name: str) -> tuple[str, int] | None:
    """Remove a temporary file. What cannot be removed still takes room: its name and size come back."""
    try:
        place.files.unlink(name, place.tmp_fd)
    except FileNotFoundError:
        return None
    except OSError:
        try:
            status = place.files.stat(name, place.tmp_fd)
        except OSError:
            return None
        return name, place.footprint(status.size, status.allocated)
    return None


def read_record(folders: Folders, key: OffloadKey, target: memoryview) -> Failure | None:
    """Read one record's payload into `target` and verify it there; None if all of it is what was asked for."""
    place = folders.place
    try:
        fd = place.files.open(file_name(key), READ_FLAGS, dir_fd=folders.of(key))
    except OSError as error:
        return place.failure(error)
    inode: int | None = None
    try:
        status = place.files.fstat(fd)
        inode = status.inode
        cause = _read_open(place, fd, status, key, target)
    except OSError as error:
        return place.failure(error, inode)
    finally:
        close_quietly(place.files, fd)
    return None if cause is None else Failure(cause, inode)


def _read_open(place: Place, fd: int, status: FileStatus, key: OffloadKey, target: memoryview) -> FailCause | None:
    if not stat.S_ISREG(status.mode):
        return FailCause.FOREIGN
    if status.size != HEADER_BYTES + len(target):
        return FailCause.WRONG_SIZE
    head = bytearray(HEADER_BYTES)
    if place.files.read(fd, [head, target], 0) != HEADER_BYTES + len(target):
        return FailCause.WRONG_SIZE
    header = check_header(head, place.identity, key)
    if isinstance(header, FailCause):
        return header
    if header.payload_bytes != len(target):
        return FailCause.WRONG_SIZE
    return check_payload(header, place.identity, target, verify=place.verify)


def remove_record(folders: Folders, victim: Victim) -> int | None:
    """Remove a file, if it is still the version that must go. Returns None, or the bytes that it still takes.

    What is not a plain file is not ours and counts nothing.
    """
    place = folders.place
    file = file_name(split_name(place, victim.name)[1])
    try:
        folder = folders.of(victim.name)
        status = place.files.stat(file, folder)
    except FileNotFoundError:
        return None
    except OSError:
        return victim.allocated
    if not stat.S_ISREG(status.mode):
        return None
    if victim.inode is None or victim.inode == status.inode:
        try:
            place.files.unlink(file, folder)
        except FileNotFoundError:
            return None
        except OSError:
            pass
        else:
            return None
    return place.footprint(status.size, status.allocated)


def sync_records(folders: Folders, names: list[Name], *, contents: bool) -> bool:
    """Make files (`contents`) and the directories that name them durable; files that are gone need nothing."""
    place = folders.place
    directories: set[int] = {place.root_fd}
    ok = True
    for name in names:
        namespace, key = split_name(place, name)
        try:
            folder = folders.of(name)
            directories |= {folder, folders.at(namespace.hex())}
            if contents:
                fd = place.files.open(file_name(key), READ_FLAGS, dir_fd=folder)
                try:
                    place.files.fsync(fd)
                finally:
                    close_quietly(place.files, fd)
        except OSError as error:
            ok = ok and cause_of(error) is FailCause.GONE and not place.lost()
    for directory in directories:
        try:
            place.files.fsync(directory)
        except OSError:
            ok = False
    return ok
