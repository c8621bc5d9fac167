"""`kvstrata fsck` and `kvstrata inspect` on directories of the disk tier, sound and damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvstrata.cli.fsck import fsck
from kvstrata.cli.inspect import inspect
from kvstrata.errors import ConfigError
from kvstrata.testing.tier_harness import NAMESPACE, OTHER_NAMESPACE, TierHarness, chunk_key, chunk_keys
from kvstrata.tiers.disk import DiskTier
from kvstrata.tiers.disk.io import SystemFiles
from kvstrata.tiers.disk.survey import repair, survey

CHUNK = 8192


def rig_on(place: Path, **how: object) -> TierHarness:
    tier = DiskTier(path=str(place), limit=2_000_000, segment_bytes=131_072, largest_chunk=1)
    return TierHarness(tier, chunk_bytes=CHUNK, **how).open()  # type: ignore[arg-type]


def run(command: object, *arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(command)  # type: ignore[arg-type, type-var]
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def test_a_sound_directory_is_sound(place: Path) -> None:
    rig = rig_on(place)
    rig.store(chunk_keys(20))
    rig.close()
    code, said = run(fsck, str(place))
    assert code == 0
    assert "20 records held, 20 verified" in said
    assert "checkpoint: ok" in said


def test_damage_is_reported_by_cause_and_dropped_by_repair(place: Path) -> None:
    rig = rig_on(place)
    keys = chunk_keys(20)
    rig.store(keys)
    for key in keys[3:5]:
        assert rig.tier.damage(key)  # type: ignore[attr-defined]
    rig.close()
    code, said = run(fsck, str(place), "--json")
    told = json.loads(said)
    assert code == 3
    assert told["bad"] == {"digest": 2}
    assert told["verified"] == 18
    code, said = run(fsck, str(place), "--repair")
    assert code == 0
    assert "dropped: 2 records" in said
    assert run(fsck, str(place))[0] == 0
    for checkpoint in (True, False):
        if not checkpoint:
            (place / "checkpoint.kvs").unlink()
        again = rig_on(place)
        assert again.present(keys) == [key for key in keys if key not in keys[3:5]]
        assert again.load(again.present(keys)).ok
        files = again.tier._files  # type: ignore[attr-defined]
        assert files is not None
        again.close()


def test_a_bad_checkpoint_and_leftovers_are_reported_and_cleaned(place: Path) -> None:
    rig = rig_on(place)
    keys = chunk_keys(9)
    rig.store(keys)
    rig.close()
    content = bytearray((place / "checkpoint.kvs").read_bytes())
    content[-1] ^= 1
    (place / "checkpoint.kvs").write_bytes(content)
    (place / "checkpoint.tmp").write_bytes(b"half")
    (place / "notes.txt").write_bytes(b"of somebody else")
    code, said = run(fsck, str(place))
    assert code == 3
    assert "checkpoint: digest" in said
    assert "left over: checkpoint.tmp" in said
    assert "not ours, left alone: notes.txt" in said
    assert run(fsck, str(place), "--repair")[0] == 0
    assert run(fsck, str(place))[0] == 0
    assert (place / "notes.txt").read_bytes() == b"of somebody else"
    again = rig_on(place)
    assert again.present(keys) == keys
    again.close()


def test_a_directory_in_use_is_not_repaired(place: Path) -> None:
    rig = rig_on(place)
    rig.store(chunk_keys(3))
    assert survey(SystemFiles(), str(place)).in_use
    with pytest.raises(ConfigError, match="in use"):
        repair(SystemFiles(), str(place))
    rig.close()
    assert not survey(SystemFiles(), str(place)).in_use


def test_what_is_no_directory_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        survey(SystemFiles(), str(tmp_path / "nothing"))


def test_inspect_shows_namespaces_groups_and_segments(place: Path) -> None:
    rig = rig_on(place)
    rig.store(chunk_keys(10))
    rig.store([chunk_key(n, group=3) for n in range(4)], length=1000)
    rig.close()
    other = rig_on(place, namespace=OTHER_NAMESPACE)
    other.store(chunk_keys(5), variant=2)
    other.close()
    code, said = run(inspect, str(place), "--json")
    assert code == 0
    told = json.loads(said)
    held = {(each["namespace"], each["group"]): each for each in told["held"]}
    assert held[NAMESPACE.hex(), 0]["records"] == 10
    assert held[NAMESPACE.hex(), 3]["payload_bytes"] == 4000
    assert held[OTHER_NAMESPACE.hex(), 0]["records"] == 5
    assert 0 < told["fill"] < 1
    assert sum(each["live"] for each in told["segments"]) == 19
    assert all(each["oldest_us"] == 1_700_000_000_000_000 for each in told["held"])
    code, said = run(inspect, str(place))
    assert code == 0
    assert "19 records" in said
