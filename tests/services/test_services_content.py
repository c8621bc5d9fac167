"""Wrong content under a right key is a miss, counted by its cause, and healed by the next store."""

from __future__ import annotations

import pytest
from services_stack import TPC, Engine, Place, Runner

from kvstrata.testing.tier_harness import OTHER_NAMESPACE, chunk_keys
from kvstrata.types import FailCause

CHUNK = 4096
BAD = {
    "other bytes": {FailCause.CORRUPT},
    "empty": {FailCause.WRONG_SIZE, FailCause.GONE},
    "short": {FailCause.WRONG_SIZE},
    "long": {FailCause.WRONG_SIZE},
    "of another namespace": {FailCause.FOREIGN},
    "of another key": {FailCause.FOREIGN},
    "noise": {FailCause.CORRUPT, FailCause.FOREIGN},
}


def spoil(place: Place, how: str, part: str) -> None:
    """Lay something bad under the key of the third chunk."""
    keys = chunk_keys(8)
    good = place.get(keys[2], part)
    match how:
        case "other bytes":
            bad = good[:-9] + bytes(9)
        case "empty":
            bad = b""
        case "short":
            bad = good[: len(good) // 2]
        case "long":
            bad = good + b"x"
        case "of another namespace":
            with Runner(place.make("elsewhere"), 8, CHUNK, namespace=OTHER_NAMESPACE) as runner:
                runner.store(keys[2:3])
            bad = place.get(keys[2], "elsewhere", OTHER_NAMESPACE)
        case "of another key":
            bad = place.get(keys[3], part)
        case _:
            bad = bytes(reversed(good))
    place.put(keys[2], part, bad)


@pytest.mark.parametrize("how", BAD)
@pytest.mark.parametrize("writer", ["mine", "other"])
def test_bad_content_is_a_miss_counted_and_healed(place: Place, how: str, writer: str) -> None:
    """`writer`: whether the part is the reader's own or another engine's, whose objects it may not delete."""
    keys = chunk_keys(8)
    with Runner(place.make(writer), 8, CHUNK) as runner:
        assert len(runner.store(keys)) == 8
    spoil(place, how, writer)
    with Runner(place.make("mine"), 8, CHUNK) as runner:
        outcome = runner.load(keys)
        assert {index for index, cause in outcome.items() if cause is not None} == {2}
        assert outcome[2] in BAD[how]
        assert runner.present(keys) == keys[:2] + keys[3:], "a probe and a load agree"
        assert len(runner.store(keys[2:3])) == 1
        assert runner.present(keys) == keys
        assert set(runner.load(keys).values()) == {None}


@pytest.mark.parametrize("how", BAD)
def test_a_request_gets_the_shorter_prefix(place: Place, how: str) -> None:
    keys = chunk_keys(8)
    with Engine(place.make("mine"), 32, CHUNK) as engine:
        engine.put_down(keys)
        engine.forget()
        spoil(place, how, "mine")
        assert engine.serve(keys)[0] == 2 * TPC
        engine.check_idle()
        counted = engine.ask(lambda manager: manager.statistics().tiers[place.kind].failed)
        assert set(counted) <= BAD[how]
        assert counted or place.kind == "redis", "Redis shows at the probe what is wrong with a header or a length"
