"""Speed of vLLM's file-system tier: its own thread pool and batch calls, one file per chunk. Imports no kvstrata.

    vllm_fs.py DIR --bytes N --chunk BYTES [--batch 64] [--threads 16] [--repeat 3]

To be run by an interpreter that has vLLM. Prints one JSON object: {"store_gbps", "load_gbps" (medians), "direct",
"native" (its compiled I/O is in use), "version"}. DIR is made, and emptied before every repetition.
"""

from __future__ import annotations

import argparse
import functools
import json
import mmap
import os
import shutil
import statistics
import time

import vllm
from vllm.v1.kv_offload.tiering.fs import io
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool


def drop_caches() -> None:
    """Where the machine allows."""
    try:
        with open("/proc/sys/vm/drop_caches", "w") as file:
            file.write("3")
    except OSError:
        return


def run(pool, enqueue, call, paths: list[str], view: memoryview, chunk: int, batch: int, direct: bool) -> float:
    """Seconds until every chunk was stored, or loaded, in jobs of `batch`."""
    begin = time.perf_counter()
    for number, at in enumerate(range(0, len(paths), batch)):
        part = paths[at : at + batch]
        offsets = [(at + place) * chunk for place in range(len(part))]
        enqueue(number, 1, [functools.partial(call, part, view, offsets, chunk, direct)])
    pool.wait_idle()
    seconds = time.perf_counter() - begin
    if not all(ok for _, ok, *_ in pool.get_finished()):
        raise OSError("a transfer failed")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--chunk", type=int, required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    count = args.bytes // args.chunk
    arena = mmap.mmap(-1, count * args.chunk)
    view = memoryview(arena)
    piece = os.urandom(min(args.bytes, 1 << 20))
    for at in range(0, len(view), len(piece)):
        view[at : at + len(piece)] = piece[: len(view) - at]
    stores, loads, direct = [], [], False
    for _ in range(args.repeat):
        shutil.rmtree(args.place, ignore_errors=True)
        os.makedirs(args.place)
        direct = io.probe_o_direct(args.place)
        paths = [f"{args.place}/{n % 4096:03x}/{n % 256:02x}_g0/{n:064x}.bin" for n in range(count)]
        pool = DualQueueThreadPool(args.threads, args.threads)
        rest = (paths, view, args.chunk, args.batch, direct)
        stores.append(run(pool, pool.enqueue_store, io.batch_store_block, *rest))
        drop_caches()
        loads.append(run(pool, pool.enqueue_load, io.batch_load_block, *rest))
        pool.shutdown()
    shutil.rmtree(args.place, ignore_errors=True)
    told = {"store_gbps": round(count * args.chunk / statistics.median(stores) / 1e9, 3),
            "load_gbps": round(count * args.chunk / statistics.median(loads) / 1e9, 3),
            "direct": direct, "native": bool(io._HAS_FSIO_C), "version": vllm.__version__}  # fmt: skip
    print(json.dumps(told))


if __name__ == "__main__":
    main()
