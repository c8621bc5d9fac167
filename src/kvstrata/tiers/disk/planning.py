"""How jobs become file calls: chunks of a store into batches, records of a load into units. Pure functions."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvstrata.tiers.disk.format import BLOCK, RECORDS_PER_BATCH, SECTOR, align_up
from kvstrata.tiers.disk.work import BATCH_BYTES, UNIT_BYTES
from kvstrata.types import I64, Bool

_MOST_BATCH_BYTES = 8 << 20


class BatchPlan(msgspec.Struct, frozen=True, gc=False):
    """Some chunks of a job that share a header block. `places` are relative to the start of the batch."""

    picks: Sequence[int]
    places: Sequence[int]
    span: int
    straight: bool

    def places_from(self, start: int) -> I64:
        """The places in the file of a batch that begins at `start`."""
        places = self.places
        if isinstance(places, range):
            return np.arange(places.start + start, places.stop + start, places.step)
        return np.array(places, np.int64) + start

    def part(self, alive: Sequence[int]) -> BatchPlan:
        """The same with these of its chunks only, each at its place."""
        picks, places = [self.picks[at] for at in alive], [self.places[at] for at in alive]
        return BatchPlan(picks, places, self.span, self.straight)


def places_of(plans: Sequence[BatchPlan], starts: Sequence[int]) -> I64:
    """The places of several batches, one after the other. Those of whole jobs mostly share their plan."""
    plan = plans[0]
    if all(each is plan for each in plans):
        return np.add.outer(np.array(starts, np.int64), plan.places_from(0)).ravel()
    return np.concatenate([each.places_from(start) for each, start in zip(plans, starts, strict=True)])


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """Some records that are read by one call, in the order of their places."""

    picks: list[int]
    segment: int
    straight: bool


def is_straight(memory: I64, lengths: I64) -> Bool:
    """Which slots may be handed to the device themselves: whole sectors of 4 KiB and more at aligned addresses.

    `memory` are addresses. Everything else goes through a bounce buffer.
    """
    straight: Bool = (lengths >= BLOCK) & ((lengths | memory) % SECTOR == 0)
    return straight


def even_size(lengths: Sequence[int]) -> int:
    """The size that all chunks have; 0 if they differ."""
    size = lengths[0]
    return size if lengths.count(size) == len(lengths) else 0


def even_slots(offsets: Sequence[int], size: int, address: int) -> list[int]:
    """The slots of chunks of one size, a single one if they follow each other. No call per slot.

    Empty if one is not straight (see `is_straight`). `address`: of what the offsets count from.
    """
    first = offsets[0]
    if size < BLOCK or (size | first | address) % SECTOR:
        return []
    if all(map(operator.eq, offsets, range(first, first + size * len(offsets), size))):
        return [first]
    return [] if functools.reduce(operator.or_, offsets) % SECTOR else list(offsets)


def part_of_slots(slots: list[int], size: int, begin: int, end: int) -> list[int]:
    """Neighbours among the chunks of `even_slots`, in the same form."""
    return slots[begin:end] if len(slots) > 1 else [slots[0] + begin * size]


def plan_batches(picks: I64, memory: I64, lengths: I64, largest: int) -> list[BatchPlan]:
    """Batches of at most 64 records and about 2 MiB, in the order of `picks`; none has a span above `largest`.

    `memory` (addresses) and `lengths` belong to `picks`. Each single chunk fits.
    """
    straight = is_straight(memory, lengths)
    if straight.all():
        return _straight_batches(picks, lengths, largest)
    plans = _straight_batches(picks[straight], lengths[straight], largest) if straight.any() else []
    return plans + _packed_batches(picks[~straight].tolist(), lengths[~straight].tolist(), largest)


def _straight_batches(picks: I64, lengths: I64, largest: int) -> list[BatchPlan]:
    room = min(BATCH_BYTES, largest - BLOCK)
    plans = []
    sizes = lengths.tolist()
    numbers = picks.tolist()
    if len(set(sizes)) == 1:
        return _even_batches(numbers, sizes[0], room)
    at = 0
    while at < len(numbers):
        end, total, places = at, 0, []
        while end < len(numbers) and end - at < RECORDS_PER_BATCH and (end == at or total + sizes[end] <= room):
            places.append(BLOCK + total)
            total += sizes[end]
            end += 1
        plans.append(BatchPlan(numbers[at:end], places, align_up(BLOCK + total, BLOCK), True))
        at = end
    return plans


def batch_room(segment_bytes: int) -> int:
    """Most payload bytes of a batch of even chunks: what does not fit behind the last one of a segment is lost."""
    return min(max(segment_bytes // 64, BATCH_BYTES), _MOST_BATCH_BYTES)


def even_batches(picks: Sequence[int], size: int, room: int) -> Sequence[BatchPlan]:
    """Batches of straight slots of one size, of `room` payload bytes at most unless a single one is larger."""
    return _batches_of_range(picks, size, room) if isinstance(picks, range) else _even_batches(picks, size, room)


def _even_batches(picks: Sequence[int], size: int, room: int) -> list[BatchPlan]:
    count = max(1, min(RECORDS_PER_BATCH, room // size))
    places = range(BLOCK, BLOCK + count * size, size)
    plans = []
    for at in range(0, len(picks), count):
        part = picks[at : at + count]
        plans.append(BatchPlan(part, places[: len(part)], align_up(BLOCK + len(part) * size, BLOCK), True))
    return plans


@functools.lru_cache(maxsize=64)
def _batches_of_range(picks: range, size: int, room: int) -> tuple[BatchPlan, ...]:
    """Whole jobs are of few kinds, and plans never change: they are made once."""
    return tuple(_even_batches(picks, size, room))


def _packed_batches(picks: list[int], lengths: list[int], largest: int) -> list[BatchPlan]:
    room = min(BATCH_BYTES + BLOCK, largest)
    plans: list[BatchPlan] = []
    part: list[int] = []
    places: list[int] = []
    end = BLOCK
    for number, length in zip(picks, lengths, strict=True):
        place = packed_place(end, length)
        if part and (len(part) == RECORDS_PER_BATCH or place + length > room):
            plans.append(BatchPlan(part, places, align_up(end, BLOCK), False))
            part, places = [], []
            place = BLOCK
        part.append(number)
        places.append(place)
        end = place + length
    if part:
        plans.append(BatchPlan(part, places, align_up(end, BLOCK), False))
    return plans


def packed_place(end: int, length: int) -> int:
    """Where a record goes behind one that ends at `end`: large ones begin on a sector, small ones on 8 bytes."""
    return align_up(end, SECTOR if length >= BLOCK else 8)


def plan_units(segments: I64, places: I64, lengths: I64, memory: I64) -> list[UnitPlan]:
    """Units of neighbouring records of one segment, at most about 1 MiB each unless one record is larger."""
    order = np.lexsort((places, segments))
    straight = is_straight(memory, lengths)
    starts, sizes, homes = places[order], lengths[order], segments[order]
    ends = starts + sizes
    kinds = straight[order]
    gaps = starts[1:] - ends[:-1]
    near = np.where(kinds[1:], gaps == 0, (gaps >= 0) & (gaps < SECTOR))
    joined = (homes[1:] == homes[:-1]) & (kinds[1:] == kinds[:-1]) & near
    picks, sizes_list = order.tolist(), sizes.tolist()
    breaks = (np.flatnonzero(~joined) + 1).tolist()
    plans: list[UnitPlan] = []
    for begin, end in zip([0, *breaks], [*breaks, len(picks)], strict=True):
        home, kind = int(homes[begin]), bool(kinds[begin])
        plans += [UnitPlan(picks[a:b], home, kind) for a, b in _cuts(sizes_list, begin, end)]
    return plans


def even_parts(homes: list[int], places: list[int], most: int) -> list[tuple[int, int]] | None:
    """Slots of one size as ranges of one segment each, `most` at most; None if they are not in the order on disk."""
    borders = [0, len(homes)]
    if homes.count(homes[0]) != len(homes):
        borders[1:1] = [at for at in range(1, len(homes)) if homes[at] != homes[at - 1]]
        if len(borders) - 1 > len(set(homes)):
            return None
    parts = []
    for begin, end in itertools.pairwise(borders):
        own = places[begin:end]
        if own != sorted(own):
            return None
        parts += [(at, min(at + most, end)) for at in range(begin, end, most)]
    return parts


def _cuts(sizes: list[int], begin: int, end: int) -> list[tuple[int, int]]:
    cuts = []
    at, total = begin, 0
    for index in range(begin, end):
        if index > at and total + sizes[index] > UNIT_BYTES:
            cuts.append((at, index))
            at, total = index, 0
        total += sizes[index]
    cuts.append((at, end))
    return cuts


def pieces(digests: Sequence[bytes] | None, picks: Sequence[int]) -> bytes:
    """The digests of some chunks, concatenated; empty if there are none."""
    return b"" if digests is None else b"".join([digests[index] for index in picks])
