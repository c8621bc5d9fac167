"""Small parts against plain twins: the planner, the store rule, clocks, breakers, verdicts, index and format.

Each twin says the same in a few slow lines. A seed tries each with a few drawn cases.
"""

from __future__ import annotations

import math

import numpy as np

from kvstrata.core.breakers import Breaker, BreakerState
from kvstrata.core.clocks import Pace, WaitClock
from kvstrata.core.verdicts import Verdicts
from kvstrata.layout.cursor import StoreCursor
from kvstrata.layout.groups import Layout
from kvstrata.layout.kept import kept_boundaries, stored_chunks
from kvstrata.layout.planner import Decision, resolve
from kvstrata.testing.layouts import random_layout, random_presence
from kvstrata.testing.oracle import completions, fits, next_chunk, oracle
from kvstrata.testing.simulation.goldens import golden_scenes
from kvstrata.testing.tier_harness import chunk_keys
from kvstrata.testing.world_checks import demand
from kvstrata.tiers.disk import format as fmt
from kvstrata.tiers.disk.index import Index, words_of
from kvstrata.types import I8, FailCause, OffloadKey, Presence


def twin_seed(seed: int) -> None:
    """All parts, with cases of this seed."""
    rng = np.random.default_rng([78, seed])
    for _ in range(10):
        planner_case(rng)
    for _ in range(3):
        unknown_case(rng)
        store_case(rng)
    clock_case(rng)
    breaker_case(rng)
    verdict_case(rng)
    index_case(rng)
    format_case(rng)
    if seed % 10 == 0:
        golden_scenes()


# -- planner


def _sets(flags: list[I8], value: int) -> list[frozenset[int]]:
    return [frozenset(np.flatnonzero(f == value).tolist()) for f in flags]


def _loads(decision: Decision) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(lo, hi)) for lo, hi in decision.ranges)


def planner_case(rng: np.random.Generator) -> None:
    """Everything is known: the boundary and its chunks are those of brute force."""
    layout, total = random_layout(rng, groups=6), int(rng.integers(1, 130))
    computed = int(rng.integers(0, total + 1)) if rng.random() < 0.5 else 0
    flags = random_presence(rng, layout, total)
    byte_limit = int(rng.integers(0, 600)) if rng.random() < 0.4 else None
    limit = int(rng.integers(0, total + 1)) if rng.random() < 0.3 else None
    decision = resolve(layout, flags, computed, total, limit=limit, byte_limit=byte_limit)
    wanted = oracle(layout, _sets(flags, Presence.PRESENT), computed, total, limit=limit, byte_limit=byte_limit)
    demand(decision.decided, "everything is known, but the planner does not decide")
    demand(
        (decision.boundary, _loads(decision)) == (wanted.boundary, wanted.load),
        f"{layout}: {computed} of {total}: the planner says {decision.boundary}, the oracle {wanted.boundary}",
    )


def unknown_case(rng: np.random.Generator) -> None:
    """Something is unknown: decided exactly when every completion agrees; what is probed is unknown and needed."""
    layout, total = random_layout(rng, groups=3), int(rng.integers(1, 40))
    flags = random_presence(rng, layout, total, unknown=0.1)
    present, unknown = _sets(flags, Presence.PRESENT), _sets(flags, Presence.UNKNOWN)
    if sum(map(len, unknown)) > 6:
        return
    answers = {oracle(layout, sets, 0, total) for sets in completions(present, unknown)}
    decision = resolve(layout, flags, 0, total)
    demand(
        decision.decided == (len(answers) == 1), f"{layout}: decided is {decision.decided} with {len(answers)} outcomes"
    )
    if decision.decided:
        return
    best = max(answer.boundary for answer in answers)
    demand(decision.possible == best, f"the best possible boundary is {best}, not {decision.possible}")
    every = [frozenset(range(len(flags[g]) + 3)) for g in range(len(flags))]
    load = fits(layout, every, 0, best) or ()
    probed = 0
    for g, chunks in enumerate(decision.probe):
        needed = set(load[g]) if load else set()
        if layout.groups[g].drafter:
            needed.add(next_chunk(layout.tokens_per_chunk[g], best))
        demand(set(chunks.tolist()) <= needed & unknown[g], f"group {g}: probes what the best boundary does not need")
        probed += len(chunks)
    demand(probed > 0, "undecided, but nothing is probed")


# -- store rule


