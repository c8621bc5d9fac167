"""Kill -9 of a replay at many instants: the next one starts, serves what was complete or evicts it, leaks nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstrata.sim.replay import ReplaySettings, run_replay
from kvstrata.sim.workloads import builtin_workload

CHILD = Path(__file__).with_name("replay_crash_child.py")


def killed_at(instants: int, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(CHILD), str(folder), str(instants)],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def check_all(outcome: dict[str, Any]) -> None:
    whole = outcome["whole"]
    served = 0
    for run in outcome["runs"]:
        assert run["died_of"] == signal.SIGKILL
        after = run["after"]
        assert after["requests"] == whole["requests"]
        assert after["wrong_chunks"] == after["corrupt_chunks"] == 0
        assert after["hit_tokens"] >= whole["hit_tokens"]
        assert run["temporary"] == 0
        fs = after["tiers"]["fs"]
        assert fs["bytes_peak"] <= outcome["limit"]
        assert run["held"] <= outcome["limit"]
        served += after["hit_tokens"] > whole["hit_tokens"]
    assert served > len(outcome["runs"]) // 3


@pytest.mark.slow
def test_killed_at_eight_instants(tmp_path: Path) -> None:
    check_all(killed_at(8, tmp_path))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_killed_at_fifty_instants(tmp_path: Path) -> None:
    check_all(killed_at(50, tmp_path))


def settings(directory: Path) -> ReplaySettings:
    return ReplaySettings(directory=directory, payload_scale=1e-9, primary_bytes=64 * 300, tier="fs")


def test_damaged_and_foreign_files_are_misses_and_counted(tmp_path: Path) -> None:
    trace = builtin_workload(30, 8)
    first = run_replay(settings(tmp_path), trace).report
    chunks = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 64)
    for number, path in enumerate(chunks):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        if number % 4 == 0:
            path.write_bytes(content)
        elif number % 16 == 1:
            path.write_bytes(content[:-1])
        elif number % 16 == 2:
            path.write_bytes(b"\xff" * len(content))
    (tmp_path / "notes.txt").write_text("of somebody else")
    second = run_replay(settings(tmp_path), trace).report
    assert second.wrong_chunks == 0
    assert second.corrupt_chunks > 0
    assert second.failed_loads >= second.corrupt_chunks
    assert second.requests == first.requests
    assert second.chunks_promoted == second.chunks_consumed + second.chunks_failed + second.chunks_not_taken
    assert (tmp_path / "notes.txt").read_text() == "of somebody else"


def test_one_request_then_silence_reaches_the_tier(tmp_path: Path) -> None:
    """After the last step of the engine only the driver goes on: all that was offered is in the tier."""
    report = run_replay(settings(tmp_path), builtin_workload(1, 8)).report
    assert report.chunks_stored > 0
    assert report.tiers["fs"].chunks_held == report.chunks_stored
    assert report.cascades_dropped == 0
