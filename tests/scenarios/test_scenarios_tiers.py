"""Scenarios about what lies below primary: content and limits. Against each tier if it can be."""

from __future__ import annotations

import errno
import importlib.util
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from core_kit import FULL, TPC, fill, stack_of, statistics, sync_tier, wide
from tiers_kit import ALL, CHUNK, LASTING, Place, count_probes, empty_primary, places, turn

from kvstrata.errors import ConfigError
from kvstrata.layout.namespace import (
    EngineIdentity,
    GroupIdentity,
    ParallelShape,
    engine_digest,
)
from kvstrata.testing.simfs import SimDisk, SimFiles
from kvstrata.testing.stack import CoreStack
from kvstrata.testing.tier_contract import TierContract
from kvstrata.testing.tier_harness import TierHarness, chunk_keys
from kvstrata.tiers.common.index import Index
from kvstrata.tiers.disk import DiskTier
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.fs.find import Found
from kvstrata.tiers.registry import TIERS
from kvstrata.types import FailCause

LIMIT = 1_000_000
BLOCK = 4096
IDENTITY = EngineIdentity(
    model="m",
    revision="main",
    weights_digest=b"",
    kv_dtype="bfloat16",
    kv_scales="",
    groups=(GroupIdentity("full", (), (2, 16, 8, 64), ("l.0",), 16),),
    configuration=(("rope_theta", "150000"),),
    parallel=ParallelShape(),
    block_hash="sha256_cbor",
    hash_seed="0",
    tokens_per_hash=16,
    engine="e",
    kv_layout="NHD",
    epoch=b"e",
)


# content