def store_case(rng: np.random.Generator) -> None:
    """What is stored of a finished request: the chunks that the kept boundaries consume, by brute force."""
    layout = random_layout(rng, groups=4)
    prompt = int(rng.integers(1, 90))
    final = prompt + int(rng.integers(0, 20))
    total = None if rng.random() < 0.5 else prompt
    interval = int(rng.integers(1, 60))
    end = final if total is None else total
    kept = kept_boundaries(layout, total, prompt, final, interval, finished=True)
    chunks = [set(some.tolist()) for some in stored_chunks(layout, kept, final, total=total, finished=True)]
    wanted = _stored(layout, prompt, end, interval)
    demand(
        chunks == wanted, f"{layout}: prompt {prompt}, end {end}, interval {interval}: stores {chunks}, not {wanted}"
    )
    cursor = StoreCursor(layout, prompt, interval, total=total)
    given: list[set[int]] = [set() for _ in layout.groups]
    at = 0
    while at < final:
        at = min(at + int(rng.integers(1, 30)), final)
        _give(cursor.advance(at), given, layout, at)
    _give(cursor.advance(final, finished=True), given, layout, final)
    lacking = [want - have for want, have in zip(wanted, given, strict=True)]
    demand(not any(lacking), f"{layout}: prompt {prompt}, end {end}, interval {interval}: never stores {lacking}")


def _give(fresh: tuple[np.ndarray, ...], given: list[set[int]], layout: Layout, final: int) -> None:
    for g, some in enumerate(fresh):
        for chunk in some.tolist():
            demand(chunk not in given[g], f"group {g}: chunk {chunk} is stored twice")
            demand(
                (chunk + 1) * layout.tokens_per_chunk[g] <= final,
                f"group {g}: chunk {chunk} is stored before it is whole",
            )
            given[g].add(chunk)


