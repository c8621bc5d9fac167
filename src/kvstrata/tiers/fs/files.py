"""Every file call that the fs tier makes, as one small interface that tests replace, and what an error of it means."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstrata.types import FailCause

_CAUSES = {
    errno.ENOENT: FailCause.GONE,
    errno.ENOSPC: FailCause.NO_SPACE,
    errno.EDQUOT: FailCause.NO_SPACE,
    errno.EFBIG: FailCause.NO_SPACE,
    errno.EACCES: FailCause.REFUSED,
    errno.EPERM: FailCause.REFUSED,
    errno.EROFS: FailCause.REFUSED,
    errno.ETIMEDOUT: FailCause.TIMEOUT,
    errno.ELOOP: FailCause.FOREIGN,  # a link where a file of ours should be
    errno.EISDIR: FailCause.FOREIGN,
}


def cause_of(error: OSError) -> FailCause:
    """What an error of a file call means. Everything not listed may pass: the data is kept (EIO, ESTALE, ...)."""
    return _CAUSES.get(error.errno or 0, FailCause.IO_ERROR)


@dataclass(frozen=True, slots=True)
class FileStatus:
    """What the tier needs to know of a file."""

    mode: int
    inode: int
    device: int
    links: int
    size: int
    allocated: int
    """Bytes that the file system gave it: blocks x 512."""
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """Space of the file system."""

    block_bytes: int
    free_bytes: int


class FileSystem(Protocol):
    """File calls relative to directory handles. All raise `OSError` as the operating system does."""

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        """A file descriptor; always close-on-exec."""
        ...

    def close(self, fd: int) -> None:
        """Give a descriptor back; a deferred write error may come here."""
        ...

    def read(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        """Fill `buffers` from `offset` on; returns the bytes read, fewer only at the end of the file."""
        ...

    def write(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        """Write all of `buffers` from `offset` on."""
        ...

    def fstat(self, fd: int) -> FileStatus:
        """Status of an open file or directory."""
        ...

    def stat(self, name: str, dir_fd: int | None = None, follow: bool = False) -> FileStatus:
        """Status of a name, of the link itself unless `follow`."""
        ...

    def rename(self, source: str, target: str, source_dir: int, target_dir: int) -> None:
        """Move a file over another, atomically."""
        ...

    def link(self, source: str, target: str, source_dir: int, target_dir: int) -> None:
        """Give a file a second name, atomically; fails if that name is taken."""
        ...

    def set_access(self, fd: int, mode: int, group: int | None) -> None:
        """Set the permission bits, and the group if one is given, of an open file or directory."""
        ...

    def unlink(self, name: str, dir_fd: int) -> None:
        """Remove a file."""
        ...

    def mkdir(self, name: str, mode: int, dir_fd: int | None = None) -> None:
        """Make one directory."""
        ...

    def rmdir(self, name: str, dir_fd: int) -> None:
        """Remove an empty directory."""
        ...

    def set_mtime(self, target: int | str, mtime_ns: int, dir_fd: int | None = None) -> None:
        """Set access and modification time of a descriptor, or of a name."""
        ...

    def fsync(self, fd: int) -> None:
        """Make a file, or the names in a directory, durable."""
        ...

    def names(self, fd: int) -> list[str]:
        """The names in a directory."""
        ...

    def device(self, fd: int) -> DeviceStatus:
        """Space of the file system that `fd` lies on."""
        ...

    def try_lock(self, fd: int) -> bool:
        """Take the exclusive kernel lock of an open file; False if someone else has it."""
        ...


class RealFileSystem:
    """The operating system."""

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        """See `FileSystem`."""
        return os.open(name, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        """See `FileSystem`."""
        os.close(fd)

    def read(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        """See `FileSystem`."""
        total = 0
        views: list[bytearray | memoryview] = list(buffers)
        while views:
            count = os.preadv(fd, views, offset + total)
            if count == 0:
                break
            total += count
            views = _rest(views, count)
        return total

    def write(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        """See `FileSystem`."""
        total = 0
        views: list[bytes | memoryview] = list(buffers)
        while views:
            count = os.pwritev(fd, views, offset + total)
            total += count
            views = _rest(views, count)

    def fstat(self, fd: int) -> FileStatus:
        """See `FileSystem`."""
        return _status(os.fstat(fd))

    def stat(self, name: str, dir_fd: int | None = None, follow: bool = False) -> FileStatus:
        """See `FileSystem`."""
        return _status(os.stat(name, dir_fd=dir_fd, follow_symlinks=follow))

    def rename(self, source: str, target: str, source_dir: int, target_dir: int) -> None:
        """See `FileSystem`."""
        os.rename(source, target, src_dir_fd=source_dir, dst_dir_fd=target_dir)

    def link(self, source: str, target: str, source_dir: int, target_dir: int) -> None:
        """See `FileSystem`."""
        os.link(source, target, src_dir_fd=source_dir, dst_dir_fd=target_dir, follow_symlinks=False)

    def set_access(self, fd: int, mode: int, group: int | None) -> None:
        """See `FileSystem`."""
        if group is not None:
            os.fchown(fd, -1, group)
        os.fchmod(fd, mode)

    def unlink(self, name: str, dir_fd: int) -> None:
        """See `FileSystem`."""
        os.unlink(name, dir_fd=dir_fd)

    def mkdir(self, name: str, mode: int, dir_fd: int | None = None) -> None:
        """See `FileSystem`."""
        os.mkdir(name, mode, dir_fd=dir_fd)

    def rmdir(self, name: str, dir_fd: int) -> None:
        """See `FileSystem`."""
        os.rmdir(name, dir_fd=dir_fd)

    def set_mtime(self, target: int | str, mtime_ns: int, dir_fd: int | None = None) -> None:
        """See `FileSystem`."""
        if isinstance(target, int):
            os.utime(target, ns=(mtime_ns, mtime_ns))
        else:
            os.utime(target, ns=(mtime_ns, mtime_ns), dir_fd=dir_fd, follow_symlinks=False)

    def fsync(self, fd: int) -> None:
        """See `FileSystem`."""
        os.fsync(fd)

    def names(self, fd: int) -> list[str]:
        """See `FileSystem`."""
        return os.listdir(fd)

    def device(self, fd: int) -> DeviceStatus:
        """See `FileSystem`."""
        status = os.statvfs(fd)
        return DeviceStatus(status.f_frsize or status.f_bsize, status.f_bavail * status.f_frsize)

    def try_lock(self, fd: int) -> bool:
        """See `FileSystem`."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use the files besides their owner: permission bits of files, and a group. Never the world."""

    mode: int = 0o600
    group: int | None = None

    @property
    def folder_mode(self) -> int:
        """Permission bits of directories: who may read may enter."""
        return self.mode | (self.mode & 0o440) >> 2

    def give(self, files: FileSystem, fd: int, *, folder: bool) -> None:
        """Set what the process's mask, or its own group, may have kept from being so. Raises `OSError`."""
        if self != PRIVATE:
            files.set_access(fd, self.folder_mode if folder else self.mode, self.group)


PRIVATE = Access()


def close_quietly(files: FileSystem, fd: int) -> None:
    """Close a descriptor whose errors say nothing more."""
    with contextlib.suppress(OSError):
        files.close(fd)


def _rest(views: list, count: int) -> list:  # type: ignore[type-arg]  # of any buffers
    """What is left of `views` after `count` bytes; empty buffers fall away."""
    left = []
    for view in views:
        if count >= len(view):
            count -= len(view)
            continue
        left.append(memoryview(view)[count:])
        count = 0
    return left


def _status(status: os.stat_result) -> FileStatus:
    return FileStatus(
        mode=status.st_mode,
        inode=status.st_ino,
        device=status.st_dev,
        links=status.st_nlink,
        size=status.st_size,
        allocated=status.st_blocks * 512,
        mtime_ns=status.st_mtime_ns,
    )
