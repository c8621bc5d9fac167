"""What holds of every replay: no wrong byte, exact promotions, damage seen, hits that no order of events changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.errors import ConfigError, KVStrataError
from kvstrata.layout.presets import PRESETS
from kvstrata.sim.cost import Channel, CostModel
from kvstrata.sim.replay import Model, Replay, ReplaySettings, make_plan, run_replay
from kvstrata.sim.report import ReplayReport
from kvstrata.sim.traces import Trace, read_mooncake
from kvstrata.sim.workloads import builtin_workload
from kvstrata.types import OffloadKey

CONVERSATION = Path(__file__).resolve().parents[2].parent / "shared" / "traces" / "mooncake_conversation.jsonl"
SMALLEST = 1e-9  # every chunk has 64 bytes
TIGHT = 64 * 600


def replay(trace: Trace, **settings: object) -> Replay:
    values: dict[str, object] = {"tier": "memory", "payload_scale": SMALLEST, "primary_bytes": TIGHT, **settings}
    return run_replay(ReplaySettings(**values), trace)  # type: ignore[arg-type]


def conversation(count: int | None = None) -> Trace:
    if not CONVERSATION.exists():
        pytest.skip(f"the trace {CONVERSATION.name} is not at ../shared/traces")
    return read_mooncake(CONVERSATION, count)


def room(model: str, chunks: int) -> int:
    """Primary for so many chunks of every group."""
    return 64 * chunks * len(Model(model, 128, SMALLEST).layout.groups)


def classes(report: ReplayReport) -> int:
    unused = report.chunks_not_taken + report.chunks_cancelled + report.chunks_expired + report.chunks_failed
    return report.chunks_consumed + unused


def check(report: ReplayReport) -> None:
    """What holds of every replay."""
    assert report.wrong_chunks == report.corrupt_chunks == 0
    assert report.hit_tokens == sum(tier.hit_tokens for tier in report.tiers.values()) < report.prompt_tokens
    assert report.chunks_promoted == classes(report)
    assert report.chunks_verified == report.chunks_loaded
    for tier in report.tiers.values():
        assert tier.bytes_held <= tier.bytes_peak
        assert tier.bytes_limit is None or tier.bytes_peak <= tier.bytes_limit


@pytest.mark.parametrize("model", PRESETS)
def test_one_request_at_a_time_promotes_exactly_what_it_consumes(model: str) -> None:
    small = CostModel(accelerator_tokens=16_384)
    report = replay(builtin_workload(150, 5), model=model, primary_bytes=room(model, 500), costs=small).report
    check(report)
    assert report.chunks_promoted == report.chunks_consumed > 0
    assert report.bytes_promoted == report.bytes_consumed > 0
    assert min(tier.hit_tokens for tier in report.tiers.values()) > 0
    assert report.tiers["primary"].evicted > 0
    assert report.tiers["accelerator"].evicted > 0
    assert report.ttft_with.mean_s < report.ttft_without.mean_s


@pytest.mark.parametrize("model", PRESETS)
def test_sixteen_requests_at_a_time_account_for_every_promotion(model: str) -> None:
    trace = builtin_workload(150, 6)
    run = replay(trace, model=model, primary_bytes=room(model, 600), concurrency=16)
    check(run.report)
    assert run.report.chunks_promoted >= run.report.chunks_consumed > 0
    assert len(run.unused) == run.report.chunks_not_taken
    explain(run, model, trace)


def test_what_is_not_taken_is_explained_by_a_larger_computed_prefix() -> None:
    """A crowded engine over a small primary: what one request waits for, another one computes meanwhile."""
    trace = builtin_workload(200, 7)
    costs = CostModel(accelerator_tokens=65_536, channel=Channel(4e9, 2e9, latency_s=1e-3, lanes=1))
    run = replay(trace, primary_bytes=room("plain", 400), concurrency=16, jitter=0.9, costs=costs)
    check(run.report)
    assert len(run.unused) == run.report.chunks_not_taken > 0
    explain(run, "plain", trace)


def explain(run: Replay, model: str, trace: Trace) -> None:
    """Each chunk that was brought in vain belongs to a request whose computed prefix grew past it meanwhile."""
    layout = Model(model, 128, SMALLEST)
    keys = make_plan(layout, trace, 0).keys
    wanted = set(run.unused)
    explained: set[OffloadKey] = set()
    for one in run.served:
        if one.computed_tokens > one.least_computed:
            for group, some in enumerate(keys(trace.requests[one.index])):
                below = -(-one.computed_tokens // layout.layout.tokens_per_chunk[group])
                explained |= wanted.intersection(some[:below])
    assert explained == wanted


def test_a_crowded_slow_tier_still_accounts_for_every_promotion() -> None:
    """Clocks run out, prefixes shrink and grow, grants are given back: each promotion ends in one class."""
    costs = CostModel(accelerator_tokens=32_768, channel=Channel(3e8, 3e9, latency_s=1e-3))
    run = replay(builtin_workload(120, 6), primary_bytes=room("plain", 300), concurrency=16, jitter=0.9, costs=costs)
    check(run.report)
    assert run.report.chunks_expired > 0
    assert any(one.most_computed > one.least_computed for one in run.served)


def test_damage_is_refused_and_counted_and_would_be_seen_without_the_check() -> None:
    trace = builtin_workload(300, 3)
    for rate in (0.001, 0.02):
        seen = replay(trace, damage=rate).report
        assert seen.wrong_chunks == 0
        assert seen.corrupt_chunks == seen.damaged_chunks_asked > 0
        assert seen.chunks_damaged > 0
        blind = replay(trace, damage=rate, verify=False).report
        assert blind.wrong_chunks == blind.damaged_chunks_asked > 0
        assert blind.corrupt_chunks == 0


@pytest.mark.parametrize("tier", ["fs", "disk"])
def test_damage_is_refused_by_persistent_tiers_too(tier: str, tmp_path: Path) -> None:
    trace = builtin_workload(60, 3)
    seen = replay(trace, damage=0.05, tier=tier, directory=tmp_path / "a").report
    assert seen.wrong_chunks == 0
    assert seen.corrupt_chunks == seen.damaged_chunks_asked > 0
    blind = replay(trace, damage=0.05, tier=tier, directory=tmp_path / "b", verify=False).report
    assert blind.wrong_chunks == blind.damaged_chunks_asked > 0


@pytest.mark.parametrize("tier", ["memory", "fs", "disk"])
def test_the_order_of_completions_does_not_change_the_hits(tier: str, tmp_path: Path) -> None:
    """The golden run: one workload, three orders of completions, with the tier's own tasks stepped by hand."""
    trace = builtin_workload(80, 0)
    reports = []
    for seed in (1, 2, 3):
        one = replay(trace, seed=seed, tier=tier, jitter=0.9, directory=tmp_path / str(seed)).report
        check(one)
        reports.append(one)
    assert {one.hit_tokens for one in reports} == {GOLDEN_HITS}
    assert len({one.simulated_s for one in reports}) == 3


