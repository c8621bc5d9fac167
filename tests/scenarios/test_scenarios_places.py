"""Scenarios about where tiers keep things: files, restarts, settings, and places that several engines share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from core_kit import FULL, TPC, fill, wide
from tiers_kit import CHUNK, LASTING, Place, clean, empty_primary, places, turn

from kvstrata.core.messages import EventKind
from kvstrata.errors import ConfigError
from kvstrata.layout.namespace import (
    RequestScope,
    request_scope,
    scoped_hash,
)
from kvstrata.testing.stack import CoreStack
from kvstrata.testing.tier_harness import TierHarness, chunk_keys
from kvstrata.tiers.registry import make_tier
from kvstrata.types import make_key

LIMIT = 1_000_000


# files


@pytest.mark.scenario_18
def test_a_newcomer_leaves_the_temporary_files_of_a_live_writer_alone(fs: Place) -> None:
    fs.root.mkdir(mode=0o700)
    (fs.root / "notes.txt").write_text("not ours")
    first = fs.rig(LIMIT)
    keys = chunk_keys(4)
    first.store(keys[:1])
    seen: list[list[Path]] = []

    def start_another(name: str) -> bool:
        """Runs when the live writer is about to rename what it has written."""
        if not seen:
            seen.append([])
            seen[0] = [path for path in fs.root.rglob("*.tmp") if path.is_file()]
            other = Place("fs", fs.root).rig(LIMIT)
            other.close()
            assert [path for path in seen[0] if not path.exists()] == []
        return False

    fs.files.fail("rename", when=start_another)
    assert first.store(keys[1:]).ok, "its renames succeed"
    assert seen[0], "there was a temporary file"
    assert first.present(keys) == keys
    first.close()
    assert (fs.root / "notes.txt").read_text() == "not ours"


@pytest.mark.scenario_40
@pytest.mark.scenario_123
def test_a_file_deleted_behind_the_tier_is_a_miss_and_told_once(fs: Place) -> None:
    tier = fs.tier()
    stack = CoreStack(FULL, [tier], config=wide(16), events=True)
    keys = fill(stack, "p", 4 * TPC, cascade=True)[0]
    empty_primary(stack, keys)
    for key in keys[1:3]:
        fs.file_of(key).unlink()
    stack.core.take_events()
    for name in ("a", "b"):
        assert turn(stack, name, "p", 4 * TPC) == TPC
    told = [key for event in stack.core.take_events() if event.kind is EventKind.REMOVED and event.place == "fs"
            for key in event.keys]  # fmt: skip
    assert sorted(told) == sorted(keys[1:3]), "one event each"
    for _ in range(2):  # evict, remove: none of it raises, and may be repeated
        tier.remove(keys)
        stack.pump()
    assert tier.usage().keys == 0
    assert tier.usage().bytes_held == 0
    clean(stack)


@pytest.mark.scenario_66
def test_half_of_the_files_deleted_while_serving_cost_their_own_hits_only(fs: Place) -> None:
    tier = fs.tier()
    stack = CoreStack(FULL, [tier], config=wide(64))
    keys = {f"p{i}": fill(stack, f"p{i}", 2 * TPC, cascade=True)[0] for i in range(20)}
    for one in keys.values():
        empty_primary(stack, one)
    for number in range(0, 20, 2):
        fs.file_of(keys[f"p{number}"][0]).unlink()
    hits = [turn(stack, f"r{i}", f"p{i}", 2 * TPC) for i in range(20)]
    assert hits == [0, 2 * TPC] * 10
    clean(stack)


@pytest.mark.scenario_103
@places(*LASTING)
def test_two_owners_of_one_path_are_told_apart(place: Place) -> None:
    first = place.rig(LIMIT)
    second = place.rig(LIMIT)
    keys = chunk_keys(3)
    assert first.store(keys).ok
    before = {path: path.read_bytes() for path in place.root.rglob("*") if path.is_file()}
    record = second.store(chunk_keys(3, start=50), variant=1)
    assert record.done == set(), "refused, or written elsewhere"
    assert all(path.read_bytes() == content for path, content in before.items())
    loaded = first.load(keys)
    assert loaded.ok
    first.check_loaded(loaded)
    second.close()
    first.close()


@pytest.mark.scenario_129
@places(*LASTING)
def test_a_private_place_says_that_it_is_one(place: Place) -> None:
    first = place.rig(LIMIT)
    second = place.rig(LIMIT)
    assert len(second.tier.notices) == 1  # type: ignore[attr-defined]
    first.close()
    second.close()


# identity over processes and restarts


_CHILD = """
import sys
from pathlib import Path
from kvstrata.layout.namespace import (
    EngineIdentity,
    GroupIdentity,
    ParallelShape,
    RequestScope,
    engine_digest,
    request_scope,
    scoped_hash,
)
from kvstrata.testing.tier_harness import TierHarness, chunk_keys
from kvstrata.tiers.registry import make_tier
kind, path, what = sys.argv[1:]
rig = TierHarness(make_tier(kind, path=path, limit=8_000_000), chunk_bytes=5000).open()
keys = chunk_keys(20)
if what == "store":
    assert rig.store(keys).ok
