"""Helper of test_replay_crash: replays that kill themselves at a given instant, and the replays that come after.

Runs in its own process, without threads, so that each replay can be a fork. An instant is a count of file operations
of the tier (seen by an audit hook: open, rename, remove, link, ...) and of payloads written.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from kvstrata.sim.replay import ReplaySettings, run_replay
from kvstrata.sim.workloads import builtin_workload
from kvstrata.tiers.fs.files import RealFileSystem

LIMIT = 400 * 4096
FILE_METHODS = [
    name for name in vars(RealFileSystem) if not name.startswith("_") and callable(getattr(RealFileSystem, name))
]


class Countdown:
    """Kills the process at the n-th call into the tier's files, before the call or after it."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.seen = 0

    def tick(self) -> None:
        self.seen += 1
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def arm(countdown: Countdown) -> None:
    for name in FILE_METHODS:
        original = getattr(RealFileSystem, name)

        def counted(*args: object, _original: object = original, **more: object) -> object:
            countdown.tick()
            result = _original(*args, **more)  # type: ignore[operator]
            countdown.tick()
            return result

        setattr(RealFileSystem, name, counted)


def replay(directory: Path) -> dict[str, object]:
    settings = ReplaySettings(
        directory=directory, disk_bytes=LIMIT, primary_bytes=64 * 300, payload_scale=1e-9, tier="fs"
    )
    return run_replay(settings, builtin_workload(30, 8)).report.as_dict()


def in_fork(directory: Path, at: int) -> tuple[int, dict[str, object]]:
    """Exit signal (0: none) and report of a replay in a child that dies at `at` (0: never)."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        countdown = Countdown(at)
        arm(countdown)
        report = replay(directory)
        report["calls"] = countdown.seen
        os.write(write, json.dumps(report).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, json.loads(text) if text else {}


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def main(folder: Path, instants: int) -> None:
    _, whole = in_fork(folder / "whole", 0)
    calls = int(str(whole["calls"]))
    results = []
    for number in range(instants):
        directory = folder / str(number)
        died_of, _ = in_fork(directory, 1 + calls * (2 * number + 1) // (2 * instants))
        left = len(files(directory))
        _, after = in_fork(directory, 0)
        temporary = [path for path in files(directory) if "tmp" in path.relative_to(directory).parts]
        held = sum(path.stat().st_blocks * 512 for path in files(directory))
        results.append({"died_of": died_of, "left": left, "after": after, "temporary": len(temporary), "held": held})
    json.dump({"whole": whole, "runs": results, "limit": LIMIT}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
