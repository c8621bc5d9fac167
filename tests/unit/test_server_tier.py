"""What every tier over a server does beyond the contract suite: time-outs, sickness, a part that is lost or taken."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import obstore
import pytest
from obstore.store import MemoryStore

from kvstrata.errors import ConfigError
from kvstrata.testing.faulty_store import FaultyClient
from kvstrata.testing.tier_harness import LAYOUT_TAG, NAMESPACE, TierHarness, chunk_keys, payload_of
from kvstrata.tiers.common.claims import Claim, list_claims
from kvstrata.tiers.common.record import HEADER_BYTES
from kvstrata.tiers.object import ObjectTier
from kvstrata.tiers.server.client import ReadItem, WriteItem
from kvstrata.tiers.server.core import State
from kvstrata.types import FailCause, JobEnded, OffloadKey, ProbeDone

CHUNK = 1000
SIZE = CHUNK + HEADER_BYTES


class Rig(TierHarness):
    """An object tier on a store in memory, with faults."""

    def __init__(self, store: MemoryStore | None = None, *, limit: int | None = None, **options: object) -> None:
        self.store_in_memory = store or MemoryStore()
        tier = ObjectTier("memory://x", store=self.store_in_memory, limit=limit, **{"part": "a", **options})  # type: ignore[arg-type]
        self.client = FaultyClient(tier._client)
        tier._client = self.client
        super().__init__(tier, chunk_bytes=CHUNK)
        self.object_tier = tier

    def lying(self, part: str = "a") -> int:
        return sum(meta["size"] for page in obstore.list(self.store_in_memory, f"parts/{part}") for meta in page)


def test_a_probe_that_does_not_come_back_is_answered_in_time() -> None:
    rig = Rig()
    rig.open()
    ticket = rig.tier.probe(chunk_keys(3))
    rig.clock.advance(9.9)
    rig.poll()
    assert ticket not in rig.probed
    rig.clock.advance(0.2)
    rig.poll()
    assert isinstance(ticket, int)
    assert rig.probed[ticket].error is FailCause.TIMEOUT
    assert not rig.probed[ticket].answers.any()
    rig.settle()  # the harness sees that it is not answered again
    rig.close()


def test_a_read_that_comes_back_too_late_touches_nothing() -> None:
    rig = Rig()
    rig.open()
    keys = chunk_keys(2)
    rig.store(keys)
    job = rig.submit_load(keys)
    rig.clock.advance(10.1)
    rig.poll()
    record = rig.jobs[job]
    assert record.causes == [FailCause.TIMEOUT] * 2
    assert record.ended is not None
    poisoned = bytes(rig._view)
    rig.settle()
    assert bytes(rig._view) == poisoned, "the ranges of an ended job were written"
    rig.check_loaded(rig.load(keys))
    rig.close()


def test_what_waits_is_not_given_up_while_others_come_to_their_end() -> None:
    rig = Rig()
    rig.open()
    keys = chunk_keys(200)
    for start in range(0, 200, 50):
        rig.store(keys[start : start + 50])
    job = rig.submit_load(keys)
    while rig.executor.pending:
        rig.clock.advance(4.0)
        rig.executor.run_all()
        rig.poll()
    assert rig.jobs[job].ok
    rig.close()


def test_an_index_is_not_believed_while_the_store_is_sick() -> None:
    rig = Rig()
    rig.open()
    keys = chunk_keys(2)
    rig.store(keys)
    assert rig.present(keys) == keys
    assert "exists" not in rig.client.calls, "what the own part has is known"
    rig.client.failing_reads = FailCause.IO_ERROR
    rig.load(keys)
    ticket = rig.tier.probe(keys)
    rig.settle()
    assert isinstance(ticket, int)
    assert rig.probed[ticket].error is FailCause.IO_ERROR, "the breaker has to learn of it"
    rig.client.failing_reads = None
    assert rig.present(keys) == keys
    rig.close()


def test_a_write_whose_outcome_is_unknown_counts_until_it_is_gone() -> None:
    rig = Rig(limit=3 * SIZE)
    rig.open()
    keys = chunk_keys(4)
    rig.client.failing_writes, rig.client.lands = FailCause.TIMEOUT, True
    assert rig.store(keys[:2]).causes == [FailCause.TIMEOUT] * 2
    assert rig.lying() == 2 * SIZE == rig.tier.usage().bytes_held
    assert rig.present(keys) == []
    assert rig.tier.usage().keys == 0
    rig.client.failing_writes, rig.client.lands = None, False
    assert rig.store(keys).causes.count(None) >= 3
    assert rig.lying() <= 3 * SIZE
    rig.close()


def test_a_full_queue_refuses() -> None:
    rig = Rig()
    rig.object_tier._max_queue = 4
    rig.client.failing_reads = None
    rig.tier.open(rig.context())
    job = rig.submit_store(chunk_keys(9))
    rig.settle()
    causes = rig.jobs[job].causes
    assert causes == [None] * 4 + [FailCause.REFUSED] * 5
    rig.close()


def test_a_store_that_is_away_at_start_is_tried_again() -> None:
    rig = Rig()
    rig.client.failing_reads = FailCause.IO_ERROR
    rig.open()
    assert rig.object_tier._state is State.DETACHED
    ticket = rig.tier.probe(chunk_keys(1))
    rig.poll()
    assert isinstance(ticket, int)
    assert rig.probed[ticket].error is FailCause.IO_ERROR
    assert rig.store(chunk_keys(1)).causes == [FailCause.REFUSED]
    rig.client.failing_reads = None
    rig.clock.advance(1.0)
    rig.settle()
    assert rig.store(chunk_keys(1)).ok
    assert "running without this tier" in rig.object_tier.notices[0]
    assert "is written by this engine now" in rig.object_tier.notices[1]
    rig.close()


def test_a_part_that_is_taken_away_is_taken_again_and_counted_anew() -> None:
    rig = Rig()
    rig.open()
    keys = chunk_keys(3)
    rig.store(keys)
    for page in obstore.list(rig.store_in_memory):
        obstore.delete(rig.store_in_memory, [meta["path"] for meta in page])
    rig.clock.advance(5.0)
    rig.settle()
    rig.clock.advance(1.0)
    rig.settle()
    usage = rig.tier.usage()
    assert (usage.keys, usage.bytes_held, usage.bytes_reserved) == (0, 0, 0)
    assert sorted(rig.removed) == sorted(keys)
    assert rig.store(keys).ok
    assert [claim.part for claim in list_claims(rig.client.claims)] == ["a"]
    rig.close()


def test_a_quota_that_does_not_fit_ends_the_start_with_the_numbers() -> None:
    first = Rig(limit=600, shared_limit=1000)
    first.open()
    second = Rig(first.store_in_memory, limit=500, shared_limit=1000, part="b")
    with pytest.raises(ConfigError, match=r"500 bytes.* 600 of 1000"):
        second.tier.open(second.context())
    assert list_claims(first.client.claims) == [Claim("a", 600, 1000)]
    first.close()


class Forgetful(FaultyClient):
    """A client that sees a record by its header, as Redis does: a bad one is there until it is discarded."""

    discarded: frozenset[bytes] = frozenset()

    def exists(self, keys: Sequence[OffloadKey], *, own: bool) -> list[bool | FailCause]:
        return [key not in self.discarded for key in keys]

    def discard(self, items: Sequence[ReadItem]) -> list[bool]:
        self.discarded |= {item.key for item in items}
        return super().discard(items)

    def write(self, items: Sequence[WriteItem]) -> None:
        super().write(items)
        self.discarded -= {item.key for item in items}


@pytest.mark.parametrize("part", ["a", "b"])
def test_what_was_read_as_bad_is_not_said_to_be_there_while_its_end_is_under_way(part: str) -> None:
    """`part`: the reader's own, or another engine's."""
    first = Rig()
    first.open()
    keys = chunk_keys(3)
    first.store(keys)
    first.close()
    path = f"parts/a/{NAMESPACE.hex()}{LAYOUT_TAG:016x}/{keys[1].hex()}"
    obstore.put(first.store_in_memory, path, bytes(obstore.get(first.store_in_memory, path).bytes())[:-1] + b"?")
    rig = Rig(first.store_in_memory, part=part)
    rig.client = rig.object_tier._client = Forgetful(rig.client.inner)
    rig.client.failing_scans = True
    rig.open()
    rig.settle()
    assert rig.object_tier._state is State.SCANNING
    assert rig.load(keys).causes == [None, FailCause.CORRUPT, None]
    assert rig.present(keys) == [keys[0], keys[2]], "a probe and a load agree"
    rig.client.failing_scans = False
    rig.clock.advance(1.0)
    rig.poll()  # the scan has ended, what was bad is about to be discarded
    assert rig.present(keys) == [keys[0], keys[2]]
    assert rig.store(keys[1:2]).ok
    assert rig.present(keys) == keys
    rig.check_loaded(rig.load(keys))
    rig.close()


class Overtaken(Forgetful):
    """Between its look at the store and its answer, all else that was asked of the store happens."""

    meanwhile: Callable[[], object] = bool
    looked: tuple[list[bool | FailCause], ...] = ()

    def exists(self, keys: Sequence[OffloadKey], *, own: bool) -> list[bool | FailCause]:
        found = super().exists(keys, own=own)
        self.looked += (found,)
        self.meanwhile()
        return found


@pytest.mark.parametrize("end", ["read as bad", "removed", "evicted"])
def test_what_has_ended_since_a_probe_looked_is_not_said_to_be_there(end: str) -> None:
    rig = Rig(limit=3 * SIZE)
    rig.client = overtaken = rig.object_tier._client = Overtaken(rig.client.inner)
    overtaken.trusts_index = False  # as where the server may drop records by itself: it is asked for all
    rig.open()
    keys = chunk_keys(4)
    rig.store(keys[:3])
    match end:
        case "read as bad":
            path = f"parts/a/{NAMESPACE.hex()}{LAYOUT_TAG:016x}/{keys[0].hex()}"
            obstore.put(rig.store_in_memory, path, bytes(SIZE))
            rig.submit_load(keys[:1])
            rig.executor.run_all()
            rig.poll()
        case "removed":
            rig.tier.remove(keys[:1])
        case _:
            rig.submit_store(keys[3:])
    ticket = rig.tier.probe(keys[:3])
    overtaken.meanwhile = rig.executor.run_all
    while not overtaken.looked:
        rig.executor.run_at(-1)  # the probe before what was asked first
    rig.settle()
    assert overtaken.looked == ([True] * 3,)
    left = {meta["path"].rsplit("/")[-1] for page in obstore.list(rig.store_in_memory, "parts/a") for meta in page}
    there = [key.hex() in left for key in keys[:3]]
    assert there.count(False) == 1
    assert rig.probed[ticket].answers.astype(bool).tolist() == there
    rig.close()


def test_another_engines_part_is_read_and_never_written() -> None:
    first = Rig()
    first.open()
    keys = chunk_keys(4)
    first.store(keys[:2])
    second = Rig(first.store_in_memory, part="b")
    second.open()
    assert second.present(keys) == keys[:2]
    second.check_loaded(second.load(keys[:2]))
    first.store(keys[2:])
    assert second.present(keys) == keys, "as soon as they are complete"
    second.tier.remove(keys)
    second.settle()
    assert first.lying() == 4 * SIZE
    second.close()
    first.close()


def test_a_part_that_begins_later_is_seen_within_a_second() -> None:
    first = Rig()
    first.open()
    second = Rig(first.store_in_memory, part="b")
    second.open()
    keys = chunk_keys(2)
    second.store(keys)
    first.clock.advance(1.0)
    assert first.present(keys) == keys
    first.check_loaded(first.load(keys))
    first.close()
    second.close()


def test_a_part_is_freed_only_if_nobody_writes_it() -> None:
    rig = Rig()
    rig.open()
    rig.store(chunk_keys(3))
    other = Rig(rig.store_in_memory, part="b").object_tier
    with pytest.raises(ConfigError, match="is written by process"):
        other.release("a", this_host_only=False)
    with pytest.raises(ConfigError, match="no part c"):
        other.release("c")
    rig.close()
    freed = other.release("a")
    assert (freed.records, freed.bytes, freed.kept) == (3, 3 * SIZE, 0)
    assert rig.lying() == 0
    assert not any("claims" in meta["path"] for page in obstore.list(rig.store_in_memory) for meta in page)


def test_loads_overtake_stores_that_wait() -> None:
    rig = Rig()
    rig.open()
    keys = chunk_keys(120)
    rig.store(keys[:1])
    store = rig.submit_store(keys[1:])
    load = rig.submit_load(keys[:1])
    rig.settle()
    ends = [event.job_id for event in rig.events if isinstance(event, JobEnded)]
    assert ends.index(load) < ends.index(store)
    assert not any(isinstance(event, ProbeDone) and event.error for event in rig.events)
    rig.close()


def test_what_lies_in_the_store_is_what_the_format_says() -> None:
    rig = Rig(limit=5000, shared_limit=9000)
    rig.open()
    key = chunk_keys(1)[0]
    rig.store([key])
    found = {meta["path"] for page in obstore.list(rig.store_in_memory) for meta in page}
    scope = NAMESPACE.hex() + f"{LAYOUT_TAG:016x}"
    assert found == {f"parts/a/{scope}/{key.hex()}", "claims/a", "claims/a.owner"}
    claim = json.loads(bytes(obstore.get(rig.store_in_memory, "claims/a").bytes()))
    owner = json.loads(bytes(obstore.get(rig.store_in_memory, "claims/a.owner").bytes()))
    assert claim == {"quota": 5000, "total": 9000}
    assert set(owner) == {"host", "boot", "pid", "started", "token"}
    record = bytes(obstore.get(rig.store_in_memory, f"parts/a/{scope}/{key.hex()}").bytes())
    assert record[HEADER_BYTES:] == payload_of(key, CHUNK)
    rig.close()
    assert "claims/a.owner" not in {meta["path"] for page in obstore.list(rig.store_in_memory) for meta in page}
