"""What residency costs per chunk at a full primary: `python bench/residency_micro.py [--policy lru] [--slots 100000]`.

Prints microseconds per chunk of a store (reserve, evict, publish) and of a load (find, pin, unpin, touch) in batches,
with none or half of the chunks pinned, for one size class and for two, and bytes of memory per resident chunk.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import tracemalloc
from collections.abc import Callable
from time import perf_counter

import numpy as np

from kvstrata.core.residency import Residency
from kvstrata.policy.registry import make_policy, policy_names


def keys_of(start: int, count: int, group: int = 0) -> list[bytes]:
    tail = group.to_bytes(4, "big")
    return [hashlib.sha256(number.to_bytes(8, "big")).digest() + tail for number in range(start, start + count)]


def fill(residency: Residency, slots: int, batch: int) -> list[list[bytes]]:
    """Chains of `batch` chunks until `slots` are resident."""
    chains = []
    for start in range(0, slots, batch):
        count = min(batch, slots - start)
        keys = keys_of(start, count)
        taken = residency.reserve(keys, [0] * count)
        assert taken is not None
        residency.publish(taken[0])
        chains.append(keys)
    return chains


def timed(name: str, rounds: int, batch: int, work: Callable[[int], None]) -> None:
    times = []
    for turn in range(rounds):
        begin = perf_counter()
        work(turn)
        times.append(perf_counter() - begin)
    us = np.array(times) * 1e6
    print(
        f"{name:<44}{us.mean() / batch:8.2f} us/chunk   median {np.median(us) / batch:6.2f}"
        f"   batch p99 {np.percentile(us, 99):8.1f} us   max {us.max():9.1f} us"
    )


def store_rounds(residency: Residency, keys: list[list[bytes]], groups: list[int]) -> Callable[[int], None]:
    def work(turn: int) -> None:
        taken = residency.reserve(keys[turn], groups)
        assert taken is not None
        residency.publish(taken[0])

    return work


def load_rounds(residency: Residency, chains: list[list[bytes]]) -> Callable[[int], None]:
    def work(turn: int) -> None:
        slots = residency.find(chains[turn])
        residency.pin(slots)
        residency.unpin(slots)
        residency.touch(slots)

    return work


def memory(policy: str, slots: int, batch: int, churn: int) -> None:
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    residency = Residency(slots * 4096, [4096], make_policy(policy))
    fill(residency, slots, batch)
    filled = tracemalloc.get_traced_memory()[0] - before
    for turn in range(churn):
        taken = residency.reserve(keys_of(slots + turn * batch, batch), [0] * batch)
        assert taken is not None
        residency.publish(taken[0])
        del taken
    gc.collect()
    churned = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    print(f"memory: {filled / slots:.0f} B per chunk after filling, {churned / slots:.0f} after {churn * batch} more")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", choices=policy_names(), default="lru")
    parser.add_argument("--slots", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1500)
    options = parser.parse_args()
    slots, batch, rounds = options.slots, options.batch, options.rounds
    print(f"policy {options.policy}, {slots} slots, batches of {batch}")
    rng = np.random.default_rng(1)

    residency = Residency(slots * 4096, [4096], make_policy(options.policy))
    chains = [chain for chain in fill(residency, slots, batch) if len(chain) == batch]
    order = [chains[i] for i in rng.integers(0, len(chains), rounds)]
    timed("load, random chains", rounds, batch, load_rounds(residency, order))
    fresh = [keys_of(slots + turn * batch, batch) for turn in range(rounds)]
    timed("store, evicting", rounds, batch, store_rounds(residency, fresh, [0] * batch))

    residency = Residency(slots * 4096, [4096], make_policy(options.policy))
    chains = fill(residency, slots, batch)
    for chain in chains[::2]:
        residency.pin(residency.find(chain))
    timed("store, evicting, half pinned by chains", rounds // 3, batch, store_rounds(residency, fresh, [0] * batch))
    residency = Residency(slots * 4096, [4096], make_policy(options.policy))
    chains = fill(residency, slots, batch)
    for chain in chains:
        residency.pin(residency.find(chain[1::2]))
    timed("store, evicting, every second slot pinned", rounds // 3, batch, store_rounds(residency, fresh, [0] * batch))

    def churn(turn: int) -> None:
        pinned = residency.find(chains[-1 - turn][1::2])
        residency.unpin(pinned)
        store_rounds(residency, fresh, [0] * batch)(rounds // 3 + turn)
        residency.pin(residency.find(fresh[rounds // 3 + turn][::2]))

    timed("the same, pins come and go", rounds // 3, batch, churn)

    small = batch // 2
    residency = Residency(slots * 4096, [8192, 1000], make_policy(options.policy))
    groups = [0] * small + [1] * (batch - small)
    mixed = [keys_of(turn * batch, batch) for turn in range(slots // small + rounds)]
    fills = slots // small
    for turn in range(fills):
        store_rounds(residency, mixed, groups)(turn)
    timed("store, evicting, two sizes mixed", rounds, batch, store_rounds(residency, mixed[fills:], groups))
    bits = rng.integers(0, 2, rounds).tolist()

    def one_sized(turn: int) -> None:
        store_rounds(residency, fresh, [bits[turn]] * batch)(turn)

    timed("store, evicting, two sizes in turns", rounds, batch, one_sized)
    residency.check()
    memory(options.policy, slots, batch, 2 * slots // batch)


if __name__ == "__main__":
    main()
