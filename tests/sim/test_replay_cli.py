"""`kvstrata replay` as a user sees it: the table, the JSON, and one clear line for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstrata.cli.app import run
from kvstrata.cli.replay import load_trace, parse_scale, replay
from kvstrata.errors import ConfigError
from kvstrata.sim.workloads import DEFAULT_REQUESTS
from kvstrata.testing.clock import ManualClock
from kvstrata.testing.executor import InlineExecutor
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.registry import make_tier

import typer  # isort: skip

KEYS = {
    "requests",
    "prompt_tokens",
    "hit_tokens",
    "chunks_probed",
    "chunks_promoted",
    "chunks_consumed",
    "chunks_not_taken",
    "chunks_cancelled",
    "chunks_expired",
    "chunks_failed",
    "bytes_promoted",
    "bytes_consumed",
    "wrong_chunks",
    "corrupt_chunks",
    "tiers",
}
TIER_KEYS = {"bytes_held", "bytes_limit", "bytes_peak", "chunks_held", "evicted", "hit_tokens"}


def command(*arguments: str) -> int:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(replay)
    return run(app, [str(argument) for argument in arguments])


def test_the_report_as_table_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert command("--requests", "30", "--tier", "memory", "--primary", "8MB", "--json", str(file)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for word in ("128 tokens = 16.8 MB (stored as 16.4 kB)", "payload scale 1/1024", "hit tokens", "chunks promoted",
                 "time to first token, without", "evicted", "0 wrong chunks, 0 corrupt chunks"):  # fmt: skip
        assert word in out
    report = json.loads(file.read_text())
    assert set(report) >= KEYS
    assert set(report["tiers"]) == {"accelerator", "primary", "memory"}
    for tier in report["tiers"].values():
        assert set(tier) >= TIER_KEYS
    assert report["requests"] == 30
    assert report["tiers"]["primary"]["bytes_limit"] == 8_000_000
    assert report["settings"]["chunk_tokens"] == [128]


def test_unlimited_is_said_as_null(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    sizes = ("--primary", "unlimited", "--disk", "unlimited", "--payload-scale", "1/1048576")
    assert command("--requests", "5", "--dir", str(tmp_path / "d"), "--json", str(file), *sizes) == 0
    tiers = json.loads(file.read_text())["tiers"]
    assert tiers["primary"]["bytes_limit"] is tiers["disk"]["bytes_limit"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["absent.jsonl"], "absent.jsonl: cannot be read"),
        (["--model", "gpt"], "--model"),
        (["--primary", "many"], "--primary"),
        (["--primary", "-1"], "--primary"),
        (["--disk", "0"], "--disk"),
        (["--tier", "tape"], "--tier"),
        (["--requests", "0"], "--requests"),
        (["--requests", "few"], "--requests"),
        (["--concurrency", "0"], "--concurrency"),
        (["--chunk-tokens", "0"], "--chunk-tokens"),
        (["--payload-scale", "big"], "--payload-scale"),
        (["--payload-scale", "1/0"], "--payload-scale"),
        (["--payload-scale", "2"], "--payload-scale"),
        (["--damage", "7"], "--damage"),
        (["--json", "/nowhere/at/all.json"], "--json"),
        (["--nosuch"], "--nosuch"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert says in err
    assert "Traceback" not in err


def test_a_bad_trace_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    good = '{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1]}\n'
    trace.write_text(good + '{"timestamp": 0}\n')
    assert command(str(trace)) == 2
    assert f"{trace}:2: lacks the field `input_length`" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("tier", ["disk", "fs"])
def test_a_directory_that_is_a_file_is_one_line(tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("")
    assert command("--requests", "2", "--tier", tier, "--dir", str(tmp_path / "taken")) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "taken" in err


@pytest.mark.parametrize("tier", ["disk", "fs"])
def test_a_directory_that_another_engine_has_is_said_and_left_alone(
    tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_tier(tier, path=str(tmp_path))
    context = TierContext(memoryview(bytearray(64)), bytes(16), 0, ManualClock(), InlineExecutor())
    other.open(context)
    assert command("--requests", "3", "--tier", tier, "--dir", str(tmp_path)) == 0
    out, err = capsys.readouterr()
    other.close()
    assert str(tmp_path) in err
    assert "0 wrong chunks" in out


def test_scales_and_traces() -> None:
    assert parse_scale("1/1024") == parse_scale(" 1 / 1024 ") == 1 / 1024
    assert parse_scale("0.5") == 0.5
    for bad in ("", "x", "0", "-1", "1e999", "nan", "inf"):
        with pytest.raises(ConfigError, match="--payload-scale"):
            parse_scale(bad)
    assert len(load_trace(None, 7, 0).requests) == 7
    assert len(load_trace(None, None, 0).requests) == DEFAULT_REQUESTS
