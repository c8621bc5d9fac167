"""Takes hold of the fs tier's directory: checks it, locks it, sweeps what dead owners left half written."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass

from kvstrata.tiers.common.record import Identity
from kvstrata.tiers.fs.files import FileSystem, close_quietly
from kvstrata.tiers.fs.find import list_folders
from kvstrata.tiers.fs.place import (
    DIRECTORY_FLAGS,
    LOCK_FILE,
    PARTS,
    TEMPORARY,
    TEMPORARY_NAME,
    Place,
    open_folder,
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the directory cannot be used. `permanent`: nobody but the operator can change it."""

    text: str
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class Attached:
    """The open place, the directories to scan, and temporary files that could not be removed."""

    place: Place
    folders: list[tuple[str, str]]
    strays: dict[str, int]


def attach(files: FileSystem, path: str, identity: Identity, *, verify: bool) -> Attached | Refusal:
    """Open, lock and sweep the directory at `path`; it is made if only its last part is missing."""
    with contextlib.ExitStack() as undo:
        try:
            root_fd = _open_root(files, path)
            undo.callback(close_quietly, files, root_fd)
            refusal = _check_root(files, root_fd, path)
            if refusal is not None:
                return refusal
            lock_fd = _lock(files, root_fd)
            if lock_fd is None:
                return Refusal(f"{path} is in use by another engine")
            undo.callback(close_quietly, files, lock_fd)
            tmp_fd = open_folder(files, TEMPORARY, root_fd, make=True)
            undo.callback(close_quietly, files, tmp_fd)
            place = Place(
                files=files,
                path=path,
                identity=identity,
                verify=verify,
                root_fd=root_fd,
                lock_fd=lock_fd,
                tmp_fd=tmp_fd,
                block_bytes=max(files.device(root_fd).block_bytes, 512),
                owner=f"{os.getpid()}-{os.urandom(4).hex()}",
            )
            attached = Attached(place, list_folders(place), _sweep(place))
        except OSError as error:
            return Refusal(f"{path} cannot be used: {error.strerror or error}", permanent=True)
        undo.pop_all()
        return attached


def _open_root(files: FileSystem, path: str) -> int:
    """The root may be a link: the operator named it."""
    flags = DIRECTORY_FLAGS & ~os.O_NOFOLLOW
    try:
        return files.open(path, flags)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            files.mkdir(path, 0o700)
    return files.open(path, flags)


def _check_root(files: FileSystem, root_fd: int, path: str) -> Refusal | None:
    if files.fstat(root_fd).mode & stat.S_IWOTH:
        return Refusal(f"{path} may be written by everybody; chunks in it cannot be trusted", permanent=True)
    if PARTS in files.names(root_fd):
        return Refusal(
            f"{path} is shared by parts; this engine needs a part in it, or another directory", permanent=True
        )
    return None


def _lock(files: FileSystem, root_fd: int) -> int | None:
    """The locked lock file, or None if another engine has it. The kernel frees it when its owner dies."""
    fd = files.open(LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, root_fd)
    try:
        # Somebody may have removed the name meanwhile: a lock on a nameless file keeps nobody out.
        if files.try_lock(fd) and files.stat(LOCK_FILE, root_fd).inode == files.fstat(fd).inode:
            return fd
    except OSError:
        close_quietly(files, fd)
        raise
    close_quietly(files, fd)
    return None


def _sweep(place: Place) -> dict[str, int]:
    """Remove temporary files. Their owners are gone: they held the lock that is ours now."""
    strays = {}
    for name in place.files.names(place.tmp_fd):
        if not TEMPORARY_NAME.fullmatch(name):
            continue
        try:
            status = place.files.stat(name, place.tmp_fd)
            if not stat.S_ISREG(status.mode):
                continue
            strays[name] = place.footprint(status.size, status.allocated)
            place.files.unlink(name, place.tmp_fd)
            del strays[name]
        except FileNotFoundError:
            strays.pop(name, None)
        except OSError:
            continue  # what cannot be removed still counts
    return strays
