"""The redis tier on a cluster of three nodes: keys lie on all of them, and one that dies costs misses only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from servers import RedisServer, free_port, wait_until
from services_kit import find_server
from services_stack import TPC, Engine, Runner

from kvstrata.testing.tier_harness import LAYOUT_TAG, NAMESPACE, chunk_keys
from kvstrata.tiers.redis import RedisTier
from kvstrata.types import FailCause

NODES = 3
SLOTS = 16384
CHUNK = 4096


@pytest.fixture
def cluster_redis(tmp_path: Path) -> Iterator[list[RedisServer]]:
    """Three nodes that know each other and share the slots."""
    find_server("redis")
    with ExitStack() as stack:
        nodes = []
        for number in range(NODES):
            place = tmp_path / str(number)
            place.mkdir()
            bus = str(free_port())
            options = ("--cluster-enabled", "yes", "--cluster-port", bus, "--cluster-require-full-coverage", "no")
            nodes.append(stack.enter_context(RedisServer(place, *options)))
            nodes[0].say("CLUSTER", "MEET", "127.0.0.1", str(nodes[-1].port), bus)
        for number, node in enumerate(nodes):
            first, last = SLOTS * number // NODES, SLOTS * (number + 1) // NODES - 1
            assert "OK" in node.say("CLUSTER", "ADDSLOTSRANGE", str(first), str(last))
        wait_until(
            lambda: all(f"cluster_slots_ok:{SLOTS}" in node.say("CLUSTER", "INFO") for node in nodes), "a cluster"
        )
        wait_until(lambda: takes_writes(nodes), "a cluster that takes writes")
        yield nodes


def takes_writes(nodes: list[RedisServer]) -> bool:
    """Whether a client finds all nodes up: each says so some time before it is so."""
    try:
        with redis.RedisCluster.from_url(nodes[0].url) as raw:
            return all(raw.set(f"warm-{number}", "x") and raw.delete(f"warm-{number}") for number in range(30))
    except redis.RedisError:
        return False


def make(nodes: list[RedisServer], part: str = "mine", **more: object) -> RedisTier:
    return RedisTier(nodes[0].url, cluster=True, part=part, **{"timeout_s": 5.0, **more})  # type: ignore[arg-type]


def test_what_one_writer_stores_on_a_redis_cluster_another_loads(cluster_redis: list[RedisServer]) -> None:
    keys = chunk_keys(200)
    with Runner(make(cluster_redis, limit=1 << 30), 200, CHUNK) as runner:
        assert len(runner.store(keys)) == 200
        assert runner.tier.usage().keys == 200
    held = [int(node.say("DBSIZE").strip()[1:]) for node in cluster_redis]
    assert all(count > 30 for count in held), held
    with Runner(make(cluster_redis, "other"), 200, CHUNK) as runner:
        assert runner.present(keys) == keys
        assert set(runner.load(keys).values()) == {None}
        assert len(runner.store(keys)) == 200
        assert runner.tier.usage().keys == 0, "what another writer stored is not counted twice"
    with Runner(make(cluster_redis, limit=20 * 5000), 200, CHUNK) as runner:
        wait = [key for key in keys if key in runner.present(keys)]
        wait_until(lambda: runner.poll() and 0 < runner.tier.usage().keys <= 22, "the trim to the lower limit")
        assert len(wait) <= 200
        found = runner.present(keys)
        assert len(found) == runner.tier.usage().keys
        assert set(runner.load(found).values()) == {None}


def test_bad_content_on_a_redis_cluster_is_discarded(cluster_redis: list[RedisServer]) -> None:
    keys = chunk_keys(8)
    with Runner(make(cluster_redis), 8, CHUNK) as runner:
        assert len(runner.store(keys)) == 8, runner.failed
        name = b"kvstrata:c:" + NAMESPACE + LAYOUT_TAG.to_bytes(8, "big") + keys[3]
        raw = redis.RedisCluster.from_url(cluster_redis[0].url)
        raw.set(name, raw.get(name)[:-1] + b"\xff")
        assert runner.load(keys)[3] is FailCause.CORRUPT
        wait_until(lambda: runner.poll() and raw.get(name) is None, "the bad value to go")
        raw.close()
        assert len(runner.store(keys)) == 8
        assert set(runner.load(keys).values()) == {None}


def test_a_redis_cluster_that_loses_a_node_serves_what_is_left(cluster_redis: list[RedisServer]) -> None:
    keys = chunk_keys(24)
    with Engine(make(cluster_redis, timeout_s=0.7), 100, CHUNK) as engine:
        engine.put_down(keys)
        engine.forget()
        assert engine.serve(keys)[0] == 24 * TPC
        engine.forget()
        cluster_redis[2].kill()
        hit, took = engine.serve(keys)
        assert hit < 24 * TPC
        assert took < engine.BOUND_S + 2.0
        engine.check_idle()
