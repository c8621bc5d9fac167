"""A second process that writes to a shared store. Started by test_services_sharing.py.

    python services_child.py KIND OPTIONS FIRST LAST STEP CHUNK

Stores the keys numbered range(FIRST, LAST, STEP) in jobs of ten and prints the number of each key that was reported
done. Then it waits for a line on its input, loads all keys from 0 to LAST, prints "loaded N", and ends.
"""

from __future__ import annotations

import json
import sys

from servers import wait_until
from services_stack import LONG_S, Runner

from kvstrata.testing.tier_harness import chunk_key, chunk_keys
from kvstrata.tiers.registry import make_tier

JOB = 10


def main() -> None:
    """See the module."""
    kind, options = sys.argv[1], json.loads(sys.argv[2])
    first, last, step, chunk = map(int, sys.argv[3:])
    numbers = list(range(first, last, step))
    with Runner(make_tier(kind, **options), last, chunk) as runner:
        jobs = {
            runner.submit_store([chunk_key(number) for number in numbers[at : at + JOB]], at): numbers[at : at + JOB]
            for at in range(0, len(numbers), JOB)
        }
        told: set[tuple[int, int]] = set()

        def tell() -> bool:
            runner.poll()
            for job, indices in runner.done.items():
                for index in sorted(indices):
                    if (job, index) not in told:
                        told.add((job, index))
                        print(jobs[job][index], flush=True)
            return len(runner.ended) == len(jobs)

        wait_until(tell, "all stores", LONG_S)
        print("stored", flush=True)
        sys.stdin.readline()
        outcome = runner.load(chunk_keys(last))
        print(f"loaded {sum(cause is None for cause in outcome.values())}", flush=True)


if __name__ == "__main__":
    main()
