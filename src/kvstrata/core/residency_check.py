"""The recount of primary: every counter, list and membership against the columns. For tests and debugging."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstrata.core.slots import FREE, QUARANTINED, READY, RESERVED
from kvstrata.errors import InternalError

if TYPE_CHECKING:
    from kvstrata.core.residency import Residency


def check_residency(residency: Residency) -> None:
    """Raises `InternalError` naming the first thing that does not add up."""
    _check_bytes(residency)
    _check_keys(residency)
    _check_pages(residency)
    _check_policies(residency)


def _expect(what: str, kept: object, counted: object) -> None:
    if kept != counted:
        raise InternalError(f"residency check: {what}: kept {kept}, counted {counted}")


def _check_bytes(residency: Residency) -> None:
    table = residency.table
    rows = table.rows
    state, length = table.state[:rows], table.length[:rows]
    pins, holds = table.pins[:rows], table.holds[:rows]
    for name, value in (("reserved", RESERVED), ("resident", READY), ("quarantined", QUARANTINED)):
        _expect(f"{name} bytes", getattr(residency, f"{name}_bytes"), int(length[state == value].sum()))
    _expect("pinned bytes", residency.pinned_bytes, int(length[pins > 0].sum()))
    _expect("pinned ready bytes", residency.pinned_ready_bytes, int(length[(pins > 0) & (state == READY)].sum()))
    _expect("held bytes", residency.held_bytes, int(length[holds > 0].sum()))
    _expect("slots with fewer pins than holds", 0, int(np.count_nonzero(pins < holds)))
    _expect("slots with negative holds", 0, int(np.count_nonzero(holds < 0)))
    _expect("free slots with pins", 0, int(np.count_nonzero(pins[state == FREE])))
    used = residency.reserved_bytes + residency.resident_bytes + residency.quarantined_bytes
    _expect("conservation", residency.capacity_bytes, residency.free_bytes + used + residency.waste_bytes)
    _expect("free bytes", residency.free_bytes, _count_free(residency))
    _expect("negative waste", False, residency.waste_bytes < 0)


def _count_free(residency: Residency) -> int:
    """Free bytes by walking over all pages."""
    table, geometry = residency.table, residency.geometry
    free = (geometry.pages - table.carved) * geometry.page_bytes
    states = table.state.tobytes()
    for page in range(table.carved):
        shape = geometry.classes[int(table.page_class[page])]
        row = int(table.page_row[page])
        open_slots = states.count(FREE, row, row + shape.per_page)
        free += geometry.page_bytes if open_slots == shape.per_page else open_slots * shape.stride
    return free


def _check_keys(residency: Residency) -> None:
    state, index = residency.table.state, residency.index
    keyed = [slot for slot, key in enumerate(index.keys) if key]
    _expect("keys in the index", len(index.slots), len(keyed))
    for slot in keyed:
        _expect(f"slot of the key in slot {slot}", index.slots.get(index.keys[slot]), slot)
    live = np.flatnonzero((state == RESERVED) | (state == READY)).tolist()
    _expect("slots that must have a key", keyed, live)


def _check_pages(residency: Residency) -> None:
    table, geometry = residency.table, residency.geometry
    classes = len(geometry.classes)
    used_slots, used_pages, stuck_slots, stuck_pages = ([0] * classes for _ in range(4))
    empty = [set(pages) for pages in table.empty]
    rows = table.rows
    state, pins = table.state[:rows], table.pins[:rows]
    live = state != FREE
    states, stuck_marks = state.tobytes(), (live & ((state != READY) | (pins > 0))).tobytes()
    owned, offsets, strides = bytearray(rows), np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    for page in range(table.carved):
        kind, row = int(table.page_class[page]), int(table.page_row[page])
        shape = geometry.classes[kind]
        end = row + shape.per_page
        if end > rows or owned.count(1, row, end):
            _expect(f"rows of page {page} that are another page's, or not there", 0, (row, end))
        owned[row:end] = b"\1" * shape.per_page
        offsets[row:end] = np.arange(shape.per_page) * shape.stride + page * geometry.page_bytes
        strides[row:end] = shape.stride
        used, stuck = shape.per_page - states.count(FREE, row, end), stuck_marks.count(1, row, end)
        found = used, page in table.partial[kind], page in empty[kind]
        if found != (int(table.page_used[page]), 0 < used < shape.per_page, not used):
            _expect(f"used slots of page {page}, partial, empty", (int(table.page_used[page]), *found[1:]), used)
        if table.mixed and stuck != int(table.page_stuck[page]):
            _expect(f"stuck slots of page {page}", int(table.page_stuck[page]), stuck)
        used_slots[kind] += used
        used_pages[kind] += used > 0
        stuck_slots[kind] += stuck
        stuck_pages[kind] += stuck > 0
    in_pages = np.frombuffer(owned, np.bool_)
    _expect("slots at wrong offsets", 0, int(np.count_nonzero((table.offset[:rows] != offsets)[in_pages])))
    needed = table.length[:rows] + geometry.tail_room
    _expect("chunks that are too long", 0, int(np.count_nonzero((live & (needed > strides))[in_pages])))
    _expect("used slots outside of pages", 0, int(np.count_nonzero(live[~in_pages])))
    _expect("used slots", table.used_slots, used_slots)
    _expect("used pages", table.used_pages, used_pages)
    _expect("stuck slots", table.stuck_slots, stuck_slots)
    if table.mixed:
        _expect("stuck pages", table.stuck_pages, stuck_pages)
    _expect("empty pages listed", sum(map(len, table.empty)), table.carved - sum(used_pages))


def _check_policies(residency: Residency) -> None:
    table = residency.table
    ready = np.flatnonzero(table.state == READY)
    kinds = table.page_class[table.page_of(ready)]
    for kind, policy in enumerate(residency.policies):
        members = ready[kinds == kind].tolist()
        _expect(f"slots in the policy of class {kind}", len(policy), len(members))
        missing = [slot for slot in members if slot not in policy]
        _expect(f"ready slots unknown to the policy of class {kind}", missing, [])
    hidden = np.flatnonzero(table.hidden)
    loose = (table.state[hidden] != READY) | (table.pins[hidden] == 0)
    _expect("slots hidden from eviction without a pin", 0, int(np.count_nonzero(loose)))
