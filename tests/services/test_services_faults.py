"""A server that dies, hangs, begins anew, is slow or refuses: requests recompute in time, and service resumes."""

from __future__ import annotations

import pytest
import redis
from servers import RedisServer, wait_until
from services_stack import SHORT_S, TPC, Engine, Place, Runner

from kvstrata.core.breakers import BreakerState
from kvstrata.testing.tier_harness import LAYOUT_TAG, NAMESPACE, chunk_keys
from kvstrata.types import FailCause

CHUNKS = 24
CHUNK = 4096
SLACK_S = 2.0
"""What a busy machine may add to the bound of a request."""


def begin(place: Place, fault: str) -> None:
    match fault:
        case "dies":
            place.server.kill()
        case "hangs":
            place.server.freeze()
        case "is slow":
            place.server.behave(delay_s=2 * SHORT_S)
        case "refuses":
            place.server.refuse(True)


def end(place: Place, fault: str) -> None:
    match fault:
        case "dies":
            place.server.start()
        case "hangs":
            place.server.thaw()
        case "is slow":
            place.server.behave()
        case "refuses":
            place.server.refuse(False)


@pytest.mark.parametrize("fault", ["dies", "hangs", "is slow", "refuses"])
def test_requests_recompute_in_time_and_service_resumes(place: Place, fault: str) -> None:
    keys = chunk_keys(CHUNKS)
    if fault == "is slow":
        place.server.behave()
    with Engine(place.make("mine", timeout_s=SHORT_S), 4 * CHUNKS, CHUNK) as engine:
        engine.put_down(keys)
        engine.forget()
        assert engine.serve(keys)[0] == CHUNKS * TPC
        engine.forget()
        begin(place, fault)

        def opened() -> bool:
            """One more request is answered in time; whether the breaker is open by now."""
            hit, took = engine.serve(keys)
            assert hit in (0, CHUNKS * TPC) if fault == "is slow" else hit == 0
            assert took < engine.BOUND_S + SLACK_S
            engine.forget()
            return engine.read_breaker is not BreakerState.CLOSED

        wait_until(opened, "an open breaker", 60.0)
        for _ in range(3):
            opened()
        engine.put(chunk_keys(4, start=500))
        end(place, fault)

        def resumed() -> bool:
            engine.put(keys)
            engine.forget()
            return engine.serve(keys)[0] == CHUNKS * TPC

        wait_until(resumed, "service after the fault", 60.0)
        engine.check_idle()


def test_a_server_that_begins_anew_is_written_again(place: Place) -> None:
    """Nothing of the part is left, the claim included: it is taken again, and its account begins anew."""
    keys = chunk_keys(CHUNKS)
    with Engine(place.make("mine", timeout_s=SHORT_S), 4 * CHUNKS, CHUNK) as engine:
        engine.put_down(keys)
        engine.forget()
        place.server.kill()
        place.server.start()
        assert engine.serve(keys)[0] == 0

        def written_again() -> bool:
            engine.put(keys)
            engine.forget()
            return engine.serve(keys)[0] == CHUNKS * TPC

        wait_until(written_again, "service after the restart", 60.0)
        engine.check_idle()
        wait_until(lambda: engine.ask(lambda _: engine.guard.usage().keys) == CHUNKS, "a true account", 30.0)


def test_an_engine_that_starts_before_its_server(place: Place) -> None:
    keys = chunk_keys(CHUNKS)
    place.server.kill()
    with Engine(place.make("mine", timeout_s=SHORT_S), 4 * CHUNKS, CHUNK) as engine:
        assert engine.serve(keys)[0] == 0
        assert "does not answer" in engine.guard.tier.notices[0]
        place.server.start()

        def served() -> bool:
            engine.put(keys)
            engine.forget()
            return engine.serve(keys)[0] == CHUNKS * TPC

        wait_until(served, "service once the server is there", 60.0)
        engine.check_idle()


def test_what_redis_evicts_is_a_miss(redis_server: RedisServer) -> None:
    """`maxmemory` is the hard limit; an evicted key is absent to the next probe."""
    place = Place("redis", redis_server)
    keys = chunk_keys(200)
    redis_server.say("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with Engine(place.make("mine", timeout_s=SHORT_S), 400, CHUNK) as engine:
        engine.put_down(keys)
        engine.forget()
        used = int(redis_server.say("INFO", "memory").split("used_memory:")[1].split()[0])
        redis_server.say("CONFIG", "SET", "maxmemory", str(used - 300_000))
        redis_server.say("SET", "filler", "x")
        hit, _ = engine.serve(keys)
        assert hit < len(keys) * TPC
        engine.check_idle()


def test_a_full_redis_refuses_stores_and_serves_loads(redis_server: RedisServer) -> None:
    place = Place("redis", redis_server)
    keys, more = chunk_keys(50), chunk_keys(50, start=100)
    with Engine(place.make("mine", timeout_s=SHORT_S), 400, CHUNK) as engine:
        engine.put_down(keys)
        redis_server.say("CONFIG", "SET", "maxmemory", "1")
        engine.put(more)
        wait_until(
            lambda: engine.ask(lambda manager: manager.statistics().tiers["redis"].cascade_failed), "a refusal", 30.0
        )
        engine.forget()
        assert engine.serve(keys)[0] == len(keys) * TPC
        engine.check_idle()


def test_what_is_used_on_redis_lives_longer_than_what_is_not(redis_server: RedisServer) -> None:
    place = Place("redis", redis_server)
    keys = chunk_keys(4)
    with (
        Runner(place.make("mine", ttl_s=60), 4, CHUNK) as writer,
        Runner(place.make("other", ttl_s=600), 4, CHUNK) as reader,
    ):
        assert len(writer.store(keys)) == 4
        assert set(reader.load(keys[:2]).values()) == {None}
        with redis.Redis.from_url(redis_server.url) as raw:
            left = {name[-36:]: raw.pttl(name) for name in raw.keys("kvstrata:c:*")}
            assert all(left[key] > 500_000 for key in keys[:2])
            assert all(0 < left[key] <= 60_000 for key in keys[2:])
            for key in keys[2:]:
                raw.pexpire(b"kvstrata:c:" + NAMESPACE + LAYOUT_TAG.to_bytes(8, "big") + key, 1)
            wait_until(lambda: raw.dbsize() == 4, "two values, a set and the claims")
        assert writer.present(keys) == keys[:2], "expired is absent"
        assert list(writer.load(keys).values()) == [None, None, FailCause.GONE, FailCause.GONE]
        assert writer.tier.usage().keys == 2
