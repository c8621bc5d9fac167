"""What happens to bytes on the disk behind the tier's back: each damage is a miss with its cause, and only that."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import xxhash

from kvstrata.testing.simfs import FaultyFiles, SimDisk, SimFiles
from kvstrata.testing.tier_harness import OTHER_NAMESPACE, TierHarness, chunk_keys
from kvstrata.tiers.disk import DiskTier
from kvstrata.tiers.disk.desk import Place
from kvstrata.tiers.disk.format import BLOCK, Reject
from kvstrata.tiers.disk.work import segment_name
from kvstrata.types import FailCause, OffloadKey

PATH = "/disk"
CHUNK = 8192


def make(disk: SimDisk, *, verify: bool = True) -> TierHarness:
    tier = DiskTier(
        path=PATH, limit=3_000_000, segment_bytes=131_072, largest_chunk=1, files=SimFiles(disk), verify=verify
    )
    return TierHarness(tier, chunk_bytes=CHUNK)


def place_of(rig: TierHarness, key: OffloadKey) -> Place:
    assert isinstance(rig.tier, DiskTier)
    assert rig.tier._live is not None
    place = rig.tier._live.place_of(key)
    assert place is not None
    return place


def bytes_at(disk: SimDisk, place: Place) -> bytearray:
    return disk.file(PATH, segment_name(place.segment))


def kill(rig: TierHarness) -> None:
    assert isinstance(rig.tier, DiskTier)
    assert isinstance(rig.tier._files, SimFiles)
    rig.tier._files.kill()


def stored() -> tuple[SimDisk, TierHarness, list[OffloadKey]]:
    """Twelve chunks, one batch each."""
    disk = SimDisk()
    rig = make(disk).open()
    keys = chunk_keys(12)
    for key in keys:
        assert rig.store([key]).ok
    return disk, rig, keys


def expect_only(rig: TierHarness, keys: list[OffloadKey], bad: dict[int, FailCause]) -> None:
    record = rig.load(keys)
    assert {i: cause for i, cause in enumerate(record.causes) if cause} == bad
    rig.check_loaded(record)
    assert rig.present(keys) == [key for i, key in enumerate(keys) if i not in bad]
    for i, cause in bad.items():
        assert rig.tier.statistics().failures[cause] >= 1, i  # type: ignore[attr-defined]
        assert rig.store([keys[i]], variant=0).ok
    record = rig.load(keys)
    assert record.ok
    rig.check_loaded(record)


@pytest.mark.parametrize("at", [0, 1, 4095, CHUNK - 1])
def test_a_flipped_bit_of_a_payload(at: int) -> None:
    disk, rig, keys = stored()
    place = place_of(rig, keys[5])
    bytes_at(disk, place)[place.offset + at] ^= 0x10
    expect_only(rig, keys, {5: FailCause.CORRUPT})


def test_a_zeroed_page_of_a_payload() -> None:
    disk, rig, keys = stored()
    place = place_of(rig, keys[0])
    bytes_at(disk, place)[place.offset + 4096 : place.offset + 8192] = bytes(4096)
    expect_only(rig, keys, {0: FailCause.CORRUPT})


def test_two_payloads_that_changed_places() -> None:
    disk, rig, keys = stored()
    one, two = place_of(rig, keys[2]), place_of(rig, keys[3])
    file = bytes_at(disk, one)
    a, b = (bytes(file[p.offset : p.offset + p.length]) for p in (one, two))
    file[one.offset : one.offset + one.length] = b
    file[two.offset : two.offset + two.length] = a
    expect_only(rig, keys, {2: FailCause.CORRUPT, 3: FailCause.CORRUPT})


def test_two_whole_records_that_changed_places_are_misplaced_after_a_restart() -> None:
    disk, rig, keys = stored()
    one, two = place_of(rig, keys[2]), place_of(rig, keys[3])
    file = bytes_at(disk, one)
    span = BLOCK + CHUNK
    a, b = (bytes(file[p.offset - BLOCK : p.offset - BLOCK + span]) for p in (one, two))
    file[one.offset - BLOCK : one.offset - BLOCK + span] = b
    file[two.offset - BLOCK : two.offset - BLOCK + span] = a
    kill(rig)
    again = make(disk).open()
    assert again.present(keys) == [key for i, key in enumerate(keys) if i not in (2, 3)]
    assert again.tier.statistics().rejected_at_open[Reject.MISPLACED] >= 1  # type: ignore[attr-defined]
    record = again.load(again.present(keys))
    assert record.ok
    again.check_loaded(record)


def test_a_file_that_was_cut_short() -> None:
    disk, rig, keys = stored()
    place = place_of(rig, keys[11])
    last = max((place_of(rig, key) for key in keys), key=lambda p: (p.segment == place.segment, p.offset))
    del bytes_at(disk, last)[last.offset + 512 :]
    index = next(i for i, key in enumerate(keys) if place_of(rig, key) == last)
    record = rig.load(keys)
    assert {i: cause for i, cause in enumerate(record.causes) if cause} == {index: FailCause.WRONG_SIZE}
    rig.check_loaded(record)


def test_a_file_that_was_cut_short_while_nobody_looked() -> None:
    disk, rig, keys = stored()
    rig.close()
    name = next(name for name in disk.directories[PATH].names if name.startswith("segment-"))
    del disk.file(PATH, name)[40_960:]
    again = make(disk).open()
    record = again.load(keys)
    again.check_loaded(record)
    assert record.done
    assert again.store(chunk_keys(40, start=100)).ok
    assert again.load(again.present(keys)).ok
    again.close()


def _rewrite(disk: SimDisk, place: Place, change: Callable[[bytearray], None]) -> None:
    file = bytes_at(disk, place)
    start = place.offset - BLOCK
    block = bytearray(file[start : start + BLOCK])
    change(block)
    block[240:256] = xxhash.xxh3_128_digest(bytes(block[:240]) + bytes(block[256:]))
    file[start : start + BLOCK] = block


def reopened_without(disk: SimDisk, rig: TierHarness, keys: list[OffloadKey], missing: set[int]) -> TierHarness:
    """Killed and opened: all but those are there, and what is there can be read."""
    kill(rig)
    again = make(disk).open()
    assert again.present(keys) == [key for i, key in enumerate(keys) if i not in missing]
    record = again.load(again.present(keys))
    assert record.ok
    again.check_loaded(record)
    return again


def test_a_record_of_another_namespace() -> None:
    disk, rig, keys = stored()
    _rewrite(disk, place_of(rig, keys[4]), lambda block: block.__setitem__(slice(16, 32), OTHER_NAMESPACE))
    again = reopened_without(disk, rig, keys, {4})
    assert again.tier.statistics().records_of_others == 1  # type: ignore[attr-defined]


def test_a_record_of_another_layout() -> None:
    disk, rig, keys = stored()
    _rewrite(disk, place_of(rig, keys[4]), lambda block: struct.pack_into("<Q", block, 32, 5))
    again = reopened_without(disk, rig, keys, {4})
    assert again.tier.statistics().records_of_others == 1  # type: ignore[attr-defined]


def test_a_record_of_an_older_version() -> None:
    disk, rig, keys = stored()
    _rewrite(disk, place_of(rig, keys[7]), lambda block: struct.pack_into("<H", block, 8, 0))
    again = reopened_without(disk, rig, keys, {7})
    assert again.tier.statistics().rejected_at_open == {Reject.VERSION: 1}  # type: ignore[attr-defined]


@pytest.mark.parametrize("at", [3, 60, 150, 256, 300, 4095])
def test_a_flipped_bit_of_a_header_block(at: int) -> None:
    disk, rig, keys = stored()
    place = place_of(rig, keys[6])
    bytes_at(disk, place)[place.offset - BLOCK + at] ^= 1
    again = reopened_without(disk, rig, keys, {6})
    assert sum(again.tier.statistics().rejected_at_open.values()) == 1  # type: ignore[attr-defined]


def test_a_zeroed_page_of_a_segment_header() -> None:
    disk, rig, keys = stored()
    bytes_at(disk, place_of(rig, keys[0]))[:BLOCK] = bytes(BLOCK)
    reopened_without(disk, rig, keys, set())


def test_a_torn_last_record_is_not_there_after_a_crash() -> None:
    disk, rig, keys = stored()
    place = place_of(rig, keys[11])
    bytes_at(disk, place)[place.offset + 4096 : place.offset + 8192] = bytes(4096)
    again = reopened_without(disk, rig, keys, {11})
    assert again.tier.statistics().rejected_at_open == {Reject.DIGEST: 1}  # type: ignore[attr-defined]
    kill(again)
    third = make(disk).open()
    assert third.present(keys) == keys[:11]


@pytest.mark.parametrize("at", [0, 9, 100, 5000, -1])
def test_a_flipped_bit_of_the_checkpoint_costs_nothing(at: int) -> None:
    disk, rig, keys = stored()
    rig.close()
    disk.file(PATH, "checkpoint.kvs")[at] ^= 1
    again = make(disk).open()
    assert again.present(keys) == keys
    assert again.load(keys).ok


def test_without_verification_the_damage_would_be_delivered() -> None:
    disk, rig, keys = stored()
    rig.close()
    blind = make(disk, verify=False).open()
    assert blind.tier.damage(keys[3])  # type: ignore[attr-defined]
    record = blind.load(keys)
    assert record.ok
    with pytest.raises(AssertionError, match="wrong bytes"):
        blind.check_loaded(record)


def test_a_record_that_was_found_bad_does_not_come_back_from_the_checkpoint() -> None:
    disk, rig, keys = stored()
    rig.close()
    rig = make(disk).open()  # the checkpoint knows all of them now
    assert rig.tier.damage(keys[3])  # type: ignore[attr-defined]
    assert rig.load(keys).causes[3] is FailCause.CORRUPT
    reopened_without(disk, rig, keys, {3})


@pytest.mark.scenario_59
def test_a_segment_is_not_used_again_while_a_load_reads_it() -> None:
    disk = SimDisk()
    files = FaultyFiles(SimFiles(disk))
    tier = DiskTier(path=PATH, limit=450_000, segment_bytes=81_920, largest_chunk=1, files=files, hot_share=0.0)
    rig = TierHarness(tier, chunk_bytes=CHUNK).open()
    keys = chunk_keys(1)
    assert rig.store(keys).ok
    turns = 0

    def others_go_on(call: str) -> None:
        nonlocal turns
        if call == "preadv" and not turns:
            turns = 1
            for start in range(100, 200, 4):
                rig.submit_store(chunk_keys(4, start=start))
                for _ in range(12):
                    rig.executor.run_next()
                    rig.poll()

    job = rig.submit_load(keys)
    files.before = others_go_on
    rig.settle()
    assert turns
    assert keys[0] in rig.removed, "the segment was never wanted"
    assert rig.jobs[job].ok, rig.jobs[job].causes
    rig.check_loaded(rig.jobs[job])
