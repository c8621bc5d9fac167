"""How workers find primary: the memory of the scheduler's process, on the same host.

The region has no name in a file system. Its descriptor shows the engine's id; a worker looks for it among the
descriptors of its own process and of the processes that started it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass

from kvstrata.errors import StateError
from kvstrata.primary.region import SharedRegion

GENERATIONS = 4
"""How many parent processes up a worker looks."""

_own: dict[str, SharedRegion] = {}
"""Regions of this process by the engine they belong to."""


def region_name(engine_id: str) -> str:
    """What the system shows of the region of an engine."""
    return f"kvstrata-{engine_id[:200]}"


def publish(engine_id: str, region: SharedRegion) -> None:
    """Let workers in this process find the region."""
    _own[engine_id] = region


def withdraw(engine_id: str) -> None:
    """The region is going away."""
    _own.pop(engine_id, None)


@dataclass(frozen=True, slots=True)
class Attached:
    """A mapping of primary."""

    view: memoryview
    map: mmap.mmap | None

    def close(self) -> None:
        """Let go of the mapping; it stays while somebody uses a part of it."""
        if self.map is not None:
            with contextlib.suppress(BufferError):
                self.view.release()
                self.map.close()


def attach(engine_id: str) -> Attached:
    """Map the region of an engine. Raises `StateError` if it is not on this host."""
    region = _own.get(engine_id)
    if region is not None:
        return Attached(region.view, None)
    wanted = f"/memfd:{region_name(engine_id)}"
    process = os.getpid()
    for _ in range(GENERATIONS):
        process = _parent(process)
        if process <= 1:
            break
        path = _find(process, wanted)
        if path is not None:
            return _map(path)
    raise StateError(
        "primary was not found in the processes that started this worker: ranks on other hosts, or started by another "
        "service, cannot share it and are not supported yet"
    )


def _find(process: int, wanted: str) -> str | None:
    folder = f"/proc/{process}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    for name in names:
        with contextlib.suppress(OSError):
            target = os.readlink(f"{folder}/{name}")
            if target == wanted or target.startswith(wanted + " "):
                return f"{folder}/{name}"
    return None


def _map(path: str) -> Attached:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(file, os.fstat(file).st_size, flags=mmap.MAP_SHARED)
    finally:
        os.close(file)
    return Attached(memoryview(mapped), mapped)


def _parent(process: int) -> int:
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
