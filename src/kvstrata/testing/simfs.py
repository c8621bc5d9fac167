"""A simulated file system behind the disk tier's file calls: power cuts, faults, a full device, a lost directory.

    SimDisk     the device and its directories; outlives processes and power cuts
    SimFiles    one process's view of it (`kvstrata.tiers.disk.io.Files`); `kill` ends the process
    FaultyFiles wraps any `Files` and fails chosen calls, for real directories too

What was written but not synced sits in the device's volatile cache: `SimDisk.power_cut` keeps a random part of it, in
random order, torn at sectors. Names are journaled: a random first part of the unsynced name changes survives.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstrata.errors import InternalError
from kvstrata.tiers.disk.calls import Call, CallQueue
from kvstrata.tiers.disk.io import Files, FileStat, address_of

SECTOR = 512
_BLOCK = 4096


def _error(code: int, what: str) -> OSError:
    return OSError(code, f"simulated: {what}")


@dataclass(slots=True)
class PowerCuts:
    """What power cuts did to writes that were not synced."""

    kept: int = 0
    dropped: int = 0
    torn: int = 0
    """Some sectors of the write are there."""
    reordered: int = 0
    """Something of the write is there, although an earlier one to the same file is lost or torn."""


@dataclass(eq=False)
class _Inode:
    number: int
    data: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    unsynced: list[tuple[int, bytes]] = field(default_factory=list)
    locked_by: int | None = None

    def write(self, offset: int, payload: bytes) -> None:
        end = offset + len(payload)
        if end > len(self.data):
            self.data.extend(bytes(end - len(self.data)))
        self.data[offset:end] = payload
        self.unsynced.append((offset, payload))

    def sync(self) -> None:
        self.durable = bytearray(self.data)
        self.unsynced.clear()

    def cut(self, rng: np.random.Generator, done: PowerCuts) -> None:
        """Lose power: a random part of what was not synced is there afterwards."""
        if len(self.data) > len(self.durable):
            self.durable.extend(bytes(len(self.data) - len(self.durable)))
        fates = [2] * len(self.unsynced)
        for index in rng.permutation(len(self.unsynced)).tolist():
            offset, payload = self.unsynced[index]
            match fate := int(rng.integers(3)):
                case 0:
                    self.durable[offset : offset + len(payload)] = payload
                case 1:
                    self._tear(offset, payload, rng)
            fates[index] = fate
        done.kept += fates.count(0)
        done.torn += fates.count(1)
        done.dropped += fates.count(2)
        hurt = next((index for index, fate in enumerate(fates) if fate), len(fates))
        done.reordered += sum(fate != 2 for fate in fates[hurt + 1 :])
        self.data = bytearray(self.durable)
        self.unsynced.clear()
        self.locked_by = None

    def _tear(self, offset: int, payload: bytes, rng: np.random.Generator) -> None:
        for start in range(0, len(payload), SECTOR):
            if rng.integers(2):
                piece = payload[start : start + SECTOR]
                self.durable[offset + start : offset + start + len(piece)] = piece

    @property
    def allocated(self) -> int:
        return -(-len(self.data) // _BLOCK) * _BLOCK


@dataclass(eq=False)
class _Directory:
    number: int
    names: dict[str, _Inode] = field(default_factory=dict)
    durable: dict[str, _Inode] = field(default_factory=dict)
    journal: list[Callable[[dict[str, _Inode]], None]] = field(default_factory=list)

    def change(self, what: Callable[[dict[str, _Inode]], None]) -> None:
        what(self.names)
        self.journal.append(what)

    def sync(self) -> None:
        self.durable = dict(self.names)
        self.journal.clear()

    def cut(self, rng: np.random.Generator, done: PowerCuts) -> None:
        kept = int(rng.integers(len(self.journal) + 1))
        for what in self.journal[:kept]:
            what(self.durable)
        self.journal.clear()
        self.names = dict(self.durable)
        for inode in self.names.values():
            inode.cut(rng, done)


class SimDisk:
    """A device. `capacity` bytes, of which `others` are taken by other programs."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.capacity = capacity
        self.others = 0
        self.read_only = False
        self.vanished = False
        self.direct = True
        self.directories: dict[str, _Directory] = {}
        self.writes = 0
        self.cuts = PowerCuts()
        self._numbers = 0

    def number(self) -> int:
        """A new inode number."""
        self._numbers += 1
        return self._numbers

    @property
    def free(self) -> int:
        """Bytes that can still be allocated."""
        used = sum(inode.allocated for each in self.directories.values() for inode in each.names.values())
        return max(self.capacity - self.others - used, 0)

    def power_cut(self, seed: int) -> None:
        """Lose power; every process is gone, and with it what the device had not made durable (or not all of it)."""
        rng = np.random.default_rng(seed)
        for directory in self.directories.values():
            directory.cut(rng, self.cuts)

    def file(self, path: str, name: str) -> bytearray:
        """The bytes of a file, to look at or to alter behind everybody's back."""
        return self.directories[path].names[name].data

    def allocated(self, path: str) -> int:
        """Bytes that all files of a directory take."""
        return sum(inode.allocated for inode in self.directories[path].names.values())


