"""Claims of parts as small files of a shared directory."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from typing import Protocol, TypeVar

from kvstrata.tiers.common.claims import PlaceError
from kvstrata.tiers.fs.files import Access, FileSystem, close_quietly
from kvstrata.tiers.fs.place import DIRECTORY_FLAGS, READ_FLAGS, WRITE_FLAGS

T = TypeVar("T")

MAX_ENTRY_BYTES = 4096
HIDDEN = "."
"""Names of entries that are being made begin with it."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_PERMANENT = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG)


def place_error(error: OSError, path: str, *, permanent: bool = False) -> PlaceError:
    """What an error of the directory says to the operator."""
    text = f"{path} cannot be used: {error.strerror or error}"
    return PlaceError(text, permanent=permanent and error.errno in _PERMANENT)


def list_names(files: FileSystem, folder: int) -> list[str]:
    """The names in an open directory, through a handle of its own: two workers that list by one share its position."""
    fd = files.open(".", DIRECTORY_FLAGS, dir_fd=folder)
    try:
        return files.names(fd)
    finally:
        close_quietly(files, fd)


class Directory(Protocol):
    """Who has the directory open."""

    @property
    def files(self) -> FileSystem:
        """File calls."""
        ...

    @property
    def path(self) -> str:
        """For messages."""
        ...

    @property
    def access(self) -> Access:
        """Who else may use the entries."""
        ...

    def claims_fd(self) -> int:
        """The open directory of the claims; opened again if it was replaced. Raises `OSError`."""
        ...


class DirectoryClaims:
    """A `ClaimPlace` (common/claims.py) without a lock.

    An entry is written under another name first and then linked to its own: a link is made once, whole, also over NFS.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._names = itertools.count()

    def _call(self, call: Callable[[FileSystem, int], T]) -> T:
        directory = self._directory
        try:
            return call(directory.files, directory.claims_fd())
        except OSError as error:
            raise place_error(error, directory.path) from None

    def _write(self, files: FileSystem, folder: int, data: bytes) -> str:
        """A hidden entry with this content. Raises `OSError`."""
        name = f"{HIDDEN}{os.getpid()}-{os.urandom(4).hex()}-{next(self._names)}"
        fd = files.open(name, WRITE_FLAGS, self._directory.access.mode, folder)
        try:
            self._directory.access.give(files, fd, folder=False)
            files.write(fd, [data], 0)
            files.fsync(fd)
        finally:
            files.close(fd)
        return name

    def create(self, name: str, data: bytes) -> bool:
        """Link a written file to the name."""

        def call(files: FileSystem, folder: int) -> bool:
            hidden = self._write(files, folder, data)
            try:
                files.link(hidden, name, folder, folder)
            except FileExistsError:
                # The server may have made the link and lost the answer.
                return files.stat(name, folder).inode == files.stat(hidden, folder).inode
            except OSError as error:
                if error.errno in _NO_LINKS:
                    return self._create_without_links(files, folder, name, data)
                raise
            finally:
                files.unlink(hidden, folder)
            return True

        return self._call(call)

    def _create_without_links(self, files: FileSystem, folder: int, name: str, data: bytes) -> bool:
        """For file systems without links: the name is made first, and means nothing until it has its content."""
        try:
            fd = files.open(name, WRITE_FLAGS, self._directory.access.mode, folder)
        except FileExistsError:
            return False
        try:
            self._directory.access.give(files, fd, folder=False)
            files.write(fd, [data], 0)
            files.fsync(fd)
        finally:
            files.close(fd)
        return True

    def replace(self, name: str, data: bytes) -> None:
        """Move a written file over the name."""
        self._call(lambda files, folder: files.rename(self._write(files, folder, data), name, folder, folder))

    def read(self, name: str) -> bytes | None:
        """Read; an entry without content is being made."""

        def call(files: FileSystem, folder: int) -> bytes | None:
            try:
                fd = files.open(name, READ_FLAGS, dir_fd=folder)
            except FileNotFoundError:
                return None
            try:
                buffer = bytearray(MAX_ENTRY_BYTES)
                return bytes(buffer[: files.read(fd, [buffer], 0)])
            finally:
                close_quietly(files, fd)

        data = self._call(call)
        if data == b"":
            raise PlaceError(f"{self._directory.path}: the entry {name} is being made")
        return data

    def delete(self, name: str) -> None:
        """Unlink."""

        def call(files: FileSystem, folder: int) -> None:
            try:
                files.unlink(name, folder)
            except FileNotFoundError:
                return

        self._call(call)

    def names(self) -> list[str]:
        """List."""
        return self._call(lambda files, folder: [name for name in list_names(files, folder) if name[:1] != HIDDEN])