def _stored(layout: Layout, prompt: int, end: int, interval: int) -> list[set[int]]:
    whole = [frozenset(range(end // tokens)) for tokens in layout.tokens_per_chunk]
    aligned = layout.alignment_tokens
    own = {min(prompt - 1, end), min(prompt, end), end}
    marks = {*own, *range(interval, end + 1, interval)}
    kept = {oracle(layout, whole, 0, end + 1, limit=mark // aligned * aligned).boundary for mark in marks if mark > 0}
    kept |= {mark for mark in own if mark > 0 and oracle(layout, whole, 0, end + 1, limit=mark).boundary == mark}
    out: list[set[int]] = []
    for g, group in enumerate(layout.groups):
        if group.kind.stores_all:
            out.append(set(whole[g]))
            continue
        mine: set[int] = set()
        for boundary in kept - {0}:
            load = fits(layout, [frozenset(range(end + 9)) for _ in layout.groups], 0, boundary)
            if load is not None:
                mine.update(load[g])
                if group.drafter:
                    mine.add(next_chunk(layout.tokens_per_chunk[g], boundary))
        out.append(mine & whole[g])
    return out


# -- clocks


def clock_case(rng: np.random.Generator) -> None:
    """Seconds are counted while a request waits, by polls only while it waits for room, and are never given back."""
    stall, total, gap = (float(rng.choice(values)) for values in ([0.5, 2.0], [1.0, 4.0], [0.1, 0.3]))
    now, waited, stalled, mark, pace = 100.0, 0.0, 0.0, 100.0, Pace.RUNNING
    clock = WaitClock(stall, total, gap, now)
    fixed = False
    for _ in range(40):
        now += float(rng.choice([0.01, 0.05, 0.2, 0.5]))
        passed = now - mark
        counted = 0.0 if pace is Pace.STOPPED else passed if pace is Pace.RUNNING else min(passed, gap)
        match int(rng.integers(4)):
            case 0:
                clock.account(now)
                waited, stalled, mark = waited + counted, stalled + counted, now
            case 1:
                to = Pace(rng.choice([each.value for each in Pace]))
                clock.switch(to, now)
                if to is not pace:
                    waited, stalled, mark, pace = waited + counted, stalled + counted, now, to
            case 2:
                clock.progress(now)
                if pace is not Pace.BY_POLLS:
                    waited, mark = waited + counted, now
                stalled = 0.0
            case _:
                clock.fix_once(stall, total + 1.0)
                total, fixed = total + (0.0 if fixed else 1.0), True
        left = min(total - waited, stall - stalled)
        silent = pace is Pace.STOPPED or (pace is Pace.BY_POLLS and left > gap)
        due = math.inf if silent else mark + left
        demand(math.isclose(clock.waited, waited, abs_tol=1e-9), f"waited {clock.waited}, counted {waited}")
        demand(
            due == clock.deadline() or math.isclose(clock.deadline(), due, abs_tol=1e-9),
            f"due {clock.deadline()}, not {due}",
        )


# -- breakers


def breaker_case(rng: np.random.Generator) -> None:
    """Open after so many errors in a row, half open after a while, twice as long after a failed trial; it recovers."""
    most, first, longest = int(rng.integers(1, 4)), 1.0, 6.0
    breaker = Breaker(most, first, longest)
    state, errors, open_s, until, trial, now = "closed", 0, first, 0.0, False, 50.0
    for _ in range(60):
        match int(rng.integers(7)):
            case 0 | 1:
                now += float(rng.choice([0.1, 0.5, 1.0, 3.0]))
                breaker.advance(now)
                if state == "open" and now >= until:
                    state, until = "half_open", until + open_s
                if state == "half_open" and now >= until and not trial:
                    state, errors, open_s = "closed", 0, first
            case 2:
                if breaker.allows:
                    breaker.asked()
                    trial = trial or state == "half_open"
            case 3:
                breaker.success()
                errors = 0
                if state == "half_open":
                    state, open_s, trial = "closed", first, False
            case 4:
                breaker.released()
                trial = False
            case _:
                at_once = bool(rng.integers(4) == 0)
                breaker.failure(now, at_once=at_once)
                errors += 1
                if state == "half_open":
                    open_s = min(2 * open_s, longest)
                    state, until, trial = "open", now + open_s, False
                elif state == "closed" and (at_once or errors >= most):
                    state, until, trial = "open", now + open_s, False
        demand(breaker.state is BreakerState(state), f"the breaker is {breaker.state.value}, should be {state}")
        demand(breaker.allows == (state == "closed" or (state == "half_open" and not trial)), f"allows in {state}")
        due = None if state == "closed" or trial else until
        demand(breaker.deadline() == due, f"the breaker's deadline is {breaker.deadline()}, not {due}")


# -- verdicts


def verdict_case(rng: np.random.Generator) -> None:
    """Bad content stands until it is stored anew; a passing cause for a back-off that doubles; gone leaves nothing."""
    verdicts, keys, now = Verdicts(6, 1.0, 8.0), chunk_keys(9), 10.0
    model: dict[tuple[int, OffloadKey], tuple[float, float]] = {}
    for _ in range(60):
        now += float(rng.choice([0.0, 0.3, 1.0, 5.0]))
        place = int(rng.integers(2)), keys[int(rng.integers(9))]
        if rng.integers(5) == 0:
            verdicts.stored(place[0], [place[1]])
            model.pop(place, None)
        else:
            cause, shared = FailCause(rng.choice([cause.value for cause in FailCause])), bool(rng.integers(2))
            verdicts.failed(*place, cause, shared=shared, now=now)
            old = model.get(place)
            passing = cause in (FailCause.IO_ERROR, FailCause.TIMEOUT, FailCause.REFUSED)
            content = cause in (FailCause.CORRUPT, FailCause.WRONG_SIZE, FailCause.FOREIGN)
            if passing or (content and shared):
                backoff = 1.0 if old is None else min(2 * old[1], 8.0)
                model.pop(place, None)
                model[place] = max(now + backoff, -1.0 if old is None else old[0]), backoff
            elif content:
                model.pop(place, None)
                model[place] = math.inf, 1.0
            while len(model) > 6:
                del model[next(iter(model))]
        for tier in range(2):
            for key in keys:
                found = model.get((tier, key))
                stands = found is not None and now < found[0]
                demand(
                    verdicts.blocks(tier, key, now) == stands, f"a verdict {'stands' if not stands else 'is forgotten'}"
                )
    demand(len(verdicts) == len(model), f"{len(verdicts)} verdicts are kept, not {len(model)}")


# -- index and format of the disk tier


def index_case(rng: np.random.Generator) -> None:
    """The index against a dict."""
    index, model, keys = Index(16), dict[OffloadKey, tuple[int, int, int]](), chunk_keys(220)
    for _ in range(14):
        some = [keys[int(i)] for i in rng.choice(len(keys), size=int(rng.integers(1, 40)), replace=False)]
        if rng.integers(3):
            fresh = [key for key in some if key not in model]
            values = [(int(rng.integers(9)), int(rng.integers(1 << 20)), int(rng.integers(1, 9000))) for _ in fresh]
            if fresh:
                columns = [np.array(column) for column in zip(*values, strict=True)]
                index.insert(
                    words_of(fresh),
                    np.zeros((len(fresh), 2), np.uint64),
                    columns[0].astype(np.int32),
                    columns[1],
                    columns[2],
                )
                model.update(zip(fresh, values, strict=True))
        else:
            rows = index.find(words_of(some))
            index.delete(rows[rows >= 0])
            for key in some:
                model.pop(key, None)
        rows = index.find(words_of(keys))
        for key, row in zip(keys, rows.tolist(), strict=True):
            demand((row >= 0) == (key in model), "the index and the dict do not agree on what is there")
            demand(index.find_key(key) == row, "one key and many keys are found at different rows")
            if row >= 0:
                found = int(index.segment[row]), int(index.offset[row]), int(index.length[row])
                demand(found == model[key], "the index has another place than the dict")
        demand(index.count == len(model) == len(index.live_rows()), f"the index counts {index.count} of {len(model)}")
        for segment in range(9):
            held = len(index.rows_of_segment(segment))
            demand(held == sum(place[0] == segment for place in model.values()), "rows of a segment are missing")


def format_case(rng: np.random.Generator) -> None:
    """A header block is read as what it was written as, at its place and in its life only; altered, it is refused."""
    keys, count = chunk_keys(64), int(rng.integers(1, 65))
    realm = fmt.Realm(rng.bytes(16), int(rng.integers(1 << 60)))
    life, start, size = rng.bytes(16), 4096 * int(rng.integers(1, 50)), 1 << 20
    lengths = rng.integers(1, 900, size=count)
    offsets = start + fmt.BLOCK + np.concatenate([[0], np.cumsum(lengths)[:-1]])
    span = fmt.align_up(fmt.BLOCK + int(lengths.sum()), fmt.BLOCK)
    records = fmt.make_records(b"".join(keys[:count]), rng.bytes(16 * count), offsets.tolist(), lengths.tolist())
    block = fmt.pack_batch(fmt.BatchKind.RECORDS, realm, life, 7, start, span, 123, records)
    batch = fmt.parse_batch(memoryview(block), life, start, size)
    good = isinstance(batch, fmt.Batch) and (batch.realm, batch.span, batch.seq) == (realm, span, 7)
    demand(
        good and isinstance(batch, fmt.Batch) and batch.records.tobytes() == records.tobytes(), f"read back as {batch}"
    )
    bent = bytearray(block)
    bent[int(rng.integers(len(bent)))] ^= int(rng.integers(1, 256))
    for text, where, owner, room in (
        (bytes(bent), start, life, size),
        (block, start + fmt.BLOCK, life, size),
        (block, start, rng.bytes(16), size),
        (block, start, life, start + span - 1),
        (block[:-1], start, life, size),
    ):
        found = fmt.parse_batch(memoryview(text), owner, where, room)
        demand(isinstance(found, fmt.Reject), "a header block that is altered, misplaced or foreign is accepted")
    removal = fmt.pack_batch(fmt.BatchKind.REMOVE, realm, life, 7, start, fmt.BLOCK, 123, records)
    for where in (start - fmt.BLOCK, start + fmt.BLOCK):
        found = fmt.parse_batch(memoryview(removal), life, where, size)
        demand(isinstance(found, fmt.Reject), "a header block in another one's place is accepted")
    beyond = records.copy()
    beyond["length"][-1] = span
    block = fmt.pack_batch(fmt.BatchKind.RECORDS, realm, life, 7, start, span, 123, beyond)
    demand(
        isinstance(fmt.parse_batch(memoryview(block), life, start, size), fmt.Reject),
        "a record beyond its batch is accepted",
    )
    header = fmt.SegmentHeader(life, 9, 3, size, 55)
    packed = fmt.pack_segment(header)
    demand(fmt.parse_segment(memoryview(packed)) == header, "a segment's header is not read back")
    bent = bytearray(packed)
    bent[int(rng.integers(len(bent)))] ^= int(rng.integers(1, 256))
    demand(isinstance(fmt.parse_segment(memoryview(bent)), fmt.Reject), "an altered segment header is accepted")
