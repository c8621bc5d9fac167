"""Where the tokens of a load came from: each token counts for the farthest place that one of its chunks was in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvstrata.core.messages import LoadPlan
from kvstrata.layout.groups import Layout

PRIMARY = "primary"

HitSources = Sequence[tuple[range, Sequence[int]]]
"""Per group the chunks of the hit and the tier that each was in, -1 for primary."""


def tokens_by_source(layout: Layout, plan: LoadPlan, sources: HitSources, names: Sequence[str]) -> dict[str, int]:
    """Tokens by place; they add up to the tokens of the load. Tiers later in `names` are farther."""
    marks = {plan.computed, plan.boundary}
    spans: list[tuple[int, int, int]] = []
    for g, (chunks, places) in enumerate(sources):
        size = layout.tokens_per_chunk[g]
        recurrent = layout.groups[g].kind.name == "recurrent"
        for chunk, place in zip(chunks, places, strict=False):
            begin = plan.computed if recurrent else max(chunk * size, plan.computed)
            end = min((chunk + 1) * size, plan.boundary)
            if begin < end:
                spans.append((begin, end, place))
                marks.update((begin, end))
    tokens: dict[str, int] = {}
    ordered = sorted(marks)
    for begin, end in pairwise(ordered):
        farthest = max((place for lo, hi, place in spans if lo <= begin and end <= hi), default=-1)
        name = names[farthest] if 0 <= farthest < len(names) else PRIMARY
        tokens[name] = tokens.get(name, 0) + end - begin
    return tokens
