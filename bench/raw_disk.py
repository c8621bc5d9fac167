"""Raw speed of a file: a preallocated file, direct I/O, a fixed number of calls in flight. Imports nothing of kvstrata.

    raw_disk.py FILE --bytes N --io BYTES --threads T --op write|read [--random] [--fresh] [--cpus 0,1]

Prints one JSON object: {"gbps", "cpu_s", "seconds", "direct", "bytes", "io", "threads"}. `--fresh` begins with a new
file whose space was allocated but never written; otherwise a file of that size must have been written before, or is
written once first, untimed.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import resource
import threading
import time

ARENA = 256 << 20


def open_file(path: str, size: int, fresh: bool) -> tuple[int, bool]:
    """An open file of `size` bytes, and whether it is used past the page cache."""
    if fresh and os.path.exists(path):
        os.unlink(path)
    there = os.path.exists(path) and os.path.getsize(path) >= size
    flags = os.O_RDWR | os.O_CREAT
    try:
        handle, direct = os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError:
        handle, direct = os.open(path, flags, 0o600), False
    if not there:
        os.posix_fallocate(handle, 0, size)
        if not fresh:
            memory = mmap.mmap(-1, 1 << 20)
            memory[:] = os.urandom(1 << 20)
            for offset in range(0, size, 1 << 20):
                os.pwrite(handle, memory, offset)
    if not direct:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    return handle, direct


def run(handle: int, offsets: list[int], io: int, threads: int, write: bool, arena: mmap.mmap) -> float:
    """Seconds that all calls together took."""
    todo = iter(range(len(offsets)))
    lock = threading.Lock()
    view = memoryview(arena)
    places = len(arena) // io

    def work() -> None:
        while True:
            with lock:
                index = next(todo, None)
            if index is None:
                return
            at = index % places * io
            piece = view[at : at + io]
            done = os.pwritev(handle, [piece], offsets[index]) if write else os.preadv(handle, [piece], offsets[index])
            if done != io:
                raise OSError(f"{done} of {io} bytes at {offsets[index]}")

    workers = [threading.Thread(target=work) for _ in range(threads)]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if write:
        os.fdatasync(handle)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--io", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--op", choices=["write", "read"], required=True)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--calls", type=int, default=0, help="most calls; 0: the whole file once")
    parser.add_argument("--cpus", default="")
    args = parser.parse_args()
    if args.cpus:
        os.sched_setaffinity(0, [int(cpu) for cpu in args.cpus.split(",")])
    handle, direct = open_file(args.file, args.bytes, args.fresh)
    offsets = list(range(0, args.bytes - args.io + 1, args.io))
    if args.random:
        random.Random(1).shuffle(offsets)
    if args.calls:
        offsets = offsets[: args.calls]
    arena = mmap.mmap(
        -1, max(min(ARENA, args.bytes) // args.io, 1) * args.io, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    arena.madvise(mmap.MADV_HUGEPAGE)  # the memory that direct calls are fastest with
    arena[:] = bytes(range(256)) * (len(arena) // 256)
    before = resource.getrusage(resource.RUSAGE_SELF)
    seconds = run(handle, offsets, args.io, args.threads, args.op == "write", arena)
    after = resource.getrusage(resource.RUSAGE_SELF)
    moved = len(offsets) * args.io
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"gbps": moved / seconds / 1e9, "cpu_s": cpu, "seconds": seconds, "direct": direct,
                      "bytes": moved, "io": args.io, "threads": args.threads}))  # fmt: skip


if __name__ == "__main__":
    main()
