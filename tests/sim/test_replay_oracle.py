"""Hit tokens of a replay with unlimited tiers equal those of a walk that keeps a set of keys and has no tiers.

The walk has rules of its own: it knows the words of DESIGN section 4 and nothing of the planner, of what is kept, or
of how keys are hashed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from kvstrata.layout.presets import PRESETS
from kvstrata.sim.replay import Model, Replay, ReplaySettings, run_replay
from kvstrata.sim.traces import Request, Trace, read_mooncake
from kvstrata.sim.workloads import builtin_workload

CONVERSATION = Path(__file__).resolve().parents[2].parent / "shared" / "traces" / "mooncake_conversation.jsonl"
SMALLEST = 1e-9  # every chunk has 64 bytes
Chunk = tuple[int, int, int]  # group, id of the last token, its offset: the walk's key


@cache
def conversation(count: int | None = None) -> Trace:
    if not CONVERSATION.exists():
        pytest.skip(f"the trace {CONVERSATION.name} is not at ../shared/traces")
    return read_mooncake(CONVERSATION, count)


@dataclass
class Rules:
    """One group, in the walk's own terms."""

    kind: str
    tokens: int
    reach: int = 0

    def consumed(self, boundary: int) -> range:
        last = -(-boundary // self.tokens)
        if self.kind == "full":
            return range(last)
        if self.kind == "sliding_window":
            return range(max(0, boundary - self.reach) // self.tokens, last)
        assert self.kind == "recurrent"
        return range(last - 1, last)

    def stops_at(self, boundary: int) -> bool:
        return self.kind != "recurrent" or boundary % self.tokens == 0


class Walk:
    """Goes through requests with a set of keys."""

    def __init__(self, model: str, chunk_tokens: int) -> None:
        layout = Model(model, chunk_tokens, SMALLEST).real
        self.groups = []
        for group, tokens in zip(layout.groups, layout.tokens_per_chunk, strict=True):
            assert not group.drafter
            parameters = group.kind.parameters
            window = int(parameters.get("window", 0)) + int(parameters.get("retained_extra_tokens", 0))
            self.groups.append(Rules(group.kind.name, tokens, window - 1))
        largest = max(rules.tokens for rules in self.groups)
        windows = [rules.reach + 1 for rules in self.groups if rules.kind == "sliding_window"]
        interval = max(1024, 4 * max(windows, default=0))
        self.interval = -(-interval // largest) * largest
        self.all_full = all(rules.kind == "full" for rules in self.groups)
        self.keys: set[Chunk] = set()

    def serve(self, trace: Trace, request: Request) -> int:
        names = [self._names(trace, request, g) for g in range(len(self.groups))]
        total = request.prompt_tokens
        present = [[name in self.keys for name in group] for group in names]
        hit = self._largest(total if self.all_full else total - 1, present)
        whole = [[True] * len(group) for group in names]
        marks = {total, total - 1, *range(self.interval, total + 1, self.interval)}
        for boundary in {self._largest(mark, whole) for mark in marks} - {0}:
            for group, rules in enumerate(self.groups):
                self.keys.update(names[group][index] for index in rules.consumed(boundary))
        for group, rules in enumerate(self.groups):
            if rules.kind == "full":
                self.keys.update(names[group])
        return min(hit, total - 1)

    def _names(self, trace: Trace, request: Request, group: int) -> list[Chunk]:
        tokens, run = self.groups[group].tokens, trace.tokens_per_id
        lasts = range(tokens - 1, request.prompt_tokens, tokens)
        return [(group, int(request.ids[last // run]), last % run) for last in lasts]

    def _largest(self, limit: int, present: list[list[bool]]) -> int:
        """The largest boundary up to `limit` all of whose chunks are there, 0 for none: tried from the top down."""
        boundary = limit
        while boundary > 0:
            lower = min(self._at_most(boundary, rules, present[g]) for g, rules in enumerate(self.groups))
            if lower == boundary:
                return boundary
            boundary = lower
        return 0

    def _at_most(self, boundary: int, rules: Rules, present: list[bool]) -> int:
        """`boundary` if this group allows it; else the next lower one that it does not exclude for the same reason."""
        if not rules.stops_at(boundary):
            return boundary - boundary % rules.tokens
        for index in rules.consumed(boundary):
            if index >= len(present) or not present[index]:
                return index * rules.tokens if rules.kind != "recurrent" else boundary - rules.tokens
        return boundary


def unlimited(model: str, trace: Trace, chunk_tokens: int = 128, **more: object) -> Replay:
    settings = ReplaySettings(
        model=model,
        tier="memory",
        primary_bytes=None,
        disk_bytes=None,
        chunk_tokens=chunk_tokens,
        payload_scale=SMALLEST,
        **more,  # type: ignore[arg-type]
    )
    return run_replay(settings, trace)


def walked(model: str, trace: Trace, chunk_tokens: int = 128) -> list[int]:
    walk = Walk(model, chunk_tokens)
    return [walk.serve(trace, request) for request in trace.requests]


@pytest.mark.parametrize("model", PRESETS)
def test_hits_equal_those_of_the_walk_on_the_builtin_workload(model: str) -> None:
    trace = builtin_workload(150, 1)
    replay = unlimited(model, trace)
    assert [one.hit_tokens for one in replay.served] == walked(model, trace)
    assert replay.report.hit_tokens == sum(walked(model, trace)) > 0
    assert replay.report.wrong_chunks == 0


@pytest.mark.parametrize("model", PRESETS)
def test_hits_equal_those_of_the_walk_on_the_conversation_trace(model: str) -> None:
    trace = conversation(250)
    assert [one.hit_tokens for one in unlimited(model, trace).served] == walked(model, trace)


@pytest.mark.parametrize("chunk_tokens", [96, 384, 1024])
def test_hits_equal_those_of_the_walk_at_odd_chunk_sizes(chunk_tokens: int) -> None:
    trace = builtin_workload(60, 2)
    for model in PRESETS:
        replay = unlimited(model, trace, chunk_tokens)
        assert [one.hit_tokens for one in replay.served] == walked(model, trace, chunk_tokens)


def prefix_hits(trace: Trace) -> tuple[int, int, int]:
    """Ids that were there before; of these the partly filled last ones; hits that lose the prompt's last token."""
    seen: set[int] = set()
    repeated = partial = capped = 0
    for request in trace.requests:
        whole = request.prompt_tokens // trace.tokens_per_id
        known = sum(1 for run in request.ids.tolist() if run in seen)
        repeated += known
        partial += known > whole
        capped += known == whole and whole * trace.tokens_per_id == request.prompt_tokens
        seen.update(request.ids.tolist())
    return repeated, partial, capped


def test_the_whole_conversation_trace_gives_its_prefix_reuse_exactly() -> None:
    trace = conversation()
    repeated, partial, capped = prefix_hits(trace)
    ids = sum(len(request.ids) for request in trace.requests)
    assert f"{100 * repeated / ids:.2f}" == "36.64"
    report = unlimited("plain", trace, chunk_tokens=512).report
    # A partly filled last run has no key, and of a prompt that is there to its end the last token is computed again.
    assert report.hit_tokens == (repeated - partial) * 512 - capped
    assert report.wrong_chunks == report.corrupt_chunks == 0