@pytest.mark.scenario_4
def test_a_truncated_file_is_a_miss_for_all_until_it_is_stored_again(fs: Place) -> None:
    tier = fs.tier()
    assert isinstance(tier, FsTier)
    stack = CoreStack(FULL, [tier], config=wide(16))
    keys = fill(stack, "p", 3 * TPC, cascade=True)[0]
    empty_primary(stack, keys)
    probed = count_probes(tier)
    for name in ("a", "b"):
        stack.add(name, 3 * TPC, seed="p")
    load = tier.submit_load

    def truncate_first(job: object) -> None:  # after the probe has said that it is there
        file = fs.file_of(keys[1])
        os.truncate(file, file.stat().st_size // 2)
        load(job)  # type: ignore[arg-type]

    tier.submit_load = truncate_first  # type: ignore[method-assign]
    steps = 0
    answers: dict[str, int | None] = {"a": None, "b": None}
    before = 0
    while None in answers.values():
        steps += 1
        assert steps < 20
        for name in ("a", "b"):
            answers[name] = stack.poll(name, 0, 3 * TPC).hit
            before = before or len(probed)
        stack.wait(0.01)
    assert answers == {"a": TPC, "b": TPC}
    assert probed.count(keys[1]) <= 2, "one probe for each request, none after the failure"
    tier.submit_load = load  # type: ignore[method-assign]
    for name in ("a", "b"):
        stack.take(name, 0)
        stack.finish(name)
    fill(stack, "p", 3 * TPC, cascade=True)
    empty_primary(stack, keys)
    assert turn(stack, "c", "p", 3 * TPC) == 3 * TPC


@pytest.mark.scenario_5
def test_a_file_of_wrong_size_is_a_miss_of_probe_and_load(fs: Place) -> None:
    rig = fs.rig()
    keys = chunk_keys(2)
    rig.store(keys)
    file = fs.file_of(keys[0])
    rig.close()
    os.truncate(file, 4242)
    again = fs.rig()
    assert again.present(keys) == keys[1:]
    assert again.load(keys).causes == [FailCause.GONE, None]
    again.close()


@pytest.mark.scenario_5
def test_one_error_of_a_read_fails_one_load_and_keeps_the_file(fs: Place) -> None:
    rig = fs.rig()
    keys = chunk_keys(1)
    rig.store(keys)
    fs.fail_reads(errno.EIO, times=1)
    assert rig.load(keys).causes == [FailCause.IO_ERROR]
    assert fs.file_of(keys[0]).exists()
    assert rig.load(keys).ok
    rig.close()


@pytest.mark.scenario_19
def test_a_flipped_byte_fails_the_load_and_the_request_computes(fs: Place) -> None:
    tier = fs.tier()
    assert isinstance(tier, FsTier)
    stack = CoreStack(FULL, [tier], config=wide(16))
    keys = fill(stack, "p", 3 * TPC, cascade=True)[0]
    empty_primary(stack, keys)
    assert tier.damage(keys[1])
    assert turn(stack, "a", "p", 3 * TPC) == TPC
    assert statistics(stack).tiers["fs"].failed == {FailCause.CORRUPT: 1}


@pytest.mark.scenario_19
def test_a_tier_that_fails_fast_is_skipped_and_tried_again() -> None:
    tier = sync_tier()
    stack = stack_of(tiers=[tier])
    tier.on_load = lambda job: job.fail()
    for number in range(12):
        tier.put(stack.keys(f"p{number}", TPC)[0])
        assert turn(stack, f"r{number}", f"p{number}", TPC) == 0
    assert len(tier.calls_of("submit_load")) == stack.core._core.config.breaker_errors, "open: not asked any more"
    tier.auto()
    stack.wait(1.1)
    assert turn(stack, "trial", "p11", TPC) in (0, TPC), "half open: one trial"
    stack.wait(61.0)
    assert turn(stack, "well", "p0", TPC) == TPC


@pytest.mark.scenario_32
def test_the_third_of_five_loads_fails_alone(fs: Place) -> None:
    tier = fs.tier()
    stack = CoreStack(FULL, [tier], config=wide(16))
    keys = fill(stack, "p", 5 * TPC, cascade=True)[0]
    empty_primary(stack, keys)
    fs.files.fail("open", code=errno.EIO, when=lambda name: name == keys[2].hex())
    stack.add("a", 5 * TPC, seed="p")
    assert stack.poll_until_answered("a", 0, 5 * TPC) == 2 * TPC
    assert [slot >= 0 for slot in stack.core.residency.find(keys)] == [True, True, False, True, True]
    stack.take("a", 0)
    stack.finish("a")
    fs.heal()
    stack.wait(2.0)
    assert turn(stack, "b", "p", 5 * TPC) == 5 * TPC, "the next job works"
    assert not stack.tiers[0]._context.executor.raised  # type: ignore[attr-defined]


@pytest.mark.scenario_53
@places(*ALL)
def test_every_get_gives_the_full_bytes_or_a_miss(place: Place) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        place.root = place.root.with_name(f"place{seed}")
        rig = place.rig(LIMIT, seed=seed)  # tasks run in a seeded order: writes are delayed at random
        keys = chunk_keys(1000)
        loads = []
        for start in range(0, 1000, 8):
            rig.submit_store(keys[start : start + 8])
            for _ in range(int(rng.integers(6))):
                rig.step()
            loads.append(rig.submit_load([keys[int(i)] for i in rng.integers(0, start + 8, size=4)]))
            if len(rig._free) < 60:
                rig.settle()
        rig.settle()
        for job in loads:
            record = rig.jobs[job]
            assert record.ended is not None
            assert all(len(payload) == CHUNK for payload in record.payloads.values())
            rig.check_loaded(record)
        rig.close()


@pytest.mark.scenario_57
@pytest.mark.scenario_108
@places(*LASTING)
def test_a_tier_whose_reads_are_broken_is_found_by_its_self_test(place: Place) -> None:
    rig = place.rig(LIMIT)
    assert rig.tier.self_test() is None
    rig.settle()
    place.fail_reads(errno.EIO)
    said = rig.tier.self_test()
    assert said
    assert "\n" not in said
    place.heal()
    rig.settle()
    rig.close()


@pytest.mark.scenario_59
@places(*ALL)
@pytest.mark.parametrize("batch", [1, 6])
def test_what_is_reclaimed_while_a_load_is_out_is_never_delivered_as_something_else(place: Place, batch: int) -> None:
    for seed in range(6):
        place.root = place.root.with_name(f"place{seed}")
        rig = place.rig(300_000, seed=seed)
        keys = chunk_keys(6)
        rig.store(keys)
        loads = [rig.submit_load(keys[:batch]) for _ in range(3)]
        rig.tier.remove(keys[:1])
        for start in range(100, 180, 8):  # everything is overwritten meanwhile
            rig.submit_store(chunk_keys(8, start=start))
            rig.step()
            if len(rig._free) < 20:
                rig.settle()
        rig.settle()
        for job in loads:
            assert rig.jobs[job].ended is not None
            rig.check_loaded(rig.jobs[job])
        rig.close()


@pytest.mark.scenario_61
def test_without_direct_io_the_plain_path_is_taken_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    disk = SimDisk()
    disk.direct = False
    tier = DiskTier(path="/d", limit=LIMIT, segment_bytes=65_536, largest_chunk=CHUNK, files=SimFiles(disk))
    rig = TierHarness(tier, chunk_bytes=CHUNK)
    with caplog.at_level("INFO"):
        rig.open()
        keys = chunk_keys(20)
        rig.store(keys)
        record = rig.load(keys)
    assert record.ok
    rig.check_loaded(record)
    assert not tier.statistics().direct
    assert sum("direct" in line.getMessage().lower() for line in caplog.records) == 1
    rig.close()


@pytest.mark.scenario_64
@pytest.mark.scenario_71
@places(*LASTING)
def test_another_layout_finds_nothing_and_the_same_one_everything(place: Place) -> None:
    keys = chunk_keys(5)
    rig = place.rig(LIMIT, layout_tag=10)
    rig.store(keys)
    rig.close()
    other = place.rig(LIMIT, layout_tag=20)
    assert other.present(keys) == []
    assert other.load(keys).done == set()
    other.close()
    again = place.rig(LIMIT, layout_tag=10)
    assert again.present(keys) == keys
    record = again.load(keys)
    assert record.ok
    again.check_loaded(record)
    again.close()


@pytest.mark.scenario_73
@places(*LASTING)
def test_another_revision_of_the_model_finds_nothing(place: Place) -> None:
    one, two = IDENTITY, msgspec.structs.replace(IDENTITY, revision="another")
    keys = chunk_keys(3)
    for identity, expected in ((one, []), (two, []), (one, keys)):
        rig = place.rig(LIMIT, namespace=engine_digest(identity))
        assert rig.present(keys) == expected
        if identity is one:
            rig.store(keys)
        rig.close()


@pytest.mark.scenario_112
@places(*ALL)
def test_of_damaged_bytes_none_is_delivered(place: Place) -> None:
    rng = np.random.default_rng(1)
    rig = place.rig(20_000_000)
    keys = chunk_keys(1000)
    for start in range(0, 1000, 40):
        rig.store(keys[start : start + 40])
    bad = {keys[int(i)] for i in rng.choice(1000, size=10, replace=False)}
    assert all(rig.tier.damage(key) for key in bad)  # type: ignore[attr-defined]
    failed = set()
    for start in range(0, 1000, 40):
        record = rig.load(keys[start : start + 40])
        rig.check_loaded(record)
        failed |= {record.job.keys[i] for i, cause in record.failed.items() if cause is FailCause.CORRUPT}
    assert failed == bad
    rig.close()


# limits


@pytest.mark.scenario_16
def test_four_writers_never_exceed_a_budget_of_ten_chunks(fs: Place) -> None:
    fs.chunk = 1000
    for seed in range(5):
        fs.root = fs.root.with_name(f"place{seed}")
        rig = fs.rig(10 * BLOCK, seed=seed)
        rig.checks.append(lambda: pytest.fail("over the budget") if fs.used() > 10 * BLOCK else None)
        keys = chunk_keys(30)
        for start in range(0, 30, 3):  # four stores are under way at a time, temporary files included
            rig.submit_store(keys[start : start + 3])
            if start % 12 == 9:
                rig.settle()
        rig.settle()
        assert 0 < len(rig.present(keys)) <= 10
        rig.close()


@pytest.mark.scenario_16
def test_what_is_pinned_in_primary_survives_stores_that_find_no_room() -> None:
    stack = stack_of(config=wide(10))
    keys = fill(stack, "old", 10 * TPC)[0]
    stack.add("reader", 10 * TPC, seed="old")
    stack.poll("reader", 0, 10 * TPC)
    assert stack.take("reader", 10 * TPC) is not None
    stack.add("new", 5 * TPC)
    assert stack.store("new") is None, "it fails rather than exceed the limit"
    assert (stack.core.residency.find(keys) >= 0).all()


@pytest.mark.scenario_16
def test_a_restart_with_15_chunks_trims_to_ten_by_age(fs: Place) -> None:
    fs.chunk = 1000
    rig = fs.rig(15 * BLOCK)
    keys = chunk_keys(15)
    for key in keys:
        rig.store([key])
        rig.clock.advance(1.0)
    rig.close()
    again = fs.rig(10 * BLOCK, trims=True)
    assert again.present(keys) == keys[5:]
    assert fs.used() <= 10 * BLOCK
    again.close()


@pytest.mark.scenario_17
@pytest.mark.slow
def test_trimming_50_000_of_a_million_entries_is_one_pass() -> None:
    index = Index(950_000 * BLOCK)
    names = [number.to_bytes(36, "big") for number in range(1_000_000)]
    index.load(Found(name, BLOCK, at) for at, name in enumerate(names))
    victims = index.condemn(index.victims(index.excess))
    assert [victim.name for victim in victims] == names[:50_000]
    assert index.excess == 0


@pytest.mark.scenario_20
@pytest.mark.scenario_127
@places(*ALL)
def test_a_limit_of_one_megabyte_with_defaults_holds_under_five(place: Place) -> None:
    how = {"segment_bytes": None} if place.kind == "disk" else {}
    rig = place.rig(LIMIT, **how)
    for start in range(0, 1000, 20):
        rig.store(chunk_keys(20, start=start))  # 5 MB in all
        usage = rig.tier.usage()
        assert usage.bytes_held + usage.bytes_reserved <= LIMIT
        assert place.used() <= LIMIT
    assert rig.present(chunk_keys(1000))
    rig.close()


@pytest.mark.scenario_21
@pytest.mark.parametrize("name", TIERS)
def test_every_tier_runs_the_contract_that_writes_three_times_its_limit(name: str) -> None:
    module, _, tier = TIERS[name].partition(":")
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"the tier {name} is not built")
    texts = [
        p.read_text(encoding="utf-8")
        for p in Path(__file__).parent.parent.rglob("test_*.py")
        if p.name != Path(__file__).name
    ]
    suites = [text for text in texts if "TierContract" in text and tier in text]
    assert suites, "no contract suite"
    assert hasattr(TierContract, "test_the_limit_is_hard")
    assert not any("def test_the_limit_is_hard" in text for text in suites), "a tier may not have a softer test"


