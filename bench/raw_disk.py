"""Raw speed of a file: a preallocated file, direct I/O, a fixed number of calls in flight. Imports nothing of kvstrata.

    raw_disk.py FILE --bytes N --io BYTES --threads T --op write|read [--random] [--fresh] [--arena N] [--cpus 0,1]

Prints one JSON object: {"gbps", "cpu_s", "seconds", "direct", "bytes", "io", "threads"}. `--fresh` begins with a new
file whose space was allocated but never written; otherwise a file of that size must have been written before, or is
written once first, untimed. Memory is in huge pages, which direct calls are fastest with. Every call has a place of
its own in it, as every chunk of a tier has; with `--arena` they go through so much in turn (fio has a buffer for each
thread), which stays in the caches of the processor.
"""

from __future__ import annotations

import argparse
import collections
import json
import mmap
import os
import random
import resource
import threading
import time


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
    view = memoryview(arena)
    pieces = [[view[at : at + io]] for at in range(0, len(arena), io)]
    todo = collections.deque((pieces[index % len(pieces)], offset) for index, offset in enumerate(offsets))
    call = os.pwritev if write else os.preadv
    ready = threading.Barrier(threads + 1)
    short: list[int] = []

    def work() -> None:
        ready.wait()
        try:
            while True:
                piece, offset = todo.popleft()
                if call(handle, piece, offset) != io:
                    short.append(offset)
        except IndexError:  # the deque is empty
            return

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    begin = time.perf_counter()
    for worker in workers:
        worker.join()
    if write:
        os.fdatasync(handle)
    seconds = time.perf_counter() - begin
    if short:
        raise OSError(f"calls came back short at {short[:3]}")
    return seconds


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
    parser.add_argument(
        "--arena", type=int, default=0, help="bytes of memory to go through in turn; 0: a place for each byte"
    )
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
    arena_size = max(min(args.arena or args.bytes, args.bytes) // args.io, 1) * args.io
    arena = mmap.mmap(-1, arena_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    arena.madvise(mmap.MADV_HUGEPAGE)
    pattern = bytes(range(256)) * 4096
    for at in range(0, arena_size, len(pattern)):
        arena[at : at + len(pattern)] = pattern[: arena_size - at]
    before = resource.getrusage(resource.RUSAGE_SELF)
    seconds = run(handle, offsets, args.io, args.threads, args.op == "write", arena)
    after = resource.getrusage(resource.RUSAGE_SELF)
    moved = len(offsets) * args.io
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"gbps": moved / seconds / 1e9, "cpu_s": cpu, "seconds": seconds, "direct": direct,
                      "bytes": moved, "io": args.io, "threads": args.threads}))  # fmt: skip


if __name__ == "__main__":
    main()
