"""The fs tier, killed at every file call it makes: it opens again, serves what was complete, and leaks nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstrata.testing import TierHarness, chunk_keys
from kvstrata.testing.tier_harness import NAMESPACE
from kvstrata.tiers.fs import FsTier

CHUNK = 1000
BLOCK = 4096
LIMIT = 8 * BLOCK
KEYS = chunk_keys(14)


def run_child(base: Path, first: int, last: int, step: int) -> str:
    script = Path(__file__).with_name("fs_kill_child.py")
    command = [sys.executable, str(script), str(base), str(first), str(last), str(step)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def told(base: Path, instant: int) -> tuple[set[bytes], set[bytes]]:
    """Keys whose store was reported done, and keys that were reported removed."""
    log = base / f"{instant}.log"
    lines = log.read_text().split() if log.exists() else []
    return tuple({bytes.fromhex(line[1:]) for line in lines if line[0] == sign} for sign in "+-")  # type: ignore[return-value]


def check_reopened(root: Path, stored: set[bytes], may_be_gone: set[bytes]) -> None:
    before = sum(len(files) for _, _, files in os.walk(root))
    rig = TierHarness(FsTier(str(root), limit=LIMIT), chunk_bytes=CHUNK).open()
    assert not rig.tier.notices  # type: ignore[attr-defined]
    found = rig.present(KEYS)
    record = rig.load(found)
    assert record.ok
    rig.check_loaded(record)
    assert stored - may_be_gone <= set(found)
    if (root / "tmp").exists():
        assert os.listdir(root / "tmp") == []
    held = rig.tier.usage().bytes_held
    files = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    assert held == sum(os.stat(file).st_blocks * 512 for file in files) <= LIMIT
    assert before - 2 <= len(files) <= before + 1
    assert rig.store(KEYS[:2]).ok
    rig.close()


@pytest.mark.slow
def test_killed_at_every_file_call(tmp_path: Path) -> None:
    calls = int(run_child(tmp_path, 0, 1, 1).split()[-1])
    assert calls > 200
    step = max(1, calls // 60) | 1  # odd, so that both halves of the ways to die occur
    run_child(tmp_path, 1, calls, step)
    _, may_be_gone = told(tmp_path, 0)
    instants = range(1, calls, step)
    assert len(instants) >= 50
    in_flight = 0
    for instant in instants:
        root = tmp_path / str(instant)
        stored, removed = told(tmp_path, instant)
        if root.exists():
            in_flight += bool((root / "tmp").exists() and os.listdir(root / "tmp"))
            check_reopened(root, stored, may_be_gone | removed)
    assert in_flight >= 5, "too few kills fell into a write"
    assert (tmp_path / "0" / NAMESPACE.hex()).exists()
