"""Gathers what is known of a request's keys, group by group, without moving a byte (phase 1 of the two-phase door).

Full-attention groups come first, in steps with an early stop: their first absent chunk bounds the boundary, so that
the other groups are asked only below it. Tiers that answer from memory are asked on the spot; the others only for the
keys that the planner names, and their answers are kept with the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from kvstrata.core import galloping
from kvstrata.core.arrays import NO_SLOTS, any_of, count_of, no_slots, slot_array, where
from kvstrata.core.galloping import ASKED, NOT_ASKED
from kvstrata.core.requests import Request
from kvstrata.core.slots import READY
from kvstrata.core.state import CoreState, TierState
from kvstrata.layout.groups import Range
from kvstrata.layout.planner import Decision
from kvstrata.layout.search import Search, all_present
from kvstrata.layout.spans import NOTHING
from kvstrata.types import I8, I64, OffloadKey, Presence, ProbeDone

STEP = 1024
"""Keys of a full-attention group that are looked at before checking for the first absent one."""

TOGETHER = 128
"""Chunks of several groups, at most so many, are looked at together: above it, one absent in a group spares others."""

ABSENT, UNKNOWN, PRESENT, ASSUMED = (np.int8(value) for value in Presence)
_NOTHING: I8 = np.zeros(0, np.int8)

NOT_READ = -1
"""Source of a chunk that no tier needs to be read for: it is in primary, or nowhere."""


_NOWHERE: I8 = np.full(1 << 10, NOT_READ, np.int8)


def nowhere(chunks: int) -> I8:
    """The sources of so many chunks that no tier is read for; not to be written to."""
    return _NOWHERE[:chunks] if chunks <= len(_NOWHERE) else np.full(chunks, NOT_READ, np.int8)


@dataclass(slots=True)
class Gathered:
    """Presence per group (int8 `Presence` by chunk index) and where each present chunk would be read.

    What was not looked at, because no boundary that matters needs it, counts as absent.
    """

    presence: list[I8]
    sources: list[I8]
    slots: list[I64]
    """The slot of each chunk, or -1; of chunks that were looked at."""
    must_retry: bool = False
    """A tier that answers at once did not know yet; nothing will tell when it does."""

    def make_room(self, group: int, chunks: int) -> None:
        """Nothing is known yet of the first `chunks` chunks of a group."""
        self.presence[group] = np.zeros(chunks, np.int8)
        self.sources[group] = nowhere(chunks).copy()
        self.slots[group] = no_slots(chunks).copy()


Span = tuple[int, int, int]
"""A group, and the first and the end of some of its chunks."""


class Look(NamedTuple):
    """What is being found out: parts of groups, their keys, and columns for the answers, one row for each key."""

    spans: list[Span]
    keys: Sequence[OffloadKey]
    presence: I8
    sources: I8
    slots: I64


class AtHand(NamedTuple):
    """A plan whose chunks are all in primary, or on their way there: its boundary, and per group ranges and slots."""

    boundary: int
    ranges: tuple[Range, ...]
    slots: list[I64]


@dataclass(slots=True, eq=False)
class Probe:
    """One outstanding probe of an asynchronous tier for one request.

    `index` are chunk indices of `group` (two-phase door), or None when the keys stand for themselves (per-key door).
    """

    tier: int
    request: Request
    episode: int
    group: int
    index: I64 | None
    keys: Sequence[OffloadKey]
    started: float
    newer: dict[OffloadKey, Presence] = field(default_factory=dict)
    """Facts about its keys that are newer than the probe; they win over its answers."""
    _places: dict[OffloadKey, int] | None = None

    def places(self) -> dict[OffloadKey, int]:
        """Position of each key in the answers; made when a fact comes that may be newer."""
        if self._places is None:
            self._places = {key: i for i, key in enumerate(self.keys)}
        return self._places


class PresenceBook:
    """Presence of keys over primary and all tiers, and the outstanding probes."""

    def __init__(self, core: CoreState) -> None:
        self._core = core
        self.probes: dict[tuple[int, int], Probe] = {}
        groups = range(len(core.layout.groups))
        self._order = sorted(groups, key=lambda g: not core.layout.groups[g].kind.prefix)
        self._bounding = sum(group.kind.prefix for group in core.layout.groups)
        """How many of them, at the front, bound the others."""
        self._narrows = self._bounding > 0 and all(tier.port.capabilities.sync_probe for tier in core.tiers)
        """Looking at few chunks first pays: a second look costs no round trip."""

    # -- gathering

    def gather(self, request: Request, computed: int, total: int, top: int | None = None) -> Gathered:
        """Presence of every key that a boundary in (computed, total] may need; one pass over the keys.

        `top` is the largest boundary that the request may be given, by default what the layout allows. Where prefix
        groups bound it further, the other groups are looked at only at that bound, as long as they allow it: then
        nothing else matters.
        """
        layout = self._core.layout
        groups = len(layout.groups)
        found = Gathered([_NOTHING] * groups, [_NOTHING] * groups, [NO_SLOTS] * groups)
        bound = total
        self._core.counters.resolves += 1
        for g in self._order[: self._bounding]:
            bound = self._look_along(request, g, computed // layout.tokens_per_chunk[g], bound, found)
        others = self._order[self._bounding :]
        for g in others:
            last = min(len(request.keys[g]), -(-bound // layout.tokens_per_chunk[g]) + layout.groups[g].drafter)
            found.make_room(g, max(last, 0))
        narrows = self._narrows and request.byte_limit is None
        if others and not (
            narrows and self._look_near(request, others, computed, layout.limit(total) if top is None else top, found)
        ):
            for g in others:
                first, last = computed // layout.tokens_per_chunk[g], len(found.presence[g])
                if first < last:
                    self._look(request, g, slice(first, last), found)
        return found

    def _look_along(self, request: Request, g: int, first: int, bound: int, found: Gathered) -> int:
        """Look at a prefix group in steps, up to its first absent chunk; returns the bound that this leaves."""
        tpc = self._core.layout.tokens_per_chunk[g]
        last = min(len(request.keys[g]), -(-bound // tpc) + self._core.layout.groups[g].drafter)
        found.make_room(g, max(last, 0))
        for start in range(first, last, STEP):
            part = slice(start, min(start + STEP, last))
            self._look(request, g, part, found)
            gap = found.presence[g][part].tobytes().find(ABSENT)
            if gap >= 0:
                return min(bound, (start + gap) * tpc)
        return bound

    def _look_near(self, request: Request, groups: Sequence[int], computed: int, top: int, found: Gathered) -> bool:
        """Look at what the largest boundary that prefix groups leave needs of the others; whether nothing is absent."""
        layout = self._core.layout
        boundary, _ = Search(layout, found.presence, computed, top, None).ceiling(top)
        if boundary <= computed:
            return False
        needed = layout.needed_ranges(boundary, computed)
        spans = [(g, *needed[g]) for g in groups if needed[g][0] < needed[g][1]]
        if any(end > len(found.presence[g]) for g, _, end in spans):
            return False
        if sum(end - start for _, start, end in spans) <= TOGETHER:
            self._look_together(request, spans, found)
            return not any(count_of(found.presence[g][start:end], ABSENT) for g, start, end in spans)
        for g, start, end in spans:
            self._look(request, g, slice(start, end), found)
            if count_of(found.presence[g][start:end], ABSENT):
                return False
        return True

    def at_hand(self, request: Request, computed: int, top: int) -> AtHand | None:
        """The plan of the largest boundary that `top` and the keys allow, if primary has all that it needs.

        Then it is the answer: no search has to find it, and no tier has anything to add. None: gather. It is found
        out by one key whether to look any further, since the end of a chain leaves primary first.
        """
        layout, residency = self._core.layout, self._core.residency
        if request.byte_limit is not None or request.unloadable or not layout.kind_step:
            return None
        keys, first = request.keys, layout.order[0]
        last = min(len(keys[first]), -(-top // layout.tokens_per_chunk[first])) - 1
        if last < 0 or residency.slot_of(keys[first][last]) < 0:
            return None
        boundary = Search(layout, [all_present(len(chunks)) for chunks in keys], computed, top, None).highest()
        if boundary is None:
            return None
        needed = layout.needed_ranges(boundary, computed)
        slots = []
        for chunks, (lo, hi) in zip(keys, needed, strict=True):
            if hi > len(chunks):
                return None
            self._core.counters.keys_gathered += hi - lo
            found = residency.find(chunks if hi - lo == len(chunks) else chunks[lo:hi]) if lo < hi else NO_SLOTS
            if any_of(found < 0):
                return None
            slots.append(found)
        self._core.counters.resolves += 1
        loads = layout.loaded_part(needed)
        return AtHand(boundary, loads, [part[: hi - lo] for part, (lo, hi) in zip(slots, loads, strict=True)])

    def gather_ready(self, request: Request, computed: int, total: int) -> Gathered:
        """Presence counting only what is readable in primary at this moment."""
        layout, residency = self._core.layout, self._core.residency
        presence: list[I8] = []
        for g, keys in enumerate(request.keys):
            tpc = layout.tokens_per_chunk[g]
            first, last = computed // tpc, min(len(keys), -(-total // tpc) + layout.groups[g].drafter)
            known = np.zeros(max(last, 0), np.int8)
            if last > first:
                slots = residency.find(keys[first:last])
                ready = np.flatnonzero(slots >= 0)
                ready = ready[residency.state[slots[ready]] == READY]
                known[first:last][ready] = Presence.PRESENT
                self._blank_unloadable(request, keys[first:last], known[first:last])
                self._core.counters.keys_gathered += last - first
            presence.append(known)
        return Gathered(presence, [np.full(len(p), NOT_READ, np.int8) for p in presence], [NO_SLOTS] * len(presence))

    def _blank_unloadable(self, request: Request, keys: Sequence[OffloadKey], view: I8) -> None:
        """Chunks whose load failed for the request are absent for it, also in primary."""
        if request.unloadable:
            view[[i for i, key in enumerate(keys) if key in request.unloadable]] = Presence.ABSENT

    def _look(self, request: Request, group: int, part: slice, found: Gathered) -> None:
        """Fill in one part of a group."""
        span = group, part.start, part.stop
        views = found.presence[group][part], found.sources[group][part], found.slots[group][part]
        self._fill(request, Look([span], request.keys[group][part], *views), found)

    def _look_together(self, request: Request, spans: list[Span], found: Gathered) -> None:
        """Fill in several small parts at the cost of one: each tier is asked once. For tiers that answer at once."""
        keys: list[OffloadKey] = []
        for group, start, end in spans:
            keys += request.keys[group][start:end]
        count = len(keys)
        look = Look(spans, keys, np.zeros(count, np.int8), nowhere(count).copy(), no_slots(count).copy())
        self._fill(request, look, found)
        at = 0
        for group, start, end in spans:
            here = slice(at, at + end - start)
            found.presence[group][start:end] = look.presence[here]
            found.sources[group][start:end] = look.sources[here]
            found.slots[group][start:end] = look.slots[here]
            at = here.stop

    def _fill(self, request: Request, look: Look, found: Gathered) -> None:
        """What primary has, then the tiers, in order, for what is missing."""
        keys, view = look.keys, look.presence
        self._core.counters.keys_gathered += len(keys)
        slots = look.slots[:] = self._core.residency.find(keys)
        here = slots >= 0
        count = any_of(here)
        if count:
            view[here] = PRESENT
            self._blank_unloadable(request, keys, view)
        if count == len(keys):
            return
        missing = where(~here) if count else np.arange(len(keys))
        absent = request.failed | request.unloadable if request.unloadable else request.failed
        if absent:
            missing = slot_array([i for i in missing.tolist() if keys[i] not in absent])
        for tier in self._core.tiers:
            if not len(missing):
                break
            if request.options.load_tiers.accepts(tier.port) and self._core.readable(tier):
                missing = self._look_below(request, tier, look, missing, found)

    def _look_below(self, request: Request, tier: TierState, look: Look, missing: I64, found: Gathered) -> I64:
        """Fill in what one tier says of the missing chunks of a look; returns those that it is not known to have."""
        view, source_view = look.presence, look.sources
        answers = self._answers(request, tier, look, missing)
        self._core.verdicts.mask(tier.index, look.keys, missing, answers, self._core.now)
        if count_of(answers, UNKNOWN):
            unknown = missing[answers == UNKNOWN]
            view[unknown[view[unknown] == ABSENT]] = UNKNOWN
            found.must_retry |= tier.port.capabilities.sync_probe
        if tier.gallops:
            assumed = missing[answers == ASSUMED]
            assumed = assumed[view[assumed] != ASSUMED]  # the nearest that is assumed to have it
            view[assumed] = ASSUMED
            source_view[assumed] = tier.index
        has = answers == PRESENT
        count = any_of(has)
        if not count:
            return missing
        present = missing if count == len(missing) else missing[has]
        view[present] = PRESENT
        source_view[present] = tier.index
        return missing[:0] if count == len(missing) else missing[~has]

    def _answers(self, request: Request, tier: TierState, look: Look, missing: I64) -> I8:
        """What one tier says of the missing keys: asked on the spot, or what its probes have said so far."""
        if not tier.port.capabilities.sync_probe:
            ((group, start, _),) = look.spans
            kept = self._kept(request, tier, group)[start:]
            if self._assumes(request, tier, group):
                kept = galloping.inferred(kept)
            kept = kept[missing]
            return np.where(kept < 0, Presence.UNKNOWN, kept).astype(np.int8)
        wanted = look.keys if len(missing) == len(look.keys) else [look.keys[i] for i in missing.tolist()]
        answers = tier.port.probe(wanted)
        self._count(request, tier, look.spans, missing)
        if isinstance(answers, int) or len(answers) != len(missing):
            return np.zeros(len(missing), np.int8)
        return answers.copy()

    def _count(self, request: Request, tier: TierState, spans: list[Span], missing: I64) -> None:
        """Count each (request, key, tier) once."""
        by_group = request.asked.get(tier.index)
        if by_group is None:
            by_group = request.asked[tier.index] = [bytearray() for _ in request.keys]
        at, every = 0, len(missing) == sum(end - start for _, start, end in spans)
        for group, start, end in spans:
            marks = by_group[group]
            if len(marks) < len(request.keys[group]):
                marks.extend(bytes(len(request.keys[group]) - len(marks)))
            if every:
                tier.counters.probed += marks.count(0, start, end)
                marks[start:end] = b"\1" * (end - start)
                continue
            asked = np.frombuffer(marks, np.int8)
            index = missing[(missing >= at) & (missing < at + end - start)] + (start - at)
            tier.counters.probed += len(index) - int(any_of(asked[index]))
            asked[index] = 1
            at += end - start

    def _kept(self, request: Request, tier: TierState, group: int) -> I8:
        """The request's answers of an asynchronous tier for one group, grown to the keys it has now."""
        by_group = request.answers.get(tier.index)
        if by_group is None:
            by_group = [np.empty(0, np.int8) for _ in request.keys]
            request.answers[tier.index] = by_group
        short = len(request.keys[group]) - len(by_group[group])
        if short > 0:
            by_group[group] = np.concatenate([by_group[group], np.full(short, NOT_ASKED, np.int8)])
        return by_group[group]

    def _assumes(self, request: Request, tier: TierState, group: int) -> bool:
        """Whether answers of the tier stand for chunks that it was not asked for."""
        return tier.gallops and tier.index not in request.plain and self._core.layout.groups[group].kind.prefix

    def doubts(self, request: Request, gathered: Gathered, decision: Decision) -> list[I64] | None:
        """Chunks that a decided boundary needs but does not load, and that are only assumed; None if there are none.

        What is loaded proves itself; a drafter's next chunk must be asked for.
        """
        found, layout = [NOTHING] * len(request.keys), self._core.layout
        if decision.boundary > request.computed and any(tier.gallops for tier in self._core.tiers):
            needed = layout.needed_ranges(decision.boundary, request.computed)
            for g, (_, end) in enumerate(needed):
                flags = gathered.presence[g]
                if layout.groups[g].drafter and end <= len(flags) and flags[end - 1] == Presence.ASSUMED:
                    found[g] = np.array([end - 1], np.int64)
        return found if any(len(index) for index in found) else None

    # -- probes of asynchronous tiers

    def ask(self, request: Request, wanted: Sequence[I64], gathered: Gathered) -> bool:
        """Probe the chunks that the planner named, in every allowed tier that was not asked for them yet.

        Tiers that gallop are asked for some of them in each round. True if some answers came at once, so that it is
        worth deciding again.
        """
        core, at_once = self._core, False
        for tier in core.tiers:
            if tier.port.capabilities.sync_probe or not request.options.load_tiers.accepts(tier.port):
                continue
            if not core.readable(tier):
                continue
            for group, index in enumerate(wanted):
                kept = self._kept(request, tier, group)
                index = index[index < len(kept)]
                if self._assumes(request, tier, group):
                    index = galloping.next_round(kept, index)
                elif tier.gallops and len(index) and not core.layout.groups[group].kind.prefix:
                    first = request.computed // core.layout.tokens_per_chunk[group]
                    index = galloping.reach(kept, index, gathered.presence[group], first)
                else:
                    index = index[kept[index] == NOT_ASKED]
                for at in range(0, len(index), tier.port.capabilities.max_batch):
                    part = index[at : at + tier.port.capabilities.max_batch]
                    keys = [request.keys[group][i] for i in part.tolist()]
                    answers = self._submit(request, tier, group, part, keys)
                    kept[part] = ASKED if answers is None else answers
                    at_once |= answers is not None
        return at_once

    def ask_keys(self, request: Request, tier: TierState, keys: Sequence[OffloadKey]) -> None:
        """Probe keys of the per-key door; their answers go to `request.key_answers`."""
        for at in range(0, len(keys), tier.port.capabilities.max_batch):
            part = keys[at : at + tier.port.capabilities.max_batch]
            answers = self._submit(request, tier, -1, None, part)
            for i, key in enumerate(part):
                request.key_answers[(tier.index, key)] = ASKED if answers is None else int(answers[i])

    def _submit(
        self, request: Request, tier: TierState, group: int, index: I64 | None, keys: Sequence[OffloadKey]
    ) -> I8 | None:
        """Hand one probe to a tier: its answers if they came at once, None while they are outstanding."""
        core = self._core
        ticket = tier.port.probe(keys)
        tier.counters.probed += len(keys)
        tier.reads.asked()
        if not isinstance(ticket, int):
            tier.reads.success()
            return ticket if len(ticket) == len(keys) else np.zeros(len(keys), np.int8)
        request.probes_out += 1
        self.probes[(tier.index, ticket)] = Probe(tier.index, request, request.episode, group, index, keys, core.now)
        return None

    def answered(self, tier: TierState, done: ProbeDone) -> Request | None:
        """Apply a probe's answers; returns the request that waited for them, if it still does."""
        core = self._core
        probe = self.probes.pop((tier.index, done.ticket), None)
        if done.error is None:
            tier.reads.success()
        else:
            tier.reads.failure(core.now)
        if probe is None or probe.request.episode != probe.episode:
            core.counters.late += 1
            return None
        fits = done.error is None and len(done.answers) == (
            len(probe.keys) if probe.index is None else len(probe.index)
        )
        self._settle(probe, np.array(done.answers, np.int8) if fits else None)
        return probe.request

    def _settle(self, probe: Probe, answers: I8 | None) -> None:
        """Write the answers of one probe down (None: all absent), newer facts first."""
        request = probe.request
        request.probes_out -= 1
        if answers is None:
            answers = np.zeros(len(probe.keys) if probe.index is None else len(probe.index), np.int8)
        for key, presence in probe.newer.items():
            answers[probe.places()[key]] = presence
        if probe.index is not None:
            self._kept(request, self._core.tiers[probe.tier], probe.group)[probe.index] = answers
            return
        for i, key in enumerate(probe.keys):
            request.key_answers[(probe.tier, key)] = int(answers[i])

    def facts(self, tier: int, keys: Sequence[OffloadKey], presence: Presence) -> None:
        """Newer facts about keys of a tier than any outstanding probe of them has."""
        for probe in self.probes.values():
            if probe.tier == tier:
                places = probe.places()
                probe.newer.update((key, presence) for key in keys if key in places)

    def asked_by(self, request: Request) -> list[TierState]:
        """The tiers that owe this request the answer to a probe, or that answered that they do not know yet."""
        owing = {probe.tier for probe in self.probes.values() if probe.request is request}
        owing.update(
            tier
            for tier, by_group in request.answers.items()
            if any(count_of(kept, Presence.UNKNOWN) for kept in by_group)
        )
        return [self._core.tiers[tier] for tier in sorted(owing)]

    def overdue(self) -> list[Probe]:
        """Probes that passed the bound of probes; they are forgotten."""
        now, idle = self._core.now, self._core.config.job_idle_s
        gone = list(takewhile(lambda ticket: self.probes[ticket].started + idle <= now, self.probes))  # oldest first
        probes = [self.probes.pop(ticket) for ticket in gone]
        for probe in probes:
            self._core.tiers[probe.tier].reads.failure(self._core.now, at_once=True)
            if probe.request.episode == probe.episode:
                self._settle(probe, None)
        return [probe for probe in probes if probe.request.episode == probe.episode]

    def deadline(self) -> float | None:
        """When the oldest outstanding probe becomes overdue, or None."""
        first = next(iter(self.probes.values()), None)
        return None if first is None else first.started + self._core.config.job_idle_s

    def forget_unknown(self, request: Request) -> None:
        """Ask again, at the next resolve, what asynchronous tiers did not know."""
        for by_group in request.answers.values():
            for kept in by_group:
                kept[kept == Presence.UNKNOWN] = NOT_ASKED
        for place, answer in request.key_answers.items():
            if answer == Presence.UNKNOWN:
                request.key_answers[place] = NOT_ASKED

    def void(self, request: Request) -> None:
        """Answers and outstanding probes of the request count no more."""
        request.episode += 1
        request.probes_out = 0
        request.answers.clear()
        request.key_answers.clear()