else:
    assert rig.present(keys) == keys
    record = rig.load(keys)
    assert record.ok
    rig.check_loaded(record)
rig.close()
print(keys[0].hex(), hash("x"))
"""


@pytest.mark.scenario_74
@pytest.mark.parametrize("kind", LASTING)
def test_two_processes_with_other_hash_seeds_agree_on_keys_and_find_them(kind: str, tmp_path: Path) -> None:
    said = []
    for seed, what in (("1", "store"), ("2", "find")):
        command = [sys.executable, "-c", _CHILD, kind, str(tmp_path / "place"), what]
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split())
    assert said[0][0] == said[1][0]
    assert said[0][1] != said[1][1], "the two processes really hash differently"


@pytest.mark.scenario_76
def test_adapters_make_disjoint_keys() -> None:
    block_hashes = [bytes([number]) * 32 for number in range(8)]
    sets = []
    for scope in (
        RequestScope(),
        RequestScope(adapter="a", adapter_version="1"),
        RequestScope(adapter="b", adapter_version="1"),
        RequestScope(adapter="a", adapter_version="2"),
    ):
        scoped = request_scope(scope)
        sets.append({make_key(scoped_hash(block_hash, scoped), 0) for block_hash in block_hashes})
        assert len(sets[-1]) == 8
    assert len(set.union(*sets)) == 4 * 8


# settings of stores


def open_object_tier(settings: dict[str, str]) -> None:
    rig = TierHarness(make_tier("object", **settings), chunk_bytes=CHUNK)
    rig.tier.open(rig.context())


@pytest.mark.scenario_85
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "tier object: url: is needed, as s3://BUCKET/PREFIX"),
        ({"url": "s3:///prefix"}, "url: s3:///prefix names no bucket"),
        ({"url": "s3://bucket/x", "credentials": "env:KVTEST"}, "environment variable KVTEST_ACCESS_KEY_ID is missing"),
        ({"url": "s3://bucket/x", "credentials": "hunter2"}, "credentials: write default, env:PREFIX"),
        ({"url": "s3://me:hunter2@bucket/x"}, "url: must hold no user, password or token"),
    ],
)
def test_what_an_object_store_lacks_is_named_and_no_secret_is_shown(settings: dict[str, str], words: str) -> None:
    pytest.importorskip("obstore", reason="the object tier is built on obstore, which is not installed")
    with pytest.raises(ConfigError) as caught:
        open_object_tier(settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.scenario_85
def test_a_tier_with_credentials_does_not_show_them(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    pytest.importorskip("obstore", reason="the object tier is built on obstore, which is not installed")
    monkeypatch.setenv("KVTEST_ACCESS_KEY_ID", "known")
    monkeypatch.setenv("KVTEST_SECRET_ACCESS_KEY", "hunter2")
    url = "s3://bucket/prefix"
    tier = make_tier("object", url=url, credentials="env:KVTEST", endpoint="http://127.0.0.1:9", timeout_s=0.2)
    rig = TierHarness(tier, chunk_bytes=CHUNK)
    with caplog.at_level("DEBUG"):
        rig.tier.open(rig.context())
        rig.executor.run_all()
        rig.poll()
    said = [repr(tier), str(vars(tier)), caplog.text, *map(str, getattr(tier, "notices", ()))]
    assert not any("hunter2" in text for text in said)
    rig.close()


# places that several engines share


@pytest.mark.scenario_129
@pytest.mark.scenario_103
def test_what_one_engine_stores_a_running_other_one_finds(tmp_path: Path) -> None:
    keys = chunk_keys(6)
    parts = [
        TierHarness(make_tier("fs", path=str(tmp_path / "shared"), part=name, limit=LIMIT), chunk_bytes=CHUNK).open()
        for name in ("a", "b")
    ]
    first, second = parts
    assert second.present(keys) == []
    assert first.store(keys).ok
    assert second.present(keys) == keys, "it looks at the place, not at a memory of its own"
    record = second.load(keys)
    assert record.ok
    second.check_loaded(record)
    assert second.store(chunk_keys(6, start=50), variant=1).ok
    files = [path.relative_to(tmp_path / "shared") for path in (tmp_path / "shared").rglob("*") if path.is_file()]
    owners = {name: {path for path in files if name in path.parts} for name in ("a", "b")}
    assert owners["a"]
    assert owners["b"]
    assert not owners["a"] & owners["b"], "each writes files of its own"
    for rig in parts:
        rig.close()
