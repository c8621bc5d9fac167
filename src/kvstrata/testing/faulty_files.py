"""A file system for the fs tier that fails when the test says so, and is the real one otherwise."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstrata.tiers.fs.files import DeviceStatus, FileStatus, RealFileSystem


@dataclass(slots=True, eq=False)
class Fault:
    """Calls named in `calls` fail with `code`, `times` times (None: until it is cleared), if `when` agrees.

    `when` is given the name that the call uses, or "" for calls on descriptors.
    """

    calls: frozenset[str]
    code: int
    times: int | None = None
    when: Callable[[str], bool] | None = None


class FaultyFileSystem(RealFileSystem):
    """Real files with faults. `log` records (call, name) of every call, `free_bytes`, when set, is
    asked for the device's free space."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.log: list[tuple[str, str]] = []
        self.free_bytes: Callable[[], int] | None = None

    def fail(
        self, *calls: str, code: int = errno.EIO, times: int | None = None, when: Callable[[str], bool] | None = None
    ) -> Fault:
        """From now on these calls fail; returns the fault, for `clear`."""
        fault = Fault(frozenset(calls), code, times, when)
        self.faults.append(fault)
        return fault

    def clear(self, fault: Fault | None = None) -> None:
        """End one fault, or all."""
        self.faults = [] if fault is None else [other for other in self.faults if other is not fault]

    def _enter(self, call: str, name: str = "") -> None:
        self.log.append((call, name))
        for fault in self.faults:
            if call in fault.calls and fault.times != 0 and (fault.when is None or fault.when(name)):
                if fault.times is not None:
                    fault.times -= 1
                raise OSError(fault.code, os.strerror(fault.code), name)

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        """See `FileSystem`."""
        self._enter("open", name)
        return super().open(name, flags, mode, dir_fd)

    def close(self, fd: int) -> None:
        """See `FileSystem`. The descriptor is given back also when the call fails, as Linux does."""
        super().close(fd)
        self._enter("close")

    def read(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        """See `FileSystem`."""
        self._enter("read")
        return super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        """See `FileSystem`."""
        self._enter("write")
        super().write(fd, buffers, offset)

    def fstat(self, fd: int) -> FileStatus:
        """See `FileSystem`."""
        self._enter("fstat")
        return super().fstat(fd)

    def stat(self, name: str, dir_fd: int | None = None, follow: bool = False) -> FileStatus:
        """See `FileSystem`."""
        self._enter("stat", name)
        return super().stat(name, dir_fd, follow)

    def rename(self, source: str, target: str, source_dir: int, target_dir: int) -> None:
        """See `FileSystem`."""
        self._enter("rename", target)
        super().rename(source, target, source_dir, target_dir)

    def link(self, source: str, target: str, source_dir: int, target_dir: int) -> None:
        """See `FileSystem`."""
        self._enter("link", target)
        super().link(source, target, source_dir, target_dir)

    def unlink(self, name: str, dir_fd: int) -> None:
        """See `FileSystem`."""
        self._enter("unlink", name)
        super().unlink(name, dir_fd)

    def mkdir(self, name: str, mode: int, dir_fd: int | None = None) -> None:
        """See `FileSystem`."""
        self._enter("mkdir", name)
        super().mkdir(name, mode, dir_fd)

    def set_mtime(self, target: int | str, mtime_ns: int, dir_fd: int | None = None) -> None:
        """See `FileSystem`."""
        self._enter("set_mtime", target if isinstance(target, str) else "")
        super().set_mtime(target, mtime_ns, dir_fd)

    def fsync(self, fd: int) -> None:
        """See `FileSystem`."""
        self._enter("fsync")
        super().fsync(fd)

    def names(self, fd: int) -> list[str]:
        """See `FileSystem`; in a fixed order, so that tests repeat."""
        self._enter("names")
        return sorted(super().names(fd))

    def device(self, fd: int) -> DeviceStatus:
        """See `FileSystem`."""
        self._enter("device")
        status = super().device(fd)
        return status if self.free_bytes is None else DeviceStatus(status.block_bytes, self.free_bytes())

    def try_lock(self, fd: int) -> bool:
        """See `FileSystem`."""
        self._enter("try_lock")
        return super().try_lock(fd)
