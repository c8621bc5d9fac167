"""The planner: the largest boundary of a request, and the chunks that it consumes.

Every kind consumes one contiguous range of chunks, and both ends of it only go up with the boundary. So a run of
present chunks allows one span of boundaries: from the smallest that consumes nothing before the run (`Kind.earliest`)
to the run's end. One pass over a group's presence gives its runs, hence the set of boundaries that the group allows;
the sets of all groups are intersected (`spans`), and the largest member is the answer.

Unknown chunks are taken as present for this. More presence never makes a boundary impossible, so the result is the
best that any completion of the unknowns can reach, and it is the answer of *every* completion exactly when none of
its own chunks is unknown. Otherwise those unknown chunks are what to probe: of prefix groups first, since their
answer bounds what the other groups are asked about at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvstrata.layout import explain
from kvstrata.layout.groups import Layout, Range
from kvstrata.layout.search import Search
from kvstrata.layout.spans import NOTHING
from kvstrata.types import I8, I64


@dataclass(frozen=True, slots=True)
class Decision:
    """What the planner knows of one request.

    Decided: `boundary` is the largest one (equal to the computed tokens if there is none), and `ranges[g]` the
    chunks [lo, hi) to load for group g ((0, 0) for none). Undecided: `boundary` is the computed tokens, `ranges` are
    empty, `possible` is the best boundary that is not refuted, and `probe[g]` names chunks that it needs and that are
    unknown. `passes` counts the array passes of the search: at most one per group and round, and one round unless a
    byte limit strikes or free boundaries abound.
    """

    decided: bool
    boundary: int
    ranges: tuple[Range, ...]
    probe: tuple[I64, ...]
    possible: int
    passes: int
    rounds: int
    tell: Callable[[], str] = field(repr=False, compare=False)

    @property
    def why(self) -> str:
        """One sentence for people; made when it is asked for, from the presence that was given."""
        return self.tell()

    @property
    def chunks(self) -> int:
        """How many chunks are to be loaded."""
        return sum(hi - lo for lo, hi in self.ranges)


def resolve(
    layout: Layout,
    presence: Sequence[I8],
    computed: int,
    total: int,
    *,
    limit: int | None = None,
    byte_limit: int | None = None,
) -> Decision:
    """Find the largest boundary T with computed < T <= limit, or name the chunks to probe next.

    `presence[g]` holds one `Presence` per chunk of group g; chunks beyond the array are absent. `limit` defaults to
    `layout.limit(total)`. With `byte_limit` only boundaries whose consumed chunks have at most that many payload
    bytes count. The caller guarantees one array per group and 0 <= computed.
    """
    top = layout.limit(total) if limit is None else limit
    search = Search(layout, presence, computed, top, byte_limit)
    boundary = search.best()
    idle = ((0, 0),) * len(layout.groups)
    quiet = (NOTHING,) * len(layout.groups)
    if boundary is None:
        why = partial(explain.no_hit, search)
        return Decision(True, computed, idle, quiet, computed, search.passes, search.rounds, why)
    needed = search.needed or layout.needed_ranges(boundary, computed)
    probe = search.unknown(needed)
    if probe is not None:
        why = partial(explain.still_open, search, boundary, probe)
        return Decision(False, computed, idle, probe, boundary, search.passes, search.rounds, why)
    loads = layout.loaded_part(needed)
    why = partial(explain.hit, search, boundary, sum(hi - lo for lo, hi in loads))
    return Decision(True, boundary, loads, quiet, boundary, search.passes, search.rounds, why)
