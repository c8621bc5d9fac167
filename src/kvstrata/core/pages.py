"""The shape of primary: size classes, and one page size for all of them. Pure arithmetic, no state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstrata.errors import ConfigError

_MAX_SLOTS_TRIED = 64
_MAX_GROUPS = 32_767
_TOLERANCE = 0.0005

TAIL_ROOM_COST = 0.02
"""Largest share by which slots may grow for tail room."""


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Chunks whose aligned size is the same; `stride` bytes each, `per_page` of them in a page."""

    stride: int
    per_page: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """How `capacity_bytes` are cut: `pages` pages of `page_bytes`; what is left over at the end is not used.

    `class_of[g]` is the size class of group g, `lengths[g]` the true bytes of one of its chunks. Behind each chunk its
    slot has at least `tail_room` bytes more, in which one tier may write while it works on the chunk.
    """

    capacity_bytes: int
    page_bytes: int
    pages: int
    classes: tuple[SizeClass, ...]
    class_of: tuple[int, ...]
    lengths: tuple[int, ...]
    tail_room: int = 0

    @property
    def region_bytes(self) -> int:
        """The bytes that slots can lie in, from offset 0."""
        return self.pages * self.page_bytes


def make_geometry(capacity_bytes: int, group_bytes: Sequence[int], alignment: int = 1, tail_room: int = 0) -> Geometry:
    """Cuts primary for groups whose chunks have `group_bytes` bytes, every slot at a multiple of `alignment`.

    Raises `ConfigError` when a size makes no sense or the largest chunk does not fit once.
    """
    if alignment < 1:
        raise ConfigError(f"primary: alignment must be at least 1 byte, not {alignment}")
    if tail_room < 0:
        raise ConfigError(f"primary: tail room must be at least 0 bytes, not {tail_room}")
    if not group_bytes:
        raise ConfigError("primary: there are no groups to hold chunks of")
    if len(group_bytes) > _MAX_GROUPS:
        raise ConfigError(f"primary: {len(group_bytes)} groups are more than {_MAX_GROUPS}")
    for group, length in enumerate(group_bytes):
        if length < 1:
            raise ConfigError(f"primary: group {group} has chunks of {length} bytes")
    aligned = [slot_bytes(length, alignment, tail_room) for length in group_bytes]
    strides = sorted(set(aligned))
    if capacity_bytes < strides[-1]:
        raise ConfigError(
            f"primary: {capacity_bytes} bytes cannot hold one chunk of group {aligned.index(strides[-1])}"
            f" ({strides[-1]} bytes)"
        )
    page = choose_page_bytes(capacity_bytes, strides)
    return Geometry(
        capacity_bytes=capacity_bytes,
        page_bytes=page,
        pages=capacity_bytes // page,
        classes=tuple(SizeClass(stride, page // stride) for stride in strides),
        class_of=tuple(strides.index(stride) for stride in aligned),
        lengths=tuple(group_bytes),
        tail_room=tail_room,
    )


def slot_bytes(length: int, alignment: int, tail_room: int = 0) -> int:
    """What a slot takes for a chunk of `length` bytes and the room behind it."""
    return -(-(length + tail_room) // alignment) * alignment


def affordable_tail_room(wanted: int, capacity_bytes: int, group_bytes: Sequence[int], alignment: int) -> int:
    """`wanted` bytes behind each chunk, or 0 where that makes a slot of some group larger than `TAIL_ROOM_COST` allows,
    or primary too small for one chunk of each group.
    """
    roomy = [slot_bytes(length, alignment, wanted) for length in group_bytes]
    plain = [slot_bytes(length, alignment) for length in group_bytes]
    cheap = all(with_room <= without * (1 + TAIL_ROOM_COST) for with_room, without in zip(roomy, plain, strict=True))
    return wanted if cheap and sum(roomy) <= capacity_bytes else 0


def choose_page_bytes(capacity_bytes: int, strides: Sequence[int]) -> int:
    """The page size that wastes least for chunks of `strides` bytes (ascending).

    Waste is the rounding loss of the worst class, plus what the pages leave over at the end of primary, plus half a
    page for every class but one, which will have a page that is partly filled. Among sizes that are as good as the
    best (with one class: lose no slot more), the largest is taken: fewer pages cost less to keep.
    """
    costs = {page: _waste(page, capacity_bytes, strides) for page in _candidates(capacity_bytes, strides)}
    best = min(costs.values()) + (_TOLERANCE if len(strides) > 1 else 0.0)
    return max(page for page, cost in costs.items() if cost <= best)


def _candidates(capacity_bytes: int, strides: Sequence[int]) -> Iterable[int]:
    largest = strides[-1]
    most = min(capacity_bytes, largest * _MAX_SLOTS_TRIED)
    for stride in strides:
        first = -(-largest // stride)
        for count in range(first, first + _MAX_SLOTS_TRIED):
            if stride * count > most:
                break
            yield stride * count


def _waste(page: int, capacity_bytes: int, strides: Sequence[int]) -> float:
    rounding = max(page % stride for stride in strides) / page
    return rounding + (capacity_bytes % page) / capacity_bytes + (len(strides) - 1) * page / (2 * capacity_bytes)
