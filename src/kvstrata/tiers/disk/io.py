"""All file calls of the disk tier, behind one small interface.

`SystemFiles` is the operating system. `kvstrata.testing.simfs.SimFiles` is a simulated one with power cuts and faults.
Paths appear only in `open_directory`; everything else is relative to that handle and never follows a link. Errors are
`OSError`; `cause_of` maps them to the closed set of causes in one place.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvstrata.tiers.disk.calls import Call, CallQueue, Memory
from kvstrata.tiers.disk.format import BLOCK
from kvstrata.tiers.disk.kernel_queue import open_kernel_queue
from kvstrata.types import FailCause

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


@dataclass(frozen=True, slots=True)
class FileStat:
    """Size and allocated bytes of one file."""

    size: int
    allocated: int


class Files(Protocol):
    """What the disk tier asks of a file system. Handles are small integers."""

    def open_directory(self, path: str, *, create: bool) -> int:
        """A handle of the directory; `create` makes it (and its parents) with mode 0700."""
        ...

    def identity(self, path: str) -> tuple[int, int] | None:
        """Device and inode of what is at `path` now, None if nothing is."""
        ...

    def handle_identity(self, handle: int) -> tuple[int, int]:
        """Device and inode behind an open handle."""
        ...

    def names(self, directory: int) -> list[str]:
        """Names of the regular files in the directory."""
        ...

    def open(self, directory: int, name: str, *, write: bool, create: bool = False, direct: bool = False) -> int:
        """Open a file, never through a link; with `direct` past the page cache, or `OSError` EINVAL."""
        ...

    def close(self, handle: int) -> None:
        """Release a handle."""
        ...

    def pwritev(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write; returns the bytes written, which may be fewer."""
        ...

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read; returns the bytes read, which may be fewer."""
        ...

    def allocate(self, handle: int, size: int) -> None:
        """Give the file `size` bytes with room on the device behind each of them, or `OSError` ENOSPC."""
        ...

    def truncate(self, handle: int, size: int) -> None:
        """Set the size."""
        ...

    def sync(self, handle: int) -> None:
        """Make written bytes durable."""
        ...

    def sync_directory(self, directory: int) -> None:
        """Make names durable."""
        ...

    def rename(self, directory: int, old: str, new: str) -> None:
        """Replace `new` by `old` in one step."""
        ...

    def unlink(self, directory: int, name: str) -> None:
        """Remove a name; its absence is no error."""
        ...

    def stat(self, directory: int, name: str) -> FileStat | None:
        """Size and allocated bytes, None if there is no such file."""
        ...

    def free_bytes(self, directory: int) -> int:
        """Bytes that this user may still allocate on the device."""
        ...

    def lock(self, handle: int) -> bool:
        """Take the kernel lock of an open file for as long as it is open; False if another holder has it."""
        ...

    def random_bytes(self, count: int) -> bytes:
        """Bytes that nobody can guess."""
        ...

    def pause(self) -> None:
        """Let another thread go on for a moment."""
        ...

    def call_queue(self, depth: int) -> CallQueue | None:
        """A queue for `depth` calls at once; None where there is no such thing."""
        ...


class SystemFiles:
    """The operating system's file calls."""

    def open_directory(self, path: str, *, create: bool) -> int:
        """See `Files`."""
        if create:
            os.makedirs(path, mode=DIRECTORY_MODE, exist_ok=True)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def identity(self, path: str) -> tuple[int, int] | None:
        """See `Files`."""
        try:
            found = os.stat(path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def handle_identity(self, handle: int) -> tuple[int, int]:
        """See `Files`."""
        found = os.fstat(handle)
        return found.st_dev, found.st_ino

    def names(self, directory: int) -> list[str]:
        """See `Files`."""
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]

    def open(self, directory: int, name: str, *, write: bool, create: bool = False, direct: bool = False) -> int:
        """See `Files`."""
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
        if create:
            flags |= os.O_CREAT
        if direct:
            flags |= os.O_DIRECT
        handle = os.open(name, flags, FILE_MODE, dir_fd=directory)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, "not a regular file", name)
        return handle

    def close(self, handle: int) -> None:
        """See `Files`."""
        os.close(handle)

    def pwritev(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `Files`."""
        return os.pwritev(handle, buffers, offset)

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `Files`."""
        return os.preadv(handle, buffers, offset)

    def allocate(self, handle: int, size: int) -> None:
        """See `Files`."""
        os.posix_fallocate(handle, 0, size)

    def truncate(self, handle: int, size: int) -> None:
        """See `Files`."""
        os.ftruncate(handle, size)

    def sync(self, handle: int) -> None:
        """See `Files`."""
        os.fdatasync(handle)

    def sync_directory(self, directory: int) -> None:
        """See `Files`."""
        os.fsync(directory)

    def rename(self, directory: int, old: str, new: str) -> None:
        """See `Files`."""
        os.rename(old, new, src_dir_fd=directory, dst_dir_fd=directory)

    def unlink(self, directory: int, name: str) -> None:
        """See `Files`."""
        try:
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            return

    def stat(self, directory: int, name: str) -> FileStat | None:
        """See `Files`."""
        try:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return FileStat(found.st_size, found.st_blocks * 512)

    def free_bytes(self, directory: int) -> int:
        """See `Files`."""
        found = os.fstatvfs(directory)
        return found.f_bavail * found.f_frsize

    def lock(self, handle: int) -> bool:
        """See `Files`."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def random_bytes(self, count: int) -> bytes:
        """See `Files`."""
        return os.urandom(count)

    def pause(self) -> None:
        """See `Files`."""
        select.select([], [], [], 0.0005)

    def call_queue(self, depth: int) -> CallQueue | None:
        """See `Files`: the kernel's own."""
        return open_kernel_queue(depth)


def cause_of(error: OSError) -> FailCause:
    """The cause that a failed file call counts as."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FailCause.NO_SPACE
    return FailCause.IO_ERROR


def aligned_buffer(size: int, unit: int = BLOCK) -> memoryview:
    """Private zeroed memory whose address is a multiple of `unit`, for calls that bypass the page cache."""
    raw = np.zeros(size + unit, np.uint8)
    skip = -raw.ctypes.data % unit
    return raw.data[skip : skip + size]


def address_of(region: memoryview) -> int:
    """Where the memory of a buffer begins."""
    return int(np.frombuffer(region, np.uint8).ctypes.data) if len(region) else 0


def memory_of(view: memoryview) -> Memory:
    """The memory of a buffer."""
    return Memory(view, address_of(view))


def aligned_memory(size: int) -> Memory:
    """The same as `aligned_buffer`, with its address."""
    return memory_of(aligned_buffer(size))


def write_all(files: Files, handle: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write every byte; a call that comes back short is continued. A file system that takes nothing is ENOSPC."""
    rest = list(buffers)
    while rest:
        done = files.pwritev(handle, rest, offset)
        if done <= 0:
            raise OSError(errno.ENOSPC, "a write was not taken")
        offset += done
        rest = _skip(rest, done)


def read_all(files: Files, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Read until the buffers are full or the file ends; returns the bytes read."""
    rest = list(buffers)
    total = 0
    while rest:
        done = files.preadv(handle, rest, offset + total)
        if done <= 0:
            return total
        total += done
        rest = _skip(rest, done)
        if rest and total % 512:
            return total  # the file ends inside a sector
    return total


def _skip(buffers: list[memoryview], count: int) -> list[memoryview]:
    index = 0
    while index < len(buffers) and count >= len(buffers[index]):
        count -= len(buffers[index])
        index += 1
    rest = buffers[index:]
    if count and rest:
        rest[0] = rest[0][count:]
    return rest


def perform(files: Files, call: Call, piece: int) -> int:
    """Carry out a call on the spot, at most `piece` bytes at a time; returns the bytes that were read or written."""
    for begin in range(0, call.size, piece):
        size = min(piece, call.size - begin)
        buffers = call.buffers(begin, size)
        if call.write:
            write_all(files, call.handle, buffers, call.offset + begin)
        else:
            got = read_all(files, call.handle, buffers, call.offset + begin)
            if got < size:
                return begin + got
    return call.size