GOLDEN_HITS = 269_696


def test_a_replay_gives_the_same_result_each_time() -> None:
    trace = builtin_workload(60, 2)
    one, other = (replay(trace, concurrency=16, damage=0.01).report for _ in range(2))
    assert one == other


@pytest.mark.parametrize("tier", ["fs", "disk"])
def test_a_second_run_in_the_same_directory_is_served_from_it(tier: str, tmp_path: Path) -> None:
    trace = builtin_workload(40, 4)
    first = replay(trace, tier=tier, directory=tmp_path, primary_bytes=10**6).report
    second = replay(trace, tier=tier, directory=tmp_path, primary_bytes=10**6).report
    check(second)
    assert second.hit_tokens > first.hit_tokens
    assert second.tiers[tier].hit_tokens > 0
    assert second.tiers[tier].chunks_held == first.tiers[tier].chunks_held


@pytest.mark.parametrize("tier", ["fs", "disk"])
def test_another_model_seed_or_payload_finds_nothing_in_it(tier: str, tmp_path: Path) -> None:
    trace = builtin_workload(20, 4)
    replay(trace, tier=tier, directory=tmp_path, primary_bytes=10**6)
    for other in ({"model": "mla"}, {"seed": 9}, {"payload_scale": 1e-5}):
        report = replay(trace, tier=tier, directory=tmp_path, **{"primary_bytes": 10**6, **other}).report
        check(report)
        assert report.tiers[tier].hit_tokens == 0


@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.slow
def test_200_requests_of_the_conversation_trace_on_fs(model: str, tmp_path: Path) -> None:
    check(replay(conversation(200), model=model, tier="fs", directory=tmp_path).report)


@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.slow
def test_200_requests_of_the_conversation_trace_on_disk(model: str, tmp_path: Path) -> None:
    check(replay(conversation(200), model=model, tier="disk", directory=tmp_path).report)


@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.slow
def test_1000_requests_of_the_conversation_trace_on_memory(model: str) -> None:
    check(replay(conversation(1000), model=model, payload_scale=1 / 1024, primary_bytes=256_000_000).report)


@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_the_whole_conversation_trace_on_memory(model: str) -> None:
    check(replay(conversation(), model=model, primary_bytes=64 * 20_000).report)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"model": "gpt"}, "--model: 'gpt'"),
        ({"tier": "tape"}, "--tier: 'tape'"),
        ({"concurrency": 0}, "--concurrency: 0"),
        ({"chunk_tokens": 0}, "--chunk-tokens: 0"),
        ({"payload_scale": 0.0}, "--payload-scale: 0"),
        ({"payload_scale": 2.0}, "--payload-scale: 2"),
        ({"payload_scale": float("nan")}, "--payload-scale: nan"),
        ({"damage": 1.5}, "--damage: 1.5"),
        ({"primary_bytes": 0}, "--primary: 0"),
        ({"disk_bytes": 0}, "--disk: 0"),
        ({"primary_bytes": 10}, "--primary: 10 bytes hold no chunk"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_option(settings: dict[str, object], names: str) -> None:
    with pytest.raises(ConfigError) as refused:
        replay(builtin_workload(1), **settings)
    assert str(refused.value).startswith(names)


def test_a_directory_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("not a directory")
    with pytest.raises(KVStrataError, match=str(taken)):
        replay(builtin_workload(1), tier="fs", directory=taken)
