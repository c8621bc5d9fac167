"""The kernel's queue of file calls (`io_submit`): many direct calls at once from one thread.

Threads would do the same, but each of their calls costs two changes of thread and two turns at the interpreter's lock:
at 32 KiB more than the call itself. The kernel waits for nothing here only if the file bypasses the page cache and its
blocks were allocated before, which is how segments are used; otherwise `io_submit` does the call on the spot.

Containers commonly allow these calls, where they forbid io_uring.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import struct
import sys
from typing import Any

import numpy as np

from kvstrata.errors import InternalError
from kvstrata.tiers.disk.calls import Call

# setup, destroy, getevents, submit
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_READ, _WRITE, _READ_PARTS, _WRITE_PARTS = 0, 1, 7, 8
_SIGNAL = 1
"""Flag of a call: write to the event descriptor when it has ended."""
_CALL = struct.Struct("<QIIHhIQQqQII")
_EVENT = struct.Struct("<QQqq")
_PART = 16
_MOST_PARTS = 1024


def _system_call(*types: Any) -> Any:
    function = ctypes.CDLL(None, use_errno=True)["syscall"]
    function.argtypes = [ctypes.c_long, *types]
    function.restype = ctypes.c_long
    return function


class KernelQueue:
    """A `CallQueue`. Closed by the end of the process, or by `close`, which waits for the calls in it."""

    def __init__(self, depth: int) -> None:
        """Raises `OSError` where the kernel has no such queue, or none to give."""
        known = _NUMBERS.get(platform.machine())
        if known is None or sys.byteorder != "little":
            raise OSError(errno.ENOSYS, "no kernel queue on this kind of machine")
        setup, self._destroy_number, self._events_number, self._submit_number = known
        number, pointer = ctypes.c_ulong, ctypes.c_void_p
        context = number(0)
        if _system_call(number, pointer)(setup, depth, ctypes.addressof(context)) < 0:
            raise OSError(ctypes.get_errno(), "io_setup")
        self._context = context.value
        self._submit = _system_call(number, ctypes.c_long, pointer)
        self._events = _system_call(number, ctypes.c_long, ctypes.c_long, pointer, pointer)
        self._depth = depth
        self._handle = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._calls, self._calls_at = _memory(depth * _CALL.size)
        self._pointers = (ctypes.c_uint64 * depth)()
        self._pointers_at = ctypes.addressof(self._pointers)
        self._ended, self._ended_at = _memory(depth * _EVENT.size)
        self._parts, self._parts_at = _memory(depth * _MOST_PARTS * _PART)
        self._free = list(range(depth))
        self._places: dict[int, int] = {}  # by tag
        self._pushed: list[int] = []  # tags, in the order of `_pointers`
        self._refused: list[tuple[int, int]] = []

    @property
    def handle(self) -> int:
        """See `CallQueue`."""
        return self._handle

    def push(self, tag: int, call: Call, begin: int, size: int) -> None:
        """See `CallQueue`."""
        if not self._free:
            raise InternalError(f"more than {self._depth} calls in the queue")
        parts = call.cut(begin, size)
        if len(parts) > _MOST_PARTS:
            raise InternalError(f"a call of {len(parts)} parts")
        place = self._free.pop()
        if len(parts) == 1:
            memory, at, _ = parts[0]
            kind, address, length = _WRITE if call.write else _READ, memory.address + at, size
        else:
            kind, address, length = self._lay_out(call.write, parts, place)
        _CALL.pack_into(
            self._calls, place * _CALL.size, tag, 0, 0, kind, 0, call.handle, address, length, call.offset + begin, 0,
            _SIGNAL, self._handle,
        )  # fmt: skip
        self._pointers[len(self._pushed)] = self._calls_at + place * _CALL.size
        self._pushed.append(tag)
        self._places[tag] = place

    def _lay_out(self, write: bool, parts: Any, place: int) -> tuple[int, int, int]:
        flat: list[int] = []
        for memory, at, length in parts:
            flat += (memory.address + at, length)
        start = place * _MOST_PARTS * _PART
        struct.pack_into(f"<{len(flat)}Q", self._parts, start, *flat)
        return _WRITE_PARTS if write else _READ_PARTS, self._parts_at + start, len(parts)

    def submit(self) -> None:
        """See `CallQueue`."""
        pushed = self._pushed
        begin = 0
        while begin < len(pushed):
            rest = len(pushed) - begin
            done = self._submit(self._submit_number, self._context, rest, self._pointers_at + 8 * begin)
            if done <= 0:  # the first of them is not taken
                self._refused.append((pushed[begin], -(ctypes.get_errno() or errno.EAGAIN)))
                self._free.append(self._places.pop(pushed[begin]))
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(self._handle, 1)
                done = 1
            begin += done
        pushed.clear()

    def take(self, least: int = 0) -> list[tuple[int, int]]:
        """See `CallQueue`."""
        ended, self._refused = self._refused, []
        if not self._places:
            return ended
        least = max(min(least - len(ended), len(self._places)), 0)
        count = self._events(self._events_number, self._context, least, self._depth, self._ended_at, None)
        for index in range(max(count, 0)):
            tag, _, result, _ = _EVENT.unpack_from(self._ended, index * _EVENT.size)
            self._free.append(self._places.pop(tag))
            ended.append((tag, result))
        return ended

    def close(self) -> None:
        """See `CallQueue`."""
        _system_call(ctypes.c_ulong)(self._destroy_number, self._context)
        os.close(self._handle)


def _memory(size: int) -> tuple[memoryview, int]:
    """Memory that the kernel reads and writes by its address."""
    view = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    return view, int(np.frombuffer(view, np.uint8).ctypes.data)


def open_kernel_queue(depth: int) -> KernelQueue | None:
    """A queue for `depth` calls at once, or None where there is none."""
    try:
        return KernelQueue(depth)
    except OSError:
        return None
