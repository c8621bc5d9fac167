"""What is done before serving: trials of tiers, the outlook for the operator, fences, the doctor."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_kit as kit

from kvstrata.cli.doctor import Verdict, _folder, doctor, examine
from kvstrata.config import config_from_dict
from kvstrata.errors import ConfigError
from kvstrata.integrations.vllm.fences import Sources, new_owners
from kvstrata.integrations.vllm.identity import hash_seed, weights_sample
from kvstrata.integrations.vllm.metadata import CopyJob, GroupCopy
from kvstrata.integrations.vllm.settings import VllmSettings
from kvstrata.integrations.vllm.shield import Shield, shielded
from kvstrata.integrations.vllm.stack import Stack
from kvstrata.integrations.vllm.startup import for_replica, largest_restore, outlook, restore_bytes
from kvstrata.runtime.clock import SystemClock
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.memory import MemoryTier
from kvstrata.types import FailCause, JobEnded, KeysDone, TierEvent, TierJob

SHAPE = kit.shape_of(kit.group(kit.full()), kit.group(kit.sliding(33)))


class SwappingTier(MemoryTier):
    """Gives back another key's bytes."""

    def submit_load(self, job: TierJob) -> None:
        super().submit_load(TierJob(job.job_id, job.keys[::-1], job.offsets, job.lengths))


class LosingTier(MemoryTier):
    """Takes everything and has nothing."""

    def submit_load(self, job: TierJob) -> None:
        self._events += [KeysDone(job.job_id, (), [(i, FailCause.GONE) for i in range(len(job.keys))])]
        self._events += [JobEnded(job.job_id)]


class LyingTier(MemoryTier):
    """Says that it brought what it did not bring."""

    def poll(self) -> list[TierEvent]:
        return super().poll()

    def submit_load(self, job: TierJob) -> None:
        self._events += [KeysDone(job.job_id, range(len(job.keys))), JobEnded(job.job_id)]


def stack(tier: type, size: int = 1 << 20) -> Stack:
    config = config_from_dict({"primary": {"size": size}, "tiers": [{"type": "memory", "name": "t"}]})
    return Stack(
        SHAPE.layout(), VllmSettings(config), bytes(16), make=lambda entry, layout: tier(name=entry.name)
    ).open()


@pytest.mark.scenario_57
@pytest.mark.parametrize("tier", [SwappingTier, LyingTier])
def test_a_tier_that_gives_other_bytes_is_not_used(tier: type) -> None:
    made = stack(tier)
    assert made.tiers == []
    assert "gave other bytes" in made.troubles["t"]
    made.close()


def test_a_tier_that_only_fails_is_kept_and_named() -> None:
    made = stack(LosingTier)
    assert [t.name for t in made.tiers] == ["t"]
    assert made.troubles["t"] == "did not give back what it was given: gone"
    made.close()


def test_a_good_tier_leaves_nothing_of_its_trial() -> None:
    made = stack(MemoryTier)
    assert made.troubles == {}
    assert made.rates["t"] > 0
    assert made.tiers[0].usage().keys == 0
    made.close()


def test_a_tier_whose_constructor_fails_is_left_out() -> None:
    def broken(**_: Any) -> None:
        raise OSError("no such device")

    made = stack(broken)  # type: ignore[arg-type]
    assert made.tiers == []
    assert "no such device" in made.troubles["t"]
    made.close()


@pytest.mark.scenario_132
def test_the_outlook_warns_of_a_primary_that_is_too_small() -> None:
    made = stack(MemoryTier, size=1 << 16)
    (line, good), *_ = outlook(made, 100_000)
    assert not good
    assert "of 100000 tokens; a larger primary than 65536" in line
    assert all(good for _, good in outlook(made, 64))
    layout = SHAPE.layout()
    fits = largest_restore(layout, 100_000, 30_000)
    assert restore_bytes(layout, fits) <= 30_000 < restore_bytes(layout, fits + 32)
    made.close()


@pytest.mark.scenario_120
def test_blocks_with_a_new_owner_fence_the_stores_that_read_them() -> None:
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(block_ids=([1, 2], [3]))],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[None, ([4], [])]),
        kv_cache_block_copies=[SimpleNamespace(dst_block_id=5)],
    )
    loads = [CopyJob(1, "r", [GroupCopy(0, [6], [0], [0])])]
    fresh = new_owners(output, loads)
    assert fresh == {1, 2, 3, 4, 5, 6}
    assert Sources(frozenset({6, 9}), volatile=False).endangered(fresh)
    assert not Sources(frozenset({9}), volatile=False).endangered(fresh)
    assert Sources.of(kit.shape_of(kit.group(kit.mamba())), [GroupCopy(0, [9], [0], [0])]).endangered(frozenset())


