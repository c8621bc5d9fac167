"""The limit of a part on real servers and real threads: never above it, and the account is what lies there."""

from __future__ import annotations

from typing import Any

import numpy as np
import obstore
import redis
from servers import wait_until
from services_stack import LONG_S, Place, Runner

from kvstrata.testing.tier_harness import chunk_keys
from kvstrata.tiers.common.record import HEADER_BYTES
from kvstrata.tiers.redis.client import OVERHEAD_BYTES
from kvstrata.types import FailCause

CHUNK = 2000
KEYS = 60
ROOM = 20


def lying(place: Place, part: str) -> int:
    """Bytes of the part, as the tier counts them, found by looking."""
    if place.kind == "redis":
        with redis.Redis.from_url(place.server.url) as raw:
            names: Any = raw.keys("kvstrata:c:*")
            return sum(int(raw.strlen(name)) + OVERHEAD_BYTES for name in names)  # type: ignore[arg-type]
    return sum(meta["size"] for page in obstore.list(place._store(), f"kv/parts/{part}") for meta in page)


def test_many_jobs_never_exceed_the_limit(place: Place) -> None:
    limit = ROOM * (CHUNK + HEADER_BYTES + OVERHEAD_BYTES)
    rng = np.random.default_rng(5)
    keys = chunk_keys(KEYS)
    with Runner(place.make("mine", limit=limit), 3 * 400, CHUNK) as runner:
        jobs = set()
        for number in range(300):
            picked = [keys[int(index)] for index in rng.integers(0, KEYS, size=3)]
            if rng.integers(8) == 0:
                runner.tier.remove(picked)
            else:
                jobs.add(runner.submit_store(picked, 3 * number))
            runner.poll()
            usage = runner.tier.usage()
            assert usage.bytes_held + usage.bytes_reserved <= limit
            if number % 25 == 0:
                assert lying(place, "mine") <= limit
        wait_until(lambda: runner.poll() and jobs <= runner.ended, "all stores", LONG_S)
        wait_until(lambda: runner.poll() and not runner.tier.usage().bytes_reserved, "all removals", LONG_S)
        assert lying(place, "mine") == runner.tier.usage().bytes_held <= limit
        causes = {cause for failed in runner.failed.values() for cause in failed.values()}
        assert causes <= {FailCause.CANCELLED, FailCause.NO_SPACE}
        found = runner.present(keys)
        assert len(found) == runner.tier.usage().keys > 0
        assert set(runner.load(found).values()) == {None}
    with Runner(place.make("mine", limit=limit), KEYS, CHUNK) as runner:
        wait_until(lambda: runner.poll() and runner.tier.usage().keys == len(found), "the scan", LONG_S)
        assert runner.tier.usage().bytes_held == lying(place, "mine")
        assert runner.present(keys) == found
