"""The memory of primary: one region of host memory, fully backed before it is used.

A region that is only promised kills the process at the first touch of a missing page; here no room is an error with
the numbers, before anything is served. The configured size, rounded up to whole operating-system pages, is the real
footprint.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from types import TracebackType
from typing import Protocol, Self

from kvstrata.errors import CapacityError, ConfigError, StateError
from kvstrata.primary.aligned import HUGE_BYTES, ask_for_huge_pages, map_shared
from kvstrata.primary.limits import RoomReader, read_memory_rooms, tightest

_MOST_REFUSALS = 2
"""So often huge pages are asked for in vain: where there are none, looking for them takes long."""
_PIECE_BYTES = 64 * 2**20
"""How much is backed between two looks at the room that is left."""


class Region(Protocol):
    """Memory that primary is made of. Constructors only store; `open` acquires, `close` releases (idempotent)."""

    size: int

    @property
    def view(self) -> memoryview:
        """All of the region, writable, format 'B'."""
        ...

    def open(self) -> Self:
        """Acquire and back the memory."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class _MappedRegion:
    """What both kinds of region share: checking the room, the view, and the life cycle."""

    def __init__(self, size: int, *, rooms: RoomReader = read_memory_rooms) -> None:
        if size < 1:
            raise ConfigError(f"primary size: {size} bytes must be at least 1")
        self.requested = size
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        """The footprint: what was asked for, rounded up to whole operating-system pages."""
        self._rooms = rooms
        self._map: memoryview | None = None
        self._view: memoryview | None = None

    def open(self) -> Self:
        """Acquire the region and back every page of it. Idempotent.

        Raises `CapacityError`, with the numbers, if the machine or the container has no room for it.
        """
        if self._map is not None:
            return self
        try:
            self._check_room(self.size)
            self._map = self._acquire()
            self._back(self._map)
        except OSError as error:
            self.close()
            why = f"the system refused it ({os.strerror(error.errno or errno.ENOMEM)})"
            raise CapacityError(self._refusal(why)) from error
        except BaseException:
            self.close()
            raise
        self._view = memoryview(self._map)
        return self

    def close(self) -> None:
        """Give the memory back. Idempotent.

        Views that others still hold keep the memory until they are gone: it is never unmapped under a reader.
        """
        view, self._view = self._view, None
        mapped, self._map = self._map, None
        for each in (view, mapped):
            with contextlib.suppress(BufferError):  # somebody holds a part: the mapping goes with its last holder
                if each is not None:
                    each.release()
        self._release()

    @property
    def view(self) -> memoryview:
        """All of the region, writable, format 'B'. Raises `StateError` unless open."""
        if self._view is None:
            raise StateError("primary region is not open")
        return self._view

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _acquire(self) -> memoryview:
        """Map `size` bytes, until the view and all that were made of it are gone; may raise `OSError`."""
        raise NotImplementedError

    def _release(self) -> None:
        """Give back what `_acquire` took besides the mapping."""

    def _reserve(self, mapped: memoryview, start: int, size: int) -> None:
        """Take memory for a piece of the mapping, where touching it would come too late to be refused."""

    def _back(self, mapped: memoryview) -> None:
        """Back every page, looking at the room that is left between pieces: others take memory meanwhile."""
        for start in range(0, self.size, _PIECE_BYTES):
            end = min(start + _PIECE_BYTES, self.size)
            self._check_room(self.size - start)
            self._reserve(mapped, start, end - start)
            with mapped[start : end : mmap.PAGESIZE] as firsts:
                firsts[:] = bytes(len(firsts))

    def _check_room(self, needed: int) -> None:
        least = tightest(self._rooms())
        if least is not None and needed > least.available:
            raise CapacityError(self._refusal(f"{needed} still needed, {least.describe()}"))

    def _refusal(self, why: str) -> str:
        return f"primary of {self.size} bytes does not fit: {why}; choose a smaller primary size"


class AnonymousRegion(_MappedRegion):
    """Private memory of this process; enough where nobody else maps primary."""

    def _acquire(self) -> memoryview:
        return memoryview(mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class SharedRegion(_MappedRegion):
    """Memory that other processes can map through an inherited descriptor.

    It is made of huge pages as far as the machine has them together, which is what direct calls are fast with.

    It has no name in any file system, so nothing is left behind however the process ends; `name` is what the system
    shows of it beside its descriptor.
    """

    def __init__(self, size: int, *, name: str = "kvstrata-primary", rooms: RoomReader = read_memory_rooms) -> None:
        super().__init__(size, rooms=rooms)
        self._name = name
        self._file = -1
        self._refusals = 0  # of huge pages, one after the other

    def fileno(self) -> int:
        """The descriptor that another process maps; stays ours to close. Raises `StateError` unless open."""
        if self._file < 0:
            raise StateError("primary region is not open")
        return self._file

    def _acquire(self) -> memoryview:
        self._refusals = 0
        self._file = os.memfd_create(self._name, os.MFD_CLOEXEC)
        os.ftruncate(self._file, self.size)
        return map_shared(self._file, self.size)

    def _reserve(self, mapped: memoryview, start: int, size: int) -> None:
        if self._refusals < _MOST_REFUSALS:
            # One page in each is enough for a huge page to take its place: faster than to fill it with small ones.
            for at in range(start, start + size, HUGE_BYTES):
                os.pwrite(self._file, b"\0", at)
            with mapped[start : start + size] as piece:
                self._refusals = 0 if ask_for_huge_pages(piece) else self._refusals + 1
        os.posix_fallocate(self._file, start, size)

    def _release(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
