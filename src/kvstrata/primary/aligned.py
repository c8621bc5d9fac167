"""Mappings of shared memory that begin on a huge page, and huge pages for what is mapped.

A direct call over ordinary pages is cut by the device wherever one page does not follow the other, and looks each page
up; over huge pages it takes a fifth of the system time, and its speed no longer depends on how scattered the memory of
the machine is. Shared memory is given none by itself where the system's switch says so, but they may be asked for.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np

HUGE_BYTES = 2 << 20
_COLLAPSE = 25
"""MADV_COLLAPSE, which the standard library has no name for."""
_NO_ADDRESS = ctypes.c_void_p(-1).value
_FIXED = 0x10


def _library() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    number, pointer = ctypes.c_size_t, ctypes.c_void_p
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, number, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [pointer, number]
    libc.madvise.argtypes = [pointer, number, ctypes.c_int]
    return libc


def map_shared(file: int, size: int) -> memoryview:
    """The first `size` bytes of a file, writable, at an address that is a multiple of a huge page.

    Unmapped when the view, and every view that was made of it, is gone. Raises `OSError`.
    """
    libc = _library()
    # Room for the mapping at any aligned address in it; what is left around it is given back.
    room = size + HUGE_BYTES
    start = libc.mmap(None, room, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if start == _NO_ADDRESS:
        raise OSError(ctypes.get_errno(), "no address range for shared memory")
    address = -(-start // HUGE_BYTES) * HUGE_BYTES
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mmap(address, size, protection, mmap.MAP_SHARED | _FIXED, file, 0) == _NO_ADDRESS:
        error = ctypes.get_errno()
        libc.munmap(start, room)
        raise OSError(error, os.strerror(error))
    for begin, end in ((start, address), (address + whole, start + room)):
        if end > begin:
            libc.munmap(begin, end - begin)
    mapping: type[Any] = type("_Mapping", (ctypes.c_char * size,), {})
    memory = mapping.from_address(address)
    end_of_life = weakref.finalize(memory, libc.munmap, address, whole)
    end_of_life.atexit = False  # type: ignore[misc]  # daemon threads may use it until the process is gone
    return memoryview(memory).cast("B")


def ask_for_huge_pages(view: memoryview) -> bool:
    """Have the kernel put what is mapped here together in huge pages; whether it did. Takes time, changes no byte."""
    address = int(np.frombuffer(view, np.uint8).ctypes.data)
    return bool(_library().madvise(address, len(view), _COLLAPSE) == 0)
