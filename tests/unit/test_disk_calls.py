"""Calls to files as values, and the kernel's queue of them."""

from __future__ import annotations

import errno
import os
import select
from pathlib import Path

import numpy as np
import pytest

from kvstrata.tiers.disk.calls import Call
from kvstrata.tiers.disk.io import SystemFiles, aligned_buffer, memory_of
from kvstrata.tiers.disk.kernel_queue import KernelQueue, open_kernel_queue


def ended_calls(queue: KernelQueue, count: int) -> dict[int, int]:
    """What so many calls came to."""
    ended: dict[int, int] = {}
    while len(ended) < count:
        assert select.select([queue.handle], [], [], 10.0)[0]
        os.eventfd_read(queue.handle)
        ended.update(queue.take())
    return ended


def test_the_kernel_moves_the_same_bytes_as_plain_calls(tmp_path: Path) -> None:
    queue = open_kernel_queue(4)
    if queue is None:
        pytest.skip("this kernel has no queue for calls")
    files = SystemFiles()
    directory = files.open_directory(str(tmp_path), create=False)
    handle = files.open(directory, "file", write=True, create=True)
    memory = memory_of(aligned_buffer(65536))
    memory.view[:32768] = np.random.default_rng(3).integers(0, 256, 32768, dtype=np.uint8).data
    scattered = Call(handle, True, [(memory, 0, 4096), (memory, 8192, 4096), (memory, 4096, 4096)], 4096, 12288)
    queue.push(7, scattered, 0, 12288)
    queue.push(8, Call(handle, True, [(memory, 16384, 8192)], 16384, 8192), 4096, 4096)
    queue.submit()
    assert ended_calls(queue, 2) == {7: 12288, 8: 4096}
    back = Call(handle, False, [(memory, 32768, 12288)], 4096, 12288)
    queue.push(1, back, 0, 12288)
    queue.push(2, Call(9999, False, [(memory, 0, 4096)], 0, 4096), 0, 4096)  # a file that is not open
    queue.push(3, Call(handle, False, [(memory, 49152, 8192)], 20480, 8192), 0, 8192)
    queue.submit()
    assert ended_calls(queue, 3) == {1: 12288, 2: -errno.EBADF, 3: 4096}  # the last one ends with the file
    view = memory.view
    assert view[32768:45056] == bytes(view[0:4096]) + bytes(view[8192:12288]) + bytes(view[4096:8192])
    assert view[49152:53248] == view[20480:24576]
    assert queue.take() == []
    queue.close()
    files.close(handle)
    files.close(directory)


@pytest.mark.parametrize(("begin", "size"), [(0, 10), (0, 4), (2, 3), (3, 7), (9, 1), (0, 0)])
def test_a_cut_of_a_call_is_the_bytes_of_its_range(begin: int, size: int) -> None:
    memory = memory_of(memoryview(bytearray(range(32))))
    parts = [(memory, 20, 3), (memory, 4, 5), (memory, 30, 2)]
    whole = b"".join(bytes(memory.view[at : at + length]) for _, at, length in parts)
    call = Call(0, True, parts, 0, 10)
    assert b"".join(map(bytes, call.buffers(begin, size))) == whole[begin : begin + size]
