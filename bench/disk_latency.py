"""How long single loads take on the disk tier, idle and under stores at full rate.

    disk_latency.py DIR [--chunk 32768] [--loads 300] [--volume BYTES]

Prints one JSON object with milliseconds: {"idle": {"p50", "p99"}, "under_stores": {...}, "ratio_p99", "store_gbps"}.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from kvstrata.cli.bench_disk import Bench, Settings
from kvstrata.types import JobEnded, TierJob


def load_times(bench: Bench, keys: list[bytes], picks: list[int], stores: list[TierJob]) -> tuple[list[float], int]:
    """Seconds of each load, one after the other; `stores` are kept four deep beside them. Also chunks stored."""
    tier, clock, signal, times = bench.tier, bench._clock, bench._signal, []
    running: set[int] = set()
    stored = 0
    for pick in picks:
        job = TierJob(10_000_000 + len(times), [keys[pick]], [pick * bench.chunk], [bench.chunk])
        while stores and len(running) < 4:
            store = stores.pop()
            running.add(store.job_id)
            stored += len(store.keys)
            tier.submit_store(store)
        begin = clock.monotonic()
        tier.submit_load(job)
        waiting = True
        while waiting:
            signal.clear()
            for event in tier.poll():
                if isinstance(event, JobEnded):
                    waiting &= event.job_id != job.job_id
                    running.discard(event.job_id)
            if waiting:
                signal.wait(1.0)
        times.append(clock.monotonic() - begin)
    tier.drain(30.0)
    tier.poll()
    return times, stored


def percentiles(times: list[float]) -> dict[str, float]:
    """Milliseconds."""
    return {f"p{p}": round(float(np.percentile(times, p)) * 1e3, 3) for p in (50, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", type=Path)
    parser.add_argument("--chunk", type=int, default=32_768)
    parser.add_argument("--loads", type=int, default=300)
    parser.add_argument("--volume", type=int, default=256 << 20)
    parser.add_argument("--threads", action="store_true")
    args = parser.parse_args()
    place = args.place / "kvstrata-latency"
    place.mkdir(parents=True, exist_ok=True)
    bench = Bench(Settings(place, args.volume, 1, (), Path(), not args.threads), args.chunk)
    try:
        keys = bench.keys(0)
        for turn in range(2):
            if turn:
                bench.remove(keys)
            keys = bench.keys(turn)
            bench.store(keys)
        picks = np.random.default_rng(2).permutation(bench.count)[: args.loads].tolist()
        idle, _ = load_times(bench, keys, picks, [])
        more, jobs = bench.keys(77), []
        slots = [n * args.chunk for n in range(64)]
        for repeat in range(40):
            for at in range(0, bench.count - 63, 64):
                mixed = [bytes([repeat]) + key[1:] for key in more[at : at + 64]]
                jobs.append(TierJob(20_000_000 + len(jobs), mixed, slots, [args.chunk] * 64))
        begin = bench._clock.monotonic()
        busy, stored = load_times(bench, keys, picks, jobs)
        seconds = bench._clock.monotonic() - begin
        told = {"idle": percentiles(idle), "under_stores": percentiles(busy)}
        ratio = round(told["under_stores"]["p99"] / told["idle"]["p99"], 2)
        print(json.dumps({**told, "ratio_p99": ratio, "store_gbps": round(stored * args.chunk / seconds / 1e9, 3)}))
    finally:
        bench.close()


if __name__ == "__main__":
    main()
