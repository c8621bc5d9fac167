"""How much memory this process may still take: the machine's and the containers' limits, read in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Bytes that can still be taken under one limit, and the words that name it."""

    source: str
    available: int
    limit: int | None = None
    used: int | None = None

    def describe(self) -> str:
        """For an error message: the limit with its numbers."""
        if self.limit is None or self.used is None:
            return f"{self.source}: {self.available} bytes available"
        return f"{self.source}: {self.available} bytes available ({self.used} of {self.limit} used)"


RoomReader: TypeAlias = Callable[[], list[MemoryRoom]]
"""Reads all limits that hold for this process; tests give their own."""


def read_memory_rooms(root: Path = Path("/")) -> list[MemoryRoom]:
    """Every limit on this process's memory that the system tells; unreadable ones are left out.

    `root` is where `proc` and `sys` lie.
    """
    rooms = [_machine_room(root)]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            rooms += _group_rooms(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            rooms += _group_rooms(
                root / "sys/fs/cgroup/memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
    return [room for room in rooms if room is not None]


def tightest(rooms: list[MemoryRoom]) -> MemoryRoom | None:
    """The limit with the least room, or None if none is known."""
    return min(rooms, key=lambda room: room.available, default=None)


def _machine_room(root: Path) -> MemoryRoom | None:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            amount = _number(rest.split()[0] if rest.split() else "")
            return None if amount is None else MemoryRoom("memory of the machine", amount * 1024)
    return None


def _group_rooms(base: Path, path: str, limit_name: str, used_name: str, cache_name: str) -> list[MemoryRoom | None]:
    """The limits of a control group and of every group above it.

    Inside a container the group's own path often does not exist; its limits are then found at `base` itself.
    """
    rooms: list[MemoryRoom | None] = []
    parts = [part for part in path.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        folder = base.joinpath(*parts[:depth])
        limit, used = _number(_read(folder / limit_name)), _number(_read(folder / used_name))
        if limit is None or used is None or limit >= _UNLIMITED:
            continue
        # File cache that nobody used lately is given up before the limit strikes.
        used = max(used - _statistic(folder / "memory.stat", cache_name), 0)
        rooms.append(MemoryRoom(f"memory limit of the container ({limit_name})", max(limit - used, 0), limit, used))
    return rooms


def _statistic(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value) or 0
    return 0


def _number(text: str) -> int | None:
    """A whole number, or None ("max", an empty or missing file)."""
    text = text.strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
