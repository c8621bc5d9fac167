"""How long the disk tier takes to open a directory of many records, and what a record costs in memory.

    disk_open.py DIR [--records 1000000] [--per-batch 64] [--chunk 32768] [--uneven] [--full]

With `--uneven` the payloads of each batch have another size, from 4 KiB to twice the chunk. Header blocks are real,
payloads are holes of sparse files: header blocks are then neighbours on the disk, and holes are read without it. With
`--full` payloads are written, 36 GB where each of a million records has a batch of its own. Prints one JSON object.
Every opening is a process of its own; with write access to the kernel's cache control, caches are dropped before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np

SEGMENT = 1 << 30


def build(place: str, records: int, per_batch: int, chunk: int, *, uneven: bool = False, full: bool = False) -> None:
    """A directory as a run that was killed would leave it."""
    from kvstrata.tiers.disk.format import BatchKind, Realm, SegmentHeader, make_records, pack_batch, pack_segment

    rng = np.random.default_rng(1)
    os.makedirs(place, mode=0o700)
    payload = memoryview(rng.bytes(per_batch * 2 * chunk if full else 0))
    realm, left, number = Realm(b"bench-namespace!", 1), records, 0
    while left > 0:
        segment_id = rng.bytes(16)
        handle = os.open(f"{place}/segment-{number:08x}.kvs", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(handle, SEGMENT)
        os.pwrite(handle, pack_segment(SegmentHeader(segment_id, number + 1, 1, SEGMENT, 0)), 0)
        start = 4096
        while count := min(per_batch, left):
            length = 4096 * int(rng.integers(1, 2 * chunk // 4096)) if uneven else chunk
            span = -(-(4096 + per_batch * length) // 4096) * 4096
            if start + span > SEGMENT:
                break
            places = [start + 4096 + i * length for i in range(count)]
            table = make_records(rng.bytes(36 * count), rng.bytes(16 * count), places, [length] * count)
            block = pack_batch(BatchKind.RECORDS, realm, segment_id, number + 1, start, span, 0, table)
            os.pwritev(handle, [block, payload[: span - len(block)]], start)
            left -= count
            start += span
        os.fsync(handle)
        os.close(handle)
        number += 1


def resident_bytes() -> int:
    """Of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def open_once(place: str, save: bool) -> dict[str, float]:
    """Open, count, close."""
    import kvstrata.tiers.disk.acquire as taking
    from kvstrata.runtime.clock import SystemClock
    from kvstrata.runtime.executor import ThreadExecutor
    from kvstrata.tiers.base import TierContext
    from kvstrata.tiers.disk import DiskTier

    assert taking
    clock, executor = SystemClock(), ThreadExecutor("open", threads=16)
    region = memoryview(bytearray(4096))
    tier = DiskTier(path=place, limit=None, segment_bytes=SEGMENT)
    before, begin = resident_bytes(), clock.monotonic()
    tier.open(TierContext(region, b"bench-namespace!", 1, clock, executor))
    seconds = clock.monotonic() - begin
    grown, keys = resident_bytes() - before, tier.usage().keys
    told = {"seconds": round(seconds, 3), "keys": keys, "bytes_per_record": round(grown / max(keys, 1), 1)}
    if save:
        tier.close()
    print(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)


def run(place: str, *flags: str) -> dict[str, float]:
    with contextlib.suppress(OSError), open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("3")
    done = subprocess.run(
        [sys.executable, __file__, place, "--open", *flags], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--per-batch", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=32_768)
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--open", action="store_true")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if args.open:
        open_once(args.place, args.save)
    shutil.rmtree(args.place, ignore_errors=True)
    try:
        build(args.place, args.records, args.per_batch, args.chunk, uneven=args.uneven, full=args.full)
        scan = [run(args.place) for _ in range(3)]
        run(args.place, "--save")
        clean = [run(args.place) for _ in range(3)]
        what = {"records": args.records, "per_batch": args.per_batch, "uneven": args.uneven, "full": args.full}
        print(json.dumps({**what, "header_scan": scan, "clean": clean}))
    finally:
        shutil.rmtree(args.place, ignore_errors=True)


if __name__ == "__main__":
    main()