@pytest.mark.scenario_21
@places(*ALL)
def test_three_times_the_limit_is_offered_and_the_limit_holds(place: Place) -> None:
    rig = place.rig(LIMIT)
    keys = chunk_keys(3 * LIMIT // CHUNK)
    for start in range(0, len(keys), 24):
        rig.submit_store(keys[start : start + 24])
        rig.settle()
        assert place.used() <= LIMIT
    found = rig.present(keys)
    assert 0 < len(found) * CHUNK <= LIMIT
    rig.close()


@pytest.mark.scenario_67
@places(*ALL)
def test_chunks_of_one_minute_are_evicted_when_room_is_needed(place: Place) -> None:
    rig = place.rig(400_000)
    keys = chunk_keys(400)
    for start in range(0, 400, 10):
        assert rig.store(keys[start : start + 10]).ok
        rig.clock.advance(1.5)  # one minute in all
    assert rig.tier.usage().bytes_held <= 400_000
    assert rig.present(keys)[-1] == keys[-1]
    rig.close()


@pytest.mark.scenario_70
def test_a_deletion_that_is_refused_is_still_counted_and_tried_again(fs: Place) -> None:
    fs.chunk = 1000
    rig = fs.rig(4 * BLOCK)
    keys = chunk_keys(8)
    rig.store(keys[:4])
    refused = fs.files.fail("unlink", code=errno.EACCES)
    record = rig.store([keys[4]])
    assert record.ended is not None
    assert rig.tier.usage().bytes_held == 4 * BLOCK == fs.used()
    fs.files.clear(refused)
    rig.clock.advance(120.0)
    rig.settle()
    assert rig.store(keys[5:8]).ok
    assert fs.used() <= 4 * BLOCK
    rig.close()


@pytest.mark.scenario_70
@places(*ALL)
@pytest.mark.parametrize("limit", [0, -1])
def test_a_capacity_that_makes_no_sense_is_refused(place: Place, limit: int) -> None:
    with pytest.raises(ConfigError, match="limit"):
        place.rig(limit)


@pytest.mark.scenario_125
@places(*LASTING)
def test_twice_the_limit_of_old_files_is_trimmed_at_open(place: Place) -> None:
    rig = place.rig(2 * LIMIT)
    keys = chunk_keys(400)
    for start in range(0, 400, 20):
        rig.store(keys[start : start + 20])
    assert place.used() > 1.7 * LIMIT
    rig.close()
    again = place.rig(LIMIT, trims=True)
    assert place.used() <= LIMIT
    assert again.tier.usage().bytes_held <= LIMIT
    assert again.present(keys)
    again.close()
