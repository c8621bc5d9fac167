"""The simulated engine by itself: paged memory with a prefix cache, and time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvstrata.errors import ConfigError
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds.full import FullAttention
from kvstrata.layout.kinds.sliding import SlidingWindow
from kvstrata.sim.accelerator import Accelerator, BlockTable
from kvstrata.sim.cost import CostModel
from kvstrata.sim.engine import Active, Load, NoCache, Plan, Served, SimulatedEngine
from kvstrata.sim.traces import Request
from kvstrata.testing.clock import ManualClock
from kvstrata.types import OffloadKey, make_key

PLAIN = Layout((Group(FullAttention(), 16, chunk_bytes=100),))
MIXED = Layout((Group(FullAttention(), 16, chunk_bytes=100), Group(SlidingWindow(32), 16, chunk_bytes=10)))


def keys(prompt: str, chunks: int, groups: int = 1) -> list[list[OffloadKey]]:
    """Keys of a prompt, one letter a chunk: equal exactly where the prompts agree from the start."""
    name = prompt.ljust(chunks, "-")
    return [[make_key(name[: i + 1].encode().ljust(32, b"."), g) for i in range(chunks)] for g in range(groups)]


def table(prompt: str, total: int, *, spare: int = 0, layout: Layout = PLAIN) -> BlockTable:
    some = keys(prompt, total // 16, len(layout.groups))
    return BlockTable(some, [list(range(len(group))) for group in some], total, spare)


def serve(accelerator: Accelerator, one: BlockTable) -> int:
    """One request from start to end; what the cache had of it."""
    found = accelerator.computed(one)
    assert accelerator.admit(one, found)
    accelerator.fill(one, [(g, index) for g, some in enumerate(one.keys) for index in range(len(some))])
    accelerator.release(one)
    accelerator.check()
    return found.tokens


def test_blocks_of_a_finished_request_are_found_again() -> None:
    accelerator = Accelerator(PLAIN, 10_000)
    assert serve(accelerator, table("abcd", 70)) == 0
    assert serve(accelerator, table("abcd", 70)) == 64
    assert serve(accelerator, table("abxy", 70)) == 32
    assert serve(accelerator, table("zbcd", 70)) == 0
    assert accelerator.chunks_held == 10


def test_the_last_token_is_never_found() -> None:
    accelerator = Accelerator(PLAIN, 10_000)
    serve(accelerator, table("abcd", 64))
    assert serve(accelerator, table("abcd", 64)) == 48


def test_a_window_needs_only_its_last_blocks() -> None:
    accelerator = Accelerator(MIXED, 10_000)
    one = table("abcdef", 100, layout=MIXED)
    one.kept = [list(range(6)), [4, 5]]
    assert accelerator.admit(one, accelerator.computed(one))
    accelerator.fill(one, [(0, i) for i in range(6)] + [(1, 4), (1, 5)])
    accelerator.release(one)
    found = accelerator.computed(table("abcdef", 100, layout=MIXED))
    assert (found.tokens, found.ranges) == (96, ((0, 6), (4, 6)))
    assert accelerator.computed(table("abcdxx", 100, layout=MIXED)).tokens == 0


def test_memory_overflows_oldest_first_and_tail_before_head() -> None:
    accelerator = Accelerator(PLAIN, 800)
    serve(accelerator, table("abcd", 64))
    serve(accelerator, table("pqrs", 64))
    assert accelerator.evicted == 0
    serve(accelerator, table("xy", 32))
    assert accelerator.evicted == 2
    assert accelerator.computed(table("abcd", 70)).tokens == 32
    assert accelerator.computed(table("pqrs", 70)).tokens == 64
    assert accelerator.used_bytes == accelerator.peak_bytes == 800


def test_blocks_in_use_are_not_evicted_and_no_room_changes_nothing() -> None:
    accelerator = Accelerator(PLAIN, 800)
    running = table("abcd", 64)
    assert accelerator.admit(running, accelerator.computed(running))
    accelerator.fill(running, [(0, index) for index in range(4)])
    large = table("abcdefgh", 144)
    before = accelerator.used_bytes
    assert accelerator.computed(large).tokens == 64
    assert not accelerator.admit(large, accelerator.computed(large))
    assert accelerator.used_bytes == before
    accelerator.check()
    accelerator.release(running)
    assert accelerator.admit(table("pqrstuvw", 128), accelerator.computed(table("pqrstuvw", 128)))
    assert accelerator.evicted == 4


def test_two_requests_that_compute_the_same_chunk_use_one_block() -> None:
    accelerator = Accelerator(PLAIN, 1000)
    one, other = table("abcd", 64), table("abcd", 64)
    for each in (one, other):
        assert accelerator.admit(each, accelerator.computed(each))
    for each in (one, other):
        accelerator.fill(each, [(0, index) for index in range(4)])
    assert accelerator.used_bytes == 400
    accelerator.release(one)
    accelerator.release(other)
    accelerator.check()
    assert accelerator.used_bytes == 400


def test_version_changes_with_what_is_cached() -> None:
    accelerator = Accelerator(PLAIN, 400)
    serve(accelerator, table("ab", 32))
    version = accelerator.version
    serve(accelerator, table("ab", 33))
    assert accelerator.version == version
    serve(accelerator, table("pqrs", 64))
    assert accelerator.version > version


# The engine over a cache that the test scripts.


def requests(*lengths: int, output: int = 11) -> list[Request]:
    return [Request(i, 0.0, n, output, np.arange(1, dtype=np.int64) + i) for i, n in enumerate(lengths)]


def own_keys(request: Request) -> Sequence[Sequence[OffloadKey]]:
    return keys(chr(97 + int(request.ids[0])), request.prompt_tokens // 16)


PLAN = Plan(PLAIN, own_keys, lambda request: [list(range(request.prompt_tokens // 16))])
COSTS = CostModel(
    prefill_tokens_per_s=1000.0,
    prefill_step_tokens=100,
    step_overhead_s=0.0,
    decode_s_per_token=0.1,
    link_bytes_per_s=1000.0,
)


class Scripted(NoCache):
    """Answers after a number of polls; notes what it was told."""

    def __init__(self, hit: int = 0, patience: int = 0, good: bool = True) -> None:
        self.hit, self.patience, self.good = hit, patience, good
        self.stored: list[tuple[int, int]] = []
        self.finished: list[str] = []
        self.now = 0.0

    def poll(self, active: Active, computed: int) -> int | None:
        self.patience -= 1
        return None if self.patience >= 0 else max(0, self.hit - computed)

    def next_time(self) -> float | None:
        self.now += 0.5
        return 1000.0 + self.now

    def take(self, active: Active, tokens: int) -> Load | None:
        return Load(((0, self.hit // 16),), self.hit, 500, None) if tokens else None

    def loaded(self, active: Active, load: Load) -> bool:
        return self.good

    def store(self, active: Active, chunks: Sequence[tuple[int, int]]) -> None:
        self.stored += chunks

    def finish(self, active: Active) -> None:
        self.finished.append(active.name)


def run(cache: NoCache, work: list[Request], concurrency: int = 1) -> list[Served]:
    accelerator = Accelerator(PLAIN, 100_000)
    engine = SimulatedEngine(PLAN, COSTS, cache, ManualClock(), accelerator, concurrency)
    served = engine.run(work)
    accelerator.check()
    return served


def test_time_to_first_token_is_prefill_when_nothing_is_cached() -> None:
    served = run(NoCache(), requests(250, 40))
    assert [one.ttft_s for one in served] == pytest.approx([0.25, 0.04])
    assert [one.hit_tokens for one in served] == [0, 0]


def test_a_hit_costs_its_copy_and_saves_its_prefill() -> None:
    cache = Scripted(hit=160)
    (one,) = run(cache, requests(250))
    assert one.ttft_s == pytest.approx(0.5 + 0.09)
    assert (one.computed_tokens, one.external_tokens) == (0, 160)
    assert cache.stored == [(0, index) for index in range(15)]
    assert cache.finished == ["r0"]


def test_a_hit_of_the_whole_prompt_leaves_one_token_to_compute() -> None:
    (one,) = run(Scripted(hit=160), requests(160))
    assert one.external_tokens == 159


def test_a_failed_load_is_computed() -> None:
    cache = Scripted(hit=160, good=False)
    (one,) = run(cache, requests(250))
    assert one.hit_tokens == 0
    assert one.ttft_s == pytest.approx(0.5 + 0.25)
    assert len(cache.stored) == 15


def test_a_request_waits_until_the_answer_is_definite() -> None:
    (one,) = run(Scripted(patience=3), requests(100))
    assert one.ttft_s > 1.0


def test_requests_share_the_prefill_step_by_step() -> None:
    served = run(NoCache(), requests(300, 100), concurrency=2)
    assert [(one.index, round(one.ttft_s, 3)) for one in served] == [(1, 0.2), (0, 0.4)]


def test_a_request_that_does_not_fit_waits_for_the_one_before_it() -> None:
    accelerator = Accelerator(PLAIN, 2000)
    engine = SimulatedEngine(PLAN, COSTS, NoCache(), ManualClock(), accelerator, 2)
    served = engine.run(requests(250, 250))
    assert [one.ttft_s for one in served] == pytest.approx([0.25, 0.25 + 1.0 + 0.25])


@pytest.mark.parametrize("field", ["prefill_tokens_per_s", "link_bytes_per_s", "accelerator_tokens"])
def test_costs_that_make_no_sense_are_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        CostModel(**{field: 0})
