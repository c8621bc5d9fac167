"""The sentences that tell people why a boundary is what it is. Groups are named by index and label."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstrata.layout.search import Cut, Search
from kvstrata.types import I64, Presence


def no_hit(search: Search) -> str:
    """Why nothing fits."""
    if search.layout.kind_step == 0:
        return "no boundary: a recurrent group in mode none leaves no state behind"
    if search.top <= search.computed:
        return f"no boundary: the limit {search.top} is not above the {search.computed} computed tokens"
    if search.cut is None:
        between = f"between {search.computed} and {search.top}"
        return f"no boundary: none {between} suits alignment and kinds and consumes a chunk that may be present"
    return f"no boundary above the {search.computed} computed tokens: {_cut(search, search.cut)}"


def hit(search: Search, boundary: int, chunks: int) -> str:
    """Why `boundary` is the largest."""
    said = "the 1 chunk that it consumes is" if chunks == 1 else f"all {chunks} chunks that it consumes are"
    said = f"boundary {boundary}: {said} present"
    if boundary == search.top:
        return f"{said}, and it is the limit"
    if search.cut is None:
        return f"{said}, and none between it and the limit {search.top} suits alignment and kinds and consumes a chunk"
    return f"{said}; {_cut(search, search.cut)}"


def still_open(search: Search, boundary: int, probe: Sequence[I64]) -> str:
    """What keeps the search from deciding."""
    count = sum(len(chunks) for chunks in probe)
    names = [f"{g} ({search.layout.groups[g].label})" for g, chunks in enumerate(probe) if len(chunks)]
    return (
        f"undecided, so nothing is loaded yet: boundary {boundary} is the best still possible, "
        f"and {count} chunk{'s' * (count > 1)} that it needs {'are' if count > 1 else 'is'} unknown, "
        f"in group {', '.join(names)}"
    )


def _cut(search: Search, cut: Cut) -> str:
    if cut.group is None:
        return f"boundary {cut.before} would take more than the byte limit of {search.byte_limit}"
    tokens, flags = search.layout.tokens_per_chunk[cut.group], search.presence[cut.group]
    lo, hi = search.layout.needed_ranges(cut.before, search.computed)[cut.group]
    absent = np.asarray(flags[lo:hi]) == Presence.ABSENT
    chunk = lo + (int(np.argmax(absent)) if absent.any() else len(absent))
    return (
        f"group {cut.group} ({search.layout.groups[cut.group].label}) rules out boundary {cut.before}, "
        f"for it needs chunk {chunk} (tokens {chunk * tokens} to {(chunk + 1) * tokens}), which is absent"
    )
