"""`kvstrata bench tier`: figures of a tier beside its bare library, on stores that need no server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstrata.cli.app import build_app, run


def bench(*arguments: str) -> int:
    return run(build_app(), ["bench", "tier", *arguments])


def test_a_tier_and_its_bare_library_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.json"
    entry = {"type": "object", "name": "folder", "url": f"file://{tmp_path}/objects", "part": "bench"}
    config.write_text(json.dumps({"tiers": [entry]}))
    figures = tmp_path / "figures.json"
    size = ["--sizes", "4KiB,16KiB", "--volume", "128KiB", "--pairs", "2"]
    assert bench("folder", "--config", str(config), *size, "--json", str(figures)) == 0
    told = json.loads(figures.read_text())
    assert [(row["chunk_bytes"], row["chunks"]) for row in told["rows"]] == [(4096, 32), (16384, 8)]
    for row in told["rows"]:
        for op in ("store", "load"):
            assert row[op]["tier_gbps"] > 0
            assert row[op]["bare_gbps"] > 0
            assert row[op]["ratio"] > 0
            assert row[op]["in_flight"] in (1, 4, 16)
    assert capsys.readouterr().out.count("bare") == 4
    left = [path for path in (tmp_path / "objects").rglob("*") if path.is_file() and "claims" not in path.parts]
    assert left == [], "the bench leaves nothing behind"


def test_a_tier_without_a_bare_library_is_measured_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("memory", "--sizes", "4KiB", "--volume", "64KiB", "--pairs", "1") == 0
    assert "bare" not in capsys.readouterr().out


def test_a_tier_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.json"
    config.write_text(json.dumps({"tiers": [{"type": "memory"}]}))
    assert bench("other", "--config", str(config)) == 2
    assert "there is no tier 'other'" in capsys.readouterr().err


def test_a_part_of_a_store_is_freed_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.json"
    entry = {"type": "object", "url": f"file://{tmp_path}/objects", "part": "bench"}
    config.write_text(json.dumps({"tiers": [entry, {"type": "memory"}]}))
    assert bench("object", "--config", str(config), "--sizes", "4KiB", "--volume", "64KiB", "--pairs", "1") == 0
    for name, part, code, said in (
        ("object", "bench", 0, "part bench: 0 records, 0 bytes freed"),
        ("object", "bench", 2, "there is no part bench"),
        ("memory", "bench", 2, "of a tier over a server"),
        ("object", "", 2, "of a tier over a server"),
    ):
        capsys.readouterr()
        assert run(build_app(), ["fsck", name, "--config", str(config), "--release", part]) == code
        captured = capsys.readouterr()
        assert said in captured.out + captured.err


def test_doctor_says_what_a_tier_over_a_server_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.json"
    entry = {"type": "object", "url": f"file://{tmp_path}/objects"}
    config.write_text(json.dumps({"primary": {"size": "16MiB"}, "tiers": [entry]}))
    assert run(build_app(), ["doctor", "--config", str(config)]) == 0
    out = capsys.readouterr().out
    assert "warn  object: no limit is set" in out
    assert "warn  object: its part is this host's name" in out
    assert "ok    object: self-test" in out
    config.write_text(
        json.dumps({"tiers": [{"type": "redis", "url": "redis://127.0.0.1:1/0", "part": "p", "limit": 9}]})
    )
    assert run(build_app(), ["doctor", "--config", str(config)]) == 1
    out = capsys.readouterr().out
    assert "FAIL  redis: self-test: tier redis: redis://127.0.0.1:1/0 does not answer" in out
    assert "its part" not in out