class SimFiles:
    """The file calls of one simulated process."""

    def __init__(self, disk: SimDisk, seed: int = 0) -> None:
        self.disk = disk
        self._rng = np.random.default_rng(seed)
        self._open: dict[int, tuple[_Directory | _Inode, bool, bool]] = {}
        self._next = 3

    def kill(self) -> None:
        """The process dies: its handles and locks are gone, what it wrote stays."""
        for handle in list(self._open):
            self.close(handle)

    def _enter(self, what: _Directory | _Inode, write: bool, direct: bool) -> int:
        self._next += 1
        self._open[self._next] = (what, write, direct)
        return self._next

    def _directory(self, handle: int) -> _Directory:
        self._check_device()
        what = self._open[handle][0]
        if not isinstance(what, _Directory):
            raise _error(errno.ENOTDIR, "not a directory")
        return what

    def _inode(self, handle: int) -> _Inode:
        self._check_device()
        if handle not in self._open:
            raise _error(errno.EBADF, "not open")
        what = self._open[handle][0]
        if not isinstance(what, _Inode):
            raise _error(errno.EISDIR, "a directory")
        return what

    def _check_device(self, *, write: bool = False) -> None:
        if self.disk.vanished:
            raise _error(errno.EIO, "the device is gone")
        if write and self.disk.read_only:
            raise _error(errno.EROFS, "read-only file system")

    def open_directory(self, path: str, *, create: bool) -> int:
        """See `Files`."""
        self._check_device()
        found = self.disk.directories.get(path)
        if found is None:
            if not create:
                raise _error(errno.ENOENT, path)
            self._check_device(write=True)
            found = self.disk.directories[path] = _Directory(self.disk.number())
        return self._enter(found, False, False)

    def identity(self, path: str) -> tuple[int, int] | None:
        """See `Files`."""
        found = self.disk.directories.get(path)
        return None if found is None or self.disk.vanished else (1, found.number)

    def handle_identity(self, handle: int) -> tuple[int, int]:
        """See `Files`."""
        return 1, self._open[handle][0].number

    def names(self, directory: int) -> list[str]:
        """See `Files`."""
        return list(self._directory(directory).names)

    def open(self, directory: int, name: str, *, write: bool, create: bool = False, direct: bool = False) -> int:
        """See `Files`."""
        where = self._directory(directory)
        if direct and not self.disk.direct:
            raise _error(errno.EINVAL, "no direct I/O here")
        self._check_device(write=write)
        inode = where.names.get(name)
        if inode is None:
            if not create:
                raise FileNotFoundError(errno.ENOENT, name)
            inode = made = _Inode(self.disk.number())
            where.change(lambda names: names.__setitem__(name, made))
        return self._enter(inode, write, direct)

    def close(self, handle: int) -> None:
        """See `Files`."""
        what, _, _ = self._open.pop(handle)
        if isinstance(what, _Inode) and what.locked_by == id(self) * 1_000_003 + handle:
            what.locked_by = None

    def pwritev(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `Files`."""
        inode = self._inode(handle)
        self._check_device(write=True)
        self._check_aligned(handle, buffers, offset)
        payload = b"".join(buffers)
        grows = max(offset + len(payload) - len(inode.data), 0)
        if grows > self.disk.free:
            raise _error(errno.ENOSPC, "the device is full")
        self.disk.writes += 1
        inode.write(offset, payload)
        return len(payload)

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `Files`."""
        inode = self._inode(handle)
        self._check_aligned(handle, buffers, offset)
        total = 0
        for buffer in buffers:
            piece = inode.data[offset + total : offset + total + len(buffer)]
            buffer[: len(piece)] = piece
            total += len(piece)
            if len(piece) < len(buffer):
                break
        return total

    def _check_aligned(self, handle: int, buffers: Sequence[memoryview], offset: int) -> None:
        if self._open[handle][2]:
            odd = offset % SECTOR or any(len(each) % SECTOR or address_of(each) % SECTOR for each in buffers)
            if odd:
                raise _error(errno.EINVAL, "not aligned for direct I/O")

    def allocate(self, handle: int, size: int) -> None:
        """See `Files`."""
        inode = self._inode(handle)
        self._check_device(write=True)
        grows = size - len(inode.data)
        if grows > self.disk.free:
            raise _error(errno.ENOSPC, "the device is full")
        if grows > 0:
            inode.data.extend(bytes(grows))

    def truncate(self, handle: int, size: int) -> None:
        """See `Files`."""
        inode = self._inode(handle)
        self._check_device(write=True)
        del inode.data[size:]
        inode.data.extend(bytes(size - len(inode.data)))

    def sync(self, handle: int) -> None:
        """See `Files`."""
        inode = self._inode(handle)
        self._check_device(write=True)
        inode.sync()

    def sync_directory(self, directory: int) -> None:
        """See `Files`."""
        self._directory(directory).sync()

    def rename(self, directory: int, old: str, new: str) -> None:
        """See `Files`."""
        where = self._directory(directory)
        self._check_device(write=True)
        if old not in where.names:
            raise FileNotFoundError(errno.ENOENT, old)

        def move(names: dict[str, _Inode]) -> None:
            if old in names:
                names[new] = names.pop(old)

        where.change(move)

    def unlink(self, directory: int, name: str) -> None:
        """See `Files`."""
        where = self._directory(directory)
        if name in where.names:
            self._check_device(write=True)

            def drop(names: dict[str, _Inode]) -> None:
                names.pop(name, None)

            where.change(drop)

    def stat(self, directory: int, name: str) -> FileStat | None:
        """See `Files`."""
        inode = self._directory(directory).names.get(name)
        return None if inode is None else FileStat(len(inode.data), inode.allocated)

    def free_bytes(self, directory: int) -> int:
        """See `Files`."""
        self._directory(directory)
        return self.disk.free

    def lock(self, handle: int) -> bool:
        """See `Files`."""
        inode = self._inode(handle)
        if inode.locked_by is not None:
            return False
        inode.locked_by = id(self) * 1_000_003 + handle
        return True

    def random_bytes(self, count: int) -> bytes:
        """See `Files`: from a seed, so that a run can be repeated."""
        return self._rng.bytes(count)

    def pause(self) -> None:
        """Nothing runs beside a simulated process."""

    def call_queue(self, depth: int) -> CallQueue | None:
        """See `Files`: its calls are carried out when somebody asks for them, the last one first."""
        return _SimQueue(self, depth)


class _SimQueue:
    """A `CallQueue` of one simulated process."""

    handle = -1

    def __init__(self, files: SimFiles, depth: int) -> None:
        self._files = files
        self._depth = depth
        self._calls: list[tuple[int, Call, int, int]] = []
        self._submitted = 0

    def push(self, tag: int, call: Call, begin: int, size: int) -> None:
        """See `CallQueue`."""
        if len(self._calls) == self._depth:
            raise InternalError(f"more than {self._depth} calls in the queue")
        self._calls.append((tag, call, begin, size))

    def submit(self) -> None:
        """See `CallQueue`."""
        self._submitted = len(self._calls)

    def take(self, least: int = 0) -> list[tuple[int, int]]:
        """See `CallQueue`."""
        at_disk, self._calls = self._calls[: self._submitted], self._calls[self._submitted :]
        self._submitted = 0
        return [(tag, self._carry_out(call, begin, size)) for tag, call, begin, size in reversed(at_disk)]

    def _carry_out(self, call: Call, begin: int, size: int) -> int:
        move = self._files.pwritev if call.write else self._files.preadv
        try:
            return move(call.handle, call.buffers(begin, size), call.offset + begin)
        except OSError as error:
            return -(error.errno or errno.EIO)

    def close(self) -> None:
        """See `CallQueue`."""
        self._calls.clear()


@dataclass
class Fault:
    """Calls named in `calls` raise `code`, after letting `skip` of them pass, `count` times (None: until removed)."""

    calls: frozenset[str]
    code: int
    skip: int = 0
    count: int | None = None


class FaultyFiles:
    """A `Files` that hands everything to `inner`, except what `faults` say.

    `seen` counts calls by name. `before`, if set, is called with the name before each call, in whatever thread it is.
    """

    def __init__(self, inner: Files) -> None:
        self.inner = inner
        self.faults: list[Fault] = []
        self.seen: dict[str, int] = {}
        self.before: Callable[[str], None] | None = None

    def fail(self, *calls: str, code: int = errno.EIO, skip: int = 0, count: int | None = None) -> Fault:
        """Add a fault; returns it, to be taken out of `faults` again."""
        fault = Fault(frozenset(calls), code, skip, count)
        self.faults.append(fault)
        return fault

    def heal(self) -> None:
        """No more faults."""
        self.faults.clear()

    def _meet(self, call: str) -> None:
        self.seen[call] = self.seen.get(call, 0) + 1
        if self.before is not None:
            self.before(call)
        for fault in self.faults:
            if call not in fault.calls:
                continue
            if fault.skip > 0:
                fault.skip -= 1
                continue
            if fault.count is not None:
                if fault.count <= 0:
                    continue
                fault.count -= 1
            raise _error(fault.code, call)

    def open_directory(self, path: str, *, create: bool) -> int:
        """See `Files`."""
        self._meet("open_directory")
        return self.inner.open_directory(path, create=create)

    def identity(self, path: str) -> tuple[int, int] | None:
        """See `Files`."""
        self._meet("identity")
        return self.inner.identity(path)

    def handle_identity(self, handle: int) -> tuple[int, int]:
        """See `Files`."""
        return self.inner.handle_identity(handle)

    def names(self, directory: int) -> list[str]:
        """See `Files`."""
        self._meet("names")
        return self.inner.names(directory)

    def open(self, directory: int, name: str, *, write: bool, create: bool = False, direct: bool = False) -> int:
        """See `Files`."""
        self._meet("open")
        return self.inner.open(directory, name, write=write, create=create, direct=direct)

    def close(self, handle: int) -> None:
        """See `Files`."""
        self.inner.close(handle)

    def pwritev(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `Files`."""
        self._meet("pwritev")
        return self.inner.pwritev(handle, buffers, offset)

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `Files`."""
        self._meet("preadv")
        return self.inner.preadv(handle, buffers, offset)

    def allocate(self, handle: int, size: int) -> None:
        """See `Files`."""
        self._meet("allocate")
        self.inner.allocate(handle, size)

    def truncate(self, handle: int, size: int) -> None:
        """See `Files`."""
        self._meet("truncate")
        self.inner.truncate(handle, size)

    def sync(self, handle: int) -> None:
        """See `Files`."""
        self._meet("sync")
        self.inner.sync(handle)

    def sync_directory(self, directory: int) -> None:
        """See `Files`."""
        self._meet("sync_directory")
        self.inner.sync_directory(directory)

    def rename(self, directory: int, old: str, new: str) -> None:
        """See `Files`."""
        self._meet("rename")
        self.inner.rename(directory, old, new)

    def unlink(self, directory: int, name: str) -> None:
        """See `Files`."""
        self._meet("unlink")
        self.inner.unlink(directory, name)

    def stat(self, directory: int, name: str) -> FileStat | None:
        """See `Files`."""
        return self.inner.stat(directory, name)

    def free_bytes(self, directory: int) -> int:
        """See `Files`."""
        self._meet("free_bytes")
        return self.inner.free_bytes(directory)

    def lock(self, handle: int) -> bool:
        """See `Files`."""
        self._meet("lock")
        return self.inner.lock(handle)

    def random_bytes(self, count: int) -> bytes:
        """See `Files`."""
        return self.inner.random_bytes(count)

    def pause(self) -> None:
        """See `Files`."""
        self.inner.pause()

    def call_queue(self, depth: int) -> CallQueue | None:
        """See `Files`: none, so that every call passes here."""
        return None
