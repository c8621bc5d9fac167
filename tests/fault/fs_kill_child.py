"""Runs one script of fs tier work in many forks, each killed at another file call. Started by test_fs_kill.py.

    python fs_kill_child.py BASE FIRST LAST STEP

For each instant n of range(FIRST, LAST, STEP) a fork works in BASE/n and is killed by SIGKILL right before (even n) or
in the middle of (odd n, writes only half done) its n-th file call. Instant 0 is not killed. What the fork was told is
appended to BASE/n.log: "+KEY" for a store reported done, "-KEY" for a key reported removed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from kvstrata.testing import TierHarness, chunk_keys
from kvstrata.testing.faulty_files import FaultyFileSystem
from kvstrata.tiers.fs import FsTier
from kvstrata.types import KeysDone, KeysRemoved

CHUNK = 1000
LIMIT = 8 * 4096


class KillingFiles(FaultyFileSystem):
    """Real files; the process dies at the `instant`-th call."""

    def __init__(self, instant: int) -> None:
        super().__init__()
        self.instant = instant

    def _enter(self, call: str, name: str = "") -> None:
        super()._enter(call, name)
        if len(self.log) == self.instant and not (call == "write" and self.instant % 2):
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        """Die in the middle of a write."""
        self._enter("write")
        if len(self.log) == self.instant:
            joined = b"".join(buffers)
            os.pwrite(fd, joined[: len(joined) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        self.log.pop()
        super().write(fd, buffers, offset)


class Told(TierHarness):
    """Writes down what it is told, at once."""

    log_fd = -1

    def poll(self) -> list:  # type: ignore[type-arg]
        events = super().poll()
        for event in events:
            if isinstance(event, KeysDone) and not self.jobs[event.job_id].is_load:
                self._say("+", [self.jobs[event.job_id].job.keys[index] for index in event.done])
            elif isinstance(event, KeysRemoved):
                self._say("-", event.keys)
        return events

    def _say(self, sign: str, keys: Sequence[bytes]) -> None:
        os.write(self.log_fd, "".join(f"{sign}{key.hex()}\n" for key in keys).encode())


def work(base: str, instant: int) -> None:
    files = KillingFiles(instant or 1_000_000)
    keys = chunk_keys(14)
    for start in (0, 7):  # two lives, so that opening with old files is cut short too
        rig = Told(FsTier(f"{base}/{instant}", limit=LIMIT, files=files), chunk_bytes=CHUNK)
        rig.log_fd = os.open(f"{base}/{instant}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        rig.open()
        rig.store(keys[start : start + 4])
        rig.load(keys[:4])
        rig.tier.touch(keys[:2])
        rig.store(keys[start + 4 : start + 7])
        rig.flush()
        rig.tier.remove([keys[start]])
        rig.close()
        os.close(rig.log_fd)
    os.write(1, f"{len(files.log)}\n".encode())


def main() -> None:
    base, first, last, step = sys.argv[1], *map(int, sys.argv[2:])
    for instant in range(first, last, step):
        child = os.fork()
        if not child:
            work(base, instant)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        expected = 0 if not instant else signal.SIGKILL
        if os.waitstatus_to_exitcode(status) not in (0, -expected):
            raise SystemExit(f"instant {instant}: status {status}")


if __name__ == "__main__":
    main()