def test_weights_are_told_apart_by_samples(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    data = bytearray(3 << 20)
    file.write_bytes(data)
    first = weights_sample(tmp_path)
    assert weights_sample(tmp_path) == first
    data[0] = 1
    file.write_bytes(data)
    second = weights_sample(tmp_path)
    data[-1] = 1
    file.write_bytes(data)
    assert len({first, second, weights_sample(tmp_path)}) == 3


def test_a_random_seed_is_told() -> None:
    assert hash_seed("sha256", {}) == "fixed"
    assert hash_seed("xxhash", {}) is None
    assert hash_seed("xxhash", {"PYTHONHASHSEED": "0"}) == "given 0"


class Weak:
    def __init__(self) -> None:
        self.shield = Shield("test")

    @shielded(lambda: 7)
    def work(self, value: int) -> int:
        return 10 // value


def test_a_shielded_method_answers_and_counts() -> None:
    weak = Weak()
    assert [weak.work(0), weak.work(5), weak.work(0)] == [7, 2, 7]
    assert dict(weak.shield.faults) == {"work: ZeroDivisionError": 2}


def test_the_doctor_finds_a_good_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.cli.doctor.SPEED_BYTES", 8 << 20)
    entry = {"type": "disk", "path": str(tmp_path / "kv"), "limit": 64 << 20}
    findings = list(examine(config_from_dict({"primary": {"size": 1 << 20}, "tiers": [entry]})))
    assert [f.line() for f in findings if f.verdict is Verdict.FAIL] == []
    lines = [f.line() for f in findings]
    for what in (
        "memory: primary of 1048576 bytes",
        "shared memory: a trial of",
        "vLLM: ",
        "hash seed: is ",
        f"disk: {tmp_path / 'kv'}: limit 67108864, ",
        "disk: direct I/O works",
        "disk: writes ",
        "disk: self-test: what was written was read back",
    ):
        (line,) = [line for line in lines if what in line]
        assert "\n" not in line
    assert list(tmp_path.glob(".kvstrata-doctor*")) == []


def test_the_doctor_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    monkeypatch.setattr("kvstrata.cli.doctor.installed_version", lambda: "0.29.0")
    monkeypatch.setattr("kvstrata.cli.doctor.SPEED_BYTES", 4 << 20)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o777)
    open_to_all.chmod(0o777)
    entry = {"type": "fs", "path": str(open_to_all), "limit": 1 << 60}
    findings = list(examine(config_from_dict({"primary": {"size": 1 << 60}, "tiers": [entry]})))
    bad = {f.what: f for f in findings if f.verdict is Verdict.FAIL}
    assert set(bad) >= {"memory", "vLLM", "hash seed", "fs"}
    assert all(f.advice for f in findings if f.verdict is not Verdict.OK)
    assert "shared memory" in {f.what for f in findings}  # too large a primary hides nothing else


def test_the_doctor_names_a_place_without_direct_io_and_a_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.cli.doctor.SPEED_BYTES", 4 << 20)
    monkeypatch.setattr("kvstrata.cli.doctor.os.O_DIRECT", 1 << 30)  # a flag that no file system knows
    real = os.open

    def without_direct(path: Any, flags: int, mode: int = 0o777, **named: Any) -> int:
        if flags & (1 << 30):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode, **named)

    monkeypatch.setattr("kvstrata.cli.doctor.os.open", without_direct)
    found = list(_folder("disk", tmp_path / "kv", None, SystemClock()))
    assert [f.text for f in found if f.verdict is Verdict.WARN and "direct" in f.text] == [
        "no direct I/O here; buffered I/O costs memory and a copy"
    ]
    assert any("no limit is set" in f.text and f.advice for f in found)
    monkeypatch.setattr("kvstrata.cli.doctor.os.pwrite", lambda *_: 0)
    (full,) = [f for f in _folder("disk", tmp_path / "kv", None, SystemClock()) if f.verdict is Verdict.FAIL]
    assert (full.text.endswith("the device is full"), full.advice) == (True, "another dir, or free space")


def test_the_doctor_does_not_ignore_what_it_is_given() -> None:
    with pytest.raises(ConfigError, match="--limit: "):
        doctor(limit="5 parsecs")
    with pytest.raises(ConfigError, match="--config says all"):
        doctor(config=Path("x.json"), size="1GiB")


def test_the_doctor_looks_where_the_plug_in_would_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvstrata.cli.doctor.SPEED_BYTES", 4 << 20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    doctor(size="32MiB")
    said = capsys.readouterr().out
    assert f"disk: {tmp_path / 'kvstrata'}" in said
    assert "disk: self-test: what was written was read back" in said


class Hopeless(MemoryTier):
    """Cannot even be tried."""

    def open(self, context: TierContext) -> None:
        raise RuntimeError("no server")


def test_the_doctor_survives_a_tier_that_raises_anything() -> None:
    entry = {"type": f"{__name__}:Hopeless", "name": "far"}
    findings = [f.line() for f in examine(config_from_dict({"primary": {"size": 1 << 20}, "tiers": [entry]}))]
    assert any("FAIL" in line and "far" in line and "no server" in line for line in findings)


def test_replicas_share_a_folder_and_a_limit() -> None:
    entries = [{"type": "disk", "dir": "/kv", "limit": "100MB"}, {"type": "memory", "limit": 90}, {"type": "x:Y"}]
    settings = VllmSettings(config_from_dict({"tiers": entries}))
    assert for_replica(settings, 0, 1) is settings
    disk, memory, other = for_replica(settings, 2, 4).config.tiers
    assert disk.options == {"path": "/kv/rank-2", "limit": 25_000_000}
    assert memory.options == {"limit": 22}
    assert other.options == {}


def test_replicas_have_a_part_each_in_what_engines_share() -> None:
    entries = [
        {"type": "fs", "path": "/kv", "part": "host-7", "limit": "100MB", "shared_limit": "1GB", "cascade": False},
        {"type": "redis", "url": "redis://127.0.0.1/0", "limit": 90},
    ]
    settings = VllmSettings(config_from_dict({"tiers": entries}))
    shared, redis = for_replica(settings, 2, 4).config.tiers
    assert shared.options["path"] == "/kv"
    assert shared.options["part"] == "host-7-2"
    assert shared.options["limit"] == 25_000_000
    assert shared.options["shared_limit"] == 1_000_000_000
    assert not shared.cascade
    assert redis.options["part"].endswith("-2")
    assert redis.options["limit"] == 22
