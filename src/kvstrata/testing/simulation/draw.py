"""What a seed decides before a run begins: layout, ranks, sizes, settings of the core."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.core.settings import CoreConfig
from kvstrata.integrations.vllm.shapes import EngineGroup, EngineShape, LayerPage
from kvstrata.layout.groups import Layout
from kvstrata.layout.kinds import ChunkedLocal, FullAttention, Kind, RecurrentState, SlidingWindow
from kvstrata.testing.choices import Choices

MOST_TOKENS = 80
"""Longest prompt, in tokens."""
PACE = (0.001, 0.004, 0.02, 0.1)
SLOW_PACE = (0.02, 0.1, 0.5, 1.5)
"""Jobs become overdue, breakers open and close within a run."""
MOST_TPC = 24
"""Largest chunk, in tokens."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The fixed part of one run."""

    shape: EngineShape
    config: CoreConfig
    blocks: int
    budget: int
    lag: int
    most_running: int
    copying: int
    """Percent of the copies under way that move on in one turn."""
    caches: bool
    """Whether the engine finds blocks in its own memory again."""
    store: str
    keep_interval: int | None
    pace: tuple[float, ...]
    """Seconds that may pass in one turn."""
    longest: int
    """Most tokens of one prompt."""


def draw_shape(choices: Choices) -> EngineShape:
    """1 to 5 groups of all kinds, with unlike block sizes; 1 or 2 ranks; 1 or 2 layers per group."""
    per_hash = choices.pick((1, 1, 2, 4))
    per_chunk = choices.pick((1, 1, 2, 3))
    ranks = choices.pick((1, 1, 2))
    mode = choices.pick(("align", "all"))
    only_full = choices.below(4) == 3
    groups = []
    for index in range(choices.pick((1, 2, 3, 2, 1, 4, 5))):
        most = max(MOST_TPC // (per_hash * per_chunk), 1)
        tokens = per_hash * choices.between(1, min(most, 6))
        kind = FullAttention() if only_full else _kind(choices, mode, tokens)
        layers = tuple(
            LayerPage(f"layer.{index}.{i}", choices.pick((16, 24, 32, 48))) for i in range(choices.pick((1, 1, 2)))
        )
        drafter = kind.name in ("full", "sliding_window") and choices.below(5) == 4
        replicated = ranks > 1 and choices.below(5) == 4
        groups.append(EngineGroup(index, kind, tokens, layers, drafter, replicated, ""))
    interval = choices.pick((None, None, 8, 24))
    return EngineShape(tuple(groups), ranks, per_hash, per_chunk, interval)


def _kind(choices: Choices, mode: str, tokens: int) -> Kind:
    """A kind for blocks of `tokens` tokens; engines cut attention chunks at blocks."""
    match choices.below(6):
        case 0 | 1:
            return FullAttention()
        case 2 | 3:
            return SlidingWindow(choices.between(1, 24), choices.pick((0, 0, 0, 1, 3, 8)))
        case 4:
            return ChunkedLocal(tokens * choices.between(1, 6))
    return RecurrentState("all" if mode == "all" else "align")


def draw_config(choices: Choices, layout: Layout, longest: int, *, steady: bool) -> CoreConfig:
    """Settings of the core; primary takes 4 to 200 of the largest chunk, from a quarter of a prompt to four."""
    pick, largest = choices.pick, max(layout.chunk_bytes)
    whole = sum(longest // tpc * size for tpc, size in zip(layout.tokens_per_chunk, layout.chunk_bytes, strict=True))
    chunks = min(max(int(whole / largest * pick((1, 0.5, 2, 1, 0.25, 4))), 4), 200)
    alignment = pick((1, 1, 8))
    capacity = chunks * (largest + alignment - 1) + choices.below(largest)
    return CoreConfig(
        capacity_bytes=max(capacity, sum(layout.chunk_bytes) + alignment * len(layout.groups)),
        alignment=alignment,
        policy=pick(("lru", "s3fifo")),
        promotion_share=pick((0.5, 0.25, 1.0)),
        store_reserve=pick((0.1, 0.0, 0.3)),
        inflight_share=pick((0.25, 0.05, 1.0)),
        stall_s=50.0 if steady else pick((2.0, 0.5, 0.0, 6.0, 0.05)),
        total_s=50.0 if steady else pick((2.0, 0.5, 0.0, 6.0, 0.1)),
        tier_stall_s={} if steady else pick(({}, {}, {"tier0": 6.0}, {"tier0": 0.2})),
        tier_total_s={} if steady else pick(({}, {}, {"tier0": 6.0}, {"tier0": 0.2})),
        min_rate_bytes_per_s=pick((1e9, 2000.0)),
        silence_s=30.0 if steady else pick((30.0, 30.0, 3.0)),
        job_idle_s=10.0 if steady else pick((10.0, 3.0, 0.5)),
        job_total_s=60.0 if steady else pick((60.0, 5.0, 1.0)),
        max_fetch_rounds=pick((3, 1)),
        max_verdicts=pick((65_536, 3)),
        cascade_queue=1024 if steady else pick((1024, 4, 1)),
        breaker_errors=pick((3, 1)),
    )


def draw_setup(choices: Choices, *, steady: bool) -> Setup:
    """Everything of a run that stays."""
    shape = draw_shape(choices)
    layout = shape.layout()
    longest = min(MOST_TOKENS, 4 * max(layout.tokens_per_chunk) + 8)
    most = longest + 12
    least = sum(-(-most // group.tokens_per_block) + 1 for group in shape.groups)
    return Setup(
        shape,
        draw_config(choices, layout, longest, steady=steady),
        blocks=1 + least * choices.pick((2, 1, 3, 1)) + choices.below(8),
        budget=choices.pick((24, 12, 48, 96)),
        lag=choices.pick((0, 0, 1, 2)),
        most_running=choices.pick((3, 2, 4, 1)),
        copying=choices.pick((60, 60, 12)),
        caches=not steady and choices.below(2) == 1,
        store=choices.pick(("all", "prompt", "all", "prompt")),
        keep_interval=choices.pick((8, 16, None, 32)),
        pace=(0.001, 0.004) if steady else choices.pick((PACE, PACE, PACE, SLOW_PACE)),
        longest=longest,
    )
