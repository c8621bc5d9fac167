"""One replay: a trace, a model, tiers of given sizes; the product run with it, and the report of what happened.

The same requests are served twice by the same simulated engine: with the tiers, and, for comparison, with nothing
below accelerator memory. Everything is on one thread in simulated time, so a replay gives the same result each time;
`seed` draws the workload, the order of completions and the damage.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from kvstrata.core.settings import CoreConfig
from kvstrata.errors import ConfigError
from kvstrata.layout.groups import Layout
from kvstrata.layout.kept import default_keep_interval, kept_boundaries, stored_chunks
from kvstrata.layout.presets import PRESETS
from kvstrata.runtime.clock import SystemClock
from kvstrata.sim.accelerator import Accelerator
from kvstrata.sim.cost import CHANNELS, CostModel
from kvstrata.sim.engine import NoCache, Plan, Served, SimulatedEngine
from kvstrata.sim.hashing import BlockHasher
from kvstrata.sim.payload import scaled_bytes
from kvstrata.sim.report import ReplayReport, SettingsReport, TierReport, TtftReport
from kvstrata.sim.stack import PRIMARY, Stack, real_size
from kvstrata.sim.timed import Damage, TimedTier
from kvstrata.sim.traces import Request, Trace
from kvstrata.testing.clock import ManualClock
from kvstrata.testing.executor import ManualExecutor
from kvstrata.tiers.base import Tier
from kvstrata.tiers.registry import make_tier
from kvstrata.types import OffloadKey

ACCELERATOR = "accelerator"
TIER_KINDS = ("disk", "fs", "memory")
DEFAULT_CHUNK_TOKENS = 128
DEFAULT_PRIMARY_BYTES = 256 * 10**6
DEFAULT_DISK_BYTES = 2 * 10**9
DEFAULT_PAYLOAD_SCALE = 1.0 / 1024.0
_CASCADE_QUEUE = 1 << 17
"""Chunks that may wait for the tier: a prompt of 100k tokens is stored within a few simulated seconds."""

_KNOWN_KEYS = 500_000
"""Most keys that are remembered between their uses; about 100 bytes each."""

_KNOWN_LENGTHS = 4096
"""Most prompt lengths whose kept chunks are remembered."""

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """What to replay with. Sizes in bytes as really held; None: unlimited. Raises `ConfigError`, naming the field."""

    model: str = "plain"
    concurrency: int = 1
    primary_bytes: int | None = DEFAULT_PRIMARY_BYTES
    disk_bytes: int | None = DEFAULT_DISK_BYTES
    tier: str = "fs"
    directory: Path | None = None
    """Where the persistent tier keeps its files; None: a temporary directory that is removed afterwards."""
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    payload_scale: float = DEFAULT_PAYLOAD_SCALE
    seed: int = 0
    damage: float = 0.0
    verify: bool = True
    """False is for tests only: the tier hands out what it has without a check."""
    jitter: float = 0.2
    """Share by which simulated transfers are stretched or shortened at random: what makes the order of completions."""
    costs: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        if self.model not in PRESETS:
            raise ConfigError(f"--model: {self.model!r} is not known; there are {', '.join(PRESETS)}")
        if self.tier not in TIER_KINDS:
            raise ConfigError(f"--tier: {self.tier!r} is not known; there are {', '.join(TIER_KINDS)}")
        for name, value, low in (
            ("--concurrency", self.concurrency, 1),
            ("--chunk-tokens", self.chunk_tokens, 1),
            ("--primary", self.primary_bytes, 1),
            ("--disk", self.disk_bytes, 1),
        ):
            if value is not None and value < low:
                raise ConfigError(f"{name}: {value} must be at least {low}")
        if not 0.0 < self.payload_scale <= 1.0:
            raise ConfigError(f"--payload-scale: {self.payload_scale:g} must be above 0 and at most 1")
        for name, share in (("--damage", self.damage), ("jitter", self.jitter)):
            if not 0.0 <= share <= 1.0:
                raise ConfigError(f"{name}: {share:g} must be between 0 and 1")


class Model:
    """A preset at a chunk size: the layout with real bytes and with the payload's, and what is stored of a request."""

    def __init__(self, name: str, chunk_tokens: int, payload_scale: float) -> None:
        self.real: Layout = PRESETS[name].layout(chunk_tokens)
        groups = tuple(
            dataclasses.replace(group, chunk_bytes=scaled_bytes(group.chunk_bytes, payload_scale))
            for group in self.real.groups
        )
        self.layout: Layout = dataclasses.replace(self.real, groups=groups)
        self._interval = default_keep_interval(self.real)
        self._kept: OrderedDict[int, list[list[int]]] = OrderedDict()

    def kept(self, total: int) -> list[list[int]]:
        """Per group the chunks that are stored of a prompt of `total` tokens, in token order."""
        kept = self._kept.get(total)
        if kept is None:
            boundaries = kept_boundaries(self.real, total, total, total, self._interval)
            kept = self._kept[total] = [some.tolist() for some in stored_chunks(self.real, boundaries, total)]
            if len(self._kept) > _KNOWN_LENGTHS:
                self._kept.popitem(last=False)
        return kept

    def payload(self, trace: Trace, keys: Callable[[Request], Sequence[Sequence[OffloadKey]]]) -> int:
        """Payload bytes of all distinct chunks that `trace` stores."""
        seen: set[OffloadKey] = set()
        size = 0
        for request in trace.requests:
            for group, (some, kept) in enumerate(zip(keys(request), self.kept(request.prompt_tokens), strict=True)):
                fresh = {some[index] for index in kept if index < len(some)} - seen
                seen |= fresh
                size += len(fresh) * self.layout.chunk_bytes[group]
        return size


@dataclass(slots=True)
class Replay:
    """A finished replay: the report, and per request what became of it with and without the tiers."""

    report: ReplayReport
    served: list[Served]
    baseline: list[Served]
    unused: list[OffloadKey]
    """Chunks that were brought to primary and never used, once for each time."""
    notices: list[str]
    """What the tier has to say to its operator, a line each."""


def run_replay(settings: ReplaySettings, trace: Trace, progress: Progress | None = None) -> Replay:
    """Replay `trace`. Raises `ConfigError` or `CapacityError` for settings that cannot be had."""
    model = Model(settings.model, settings.chunk_tokens, settings.payload_scale)
    plan = make_plan(model, trace, settings.seed)
    costs = settings.costs
    room = accelerator_bytes(model, trace, costs)
    with ExitStack() as resources:
        stack = resources.enter_context(make_stack(settings, model, trace, plan, costs, resources))
        accelerator = Accelerator(model.real, room)
        engine = SimulatedEngine(plan, costs, stack, stack.clock, accelerator, settings.concurrency)
        started = stack.clock.monotonic()
        served = engine.run(trace.requests, progress)
        simulated = stack.clock.monotonic() - started
        stack.drain()
        tiers = _tier_reports(settings, stack, accelerator, served)
        stack.close_account()
        baseline = _baseline(plan, costs, trace, room, settings.concurrency)
        report = _report(settings, model, trace, stack, served, baseline, tiers, simulated)
        unused = [*stack.tier.unused, *stack.tier.arrived]
        notices = [str(line) for line in getattr(stack.tier.tier, "notices", ())]
    return Replay(report, served, baseline, unused, notices)


def make_plan(model: Model, trace: Trace, seed: int) -> Plan:
    """Keys and kept chunks of the trace's requests; remembered while they are few, since they are asked for thrice."""
    hasher = BlockHasher(trace, seed)
    tokens = model.layout.tokens_per_chunk
    known: dict[int, Sequence[Sequence[OffloadKey]]] = {}
    room = _KNOWN_KEYS

    def keys(request: Request) -> Sequence[Sequence[OffloadKey]]:
        nonlocal room
        found = known.get(request.index)
        if found is None:
            found = hasher.keys(request, tokens)
            count = sum(map(len, found))
            if count <= room:
                known[request.index] = found
                room -= count
        return found

    return Plan(model.real, keys, lambda request: model.kept(request.prompt_tokens))


def accelerator_bytes(model: Model, trace: Trace, costs: CostModel) -> int:
    """Accelerator memory of the simulated engine: what one request of `accelerator_tokens` needs, or the largest of
    the trace if that is more."""
    probe = Accelerator(model.real, 1)
    largest = sorted(trace.requests, key=lambda request: request.prompt_tokens + request.output_tokens)[-32:]
    sizes = [(costs.accelerator_tokens, 0), *((request.prompt_tokens, request.output_tokens) for request in largest)]
    return max(probe.need(total, spare, model.kept(total)) for total, spare in sizes)


def primary_bytes(settings: ReplaySettings, model: Model, trace: Trace, plan: Plan) -> int:
    """Bytes of primary. Memory is never unlimited: "unlimited" is room for every chunk of the trace at once."""
    if settings.primary_bytes is not None:
        return settings.primary_bytes
    everything = model.payload(trace, plan.keys)
    return everything + everything // 8 + 64 * max(model.layout.chunk_bytes)


def make_stack(
    settings: ReplaySettings, model: Model, trace: Trace, plan: Plan, costs: CostModel, resources: ExitStack
) -> Stack:
    """The product for this replay; not open yet. A temporary directory is removed with `resources`."""
    clock = ManualClock(wall_start=_wall_start(settings))
    draws = np.random.Generator(np.random.PCG64([abs(settings.seed), int(settings.seed < 0), 1]))
    damage = Damage(settings.damage, draws.spawn(1)[0])
    timed = TimedTier(
        _make_tier(settings, resources),
        costs.channel or CHANNELS[settings.tier],
        clock,
        draws,
        damage,
        real_size(model.real.chunk_bytes),
        settings.jitter,
    )
    capacity = primary_bytes(settings, model, trace, plan)
    if capacity < max(model.layout.chunk_bytes):
        raise ConfigError(f"--primary: {capacity} bytes hold no chunk of {max(model.layout.chunk_bytes)} bytes")
    # Bounds on waiting are made for real bytes at real rates; the payload is scaled, the simulated time is not.
    rate = 1e9 * max(model.layout.chunk_bytes) / max(model.real.chunk_bytes)
    config = CoreConfig(capacity_bytes=capacity, min_rate_bytes_per_s=rate, cascade_queue=_CASCADE_QUEUE)
    namespace, tag = identity(settings, model, trace)
    executor = ManualExecutor(seed=abs(settings.seed))
    return Stack(model.layout, model.real.chunk_bytes, config, timed, clock, executor, namespace, tag)


def identity(settings: ReplaySettings, model: Model, trace: Trace) -> tuple[bytes, int]:
    """Namespace and layout tag: chunks of another model, chunk size, payload size or kind of trace are foreign."""
    fields = {
        "format": "kvstrata replay 1",
        "model": settings.model,
        "layout": model.layout.parameters(),
        "tokens": model.layout.tokens_per_chunk,
        "bytes": model.layout.chunk_bytes,
        "source": trace.source,
        "seed": settings.seed,
    }
    text = msgspec.json.encode(fields)
    return xxhash.xxh3_128_digest(text), xxhash.xxh3_64_intdigest(text)


def _wall_start(settings: ReplaySettings) -> float:
    """Simulated wall time goes on where an earlier replay in the same directory may have ended."""
    return SystemClock().wall() if settings.directory is not None else 1_700_000_000.0


def _make_tier(settings: ReplaySettings, resources: ExitStack) -> Tier:
    """The persistent tier of the settings, with its limit."""
    limit = settings.disk_bytes
    if settings.tier == "memory":
        return make_tier("memory", limit=limit, verify=settings.verify)
    directory = settings.directory
    if directory is None:
        directory = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="kvstrata-replay-")))
    _check_directory(directory)
    return make_tier(settings.tier, path=str(directory), limit=limit, verify=settings.verify)


def _check_directory(directory: Path) -> None:
    """A tier never fails an engine's start for its directory; a replay that was asked to use it says so instead."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f"--dir {directory}: cannot be written: {error.strerror}") from None


def _baseline(plan: Plan, costs: CostModel, trace: Trace, room: int, concurrency: int) -> list[Served]:
    """The same requests with nothing below accelerator memory."""
    accelerator = Accelerator(plan.layout, room)
    return SimulatedEngine(plan, costs, NoCache(), ManualClock(), accelerator, concurrency).run(trace.requests)


def _tier_reports(
    settings: ReplaySettings, stack: Stack, accelerator: Accelerator, served: list[Served]
) -> dict[str, TierReport]:
    """What each place holds at the end."""
    primary, usage = stack.manager.residency.statistics(), stack.tier.usage()
    return {
        ACCELERATOR: TierReport(
            bytes_held=accelerator.used_bytes,
            bytes_limit=accelerator.capacity_bytes,
            bytes_peak=accelerator.peak_bytes,
            chunks_held=accelerator.chunks_held,
            evicted=accelerator.evicted,
            hit_tokens=sum(one.computed_tokens for one in served),
        ),
        PRIMARY: TierReport(
            bytes_held=primary.resident_bytes + primary.reserved_bytes + primary.quarantined_bytes,
            bytes_limit=None if settings.primary_bytes is None else primary.capacity_bytes,
            bytes_peak=stack.primary_peak,
            chunks_held=primary.keys,
            evicted=primary.evicted,
            hit_tokens=stack.hit_tokens[PRIMARY],
        ),
        stack.tier.name: TierReport(
            bytes_held=usage.bytes_held,
            bytes_limit=usage.bytes_limit,
            bytes_peak=usage.bytes_peak,
            chunks_held=usage.keys,
            evicted=usage.evicted,
            hit_tokens=stack.hit_tokens[stack.tier.name],
        ),
    }


def _report(
    settings: ReplaySettings,
    model: Model,
    trace: Trace,
    stack: Stack,
    served: list[Served],
    baseline: list[Served],
    tiers: dict[str, TierReport],
    simulated: float,
) -> ReplayReport:
    statistics = stack.manager.statistics()
    counters, by_tier = statistics.counters, statistics.tiers.values()
    damage = stack.tier.damage
    return ReplayReport(
        requests=len(served),
        prompt_tokens=trace.prompt_tokens,
        hit_tokens=sum(one.hit_tokens for one in served),
        chunks_probed=sum(tier.probed for tier in by_tier),
        chunks_promoted=counters.promoted,
        chunks_consumed=counters.consumed,
        chunks_not_taken=counters.not_taken,
        chunks_cancelled=counters.cancelled,
        chunks_expired=counters.expired,
        chunks_failed=counters.failed,
        bytes_promoted=counters.promoted_bytes,
        bytes_consumed=counters.consumed_bytes,
        wrong_chunks=stack.delivery.wrong,
        corrupt_chunks=stack.tier.corrupt,
        tiers=tiers,
        chunks_stored=counters.stored,
        chunks_loaded=counters.loaded,
        chunks_verified=stack.delivery.verified,
        chunks_damaged=damage.done,
        damaged_chunks_asked=damage.asked,
        cascades_dropped=sum(tier.cascade_dropped + tier.cascade_lapsed for tier in by_tier),
        failed_loads=stack.tier.failed_loads,
        ttft_with=TtftReport.of([one.ttft_s for one in served]),
        ttft_without=TtftReport.of([one.ttft_s for one in baseline]),
        simulated_s=simulated,
        settings=SettingsReport(
            trace=trace.name,
            model=settings.model,
            tier=settings.tier,
            chunk_tokens=model.layout.tokens_per_chunk,
            chunk_bytes=model.real.chunk_bytes,
            payload_bytes=model.layout.chunk_bytes,
            payload_scale=settings.payload_scale,
            concurrency=settings.concurrency,
            seed=settings.seed,
            damage=settings.damage,
            accelerator_bytes=tiers[ACCELERATOR].bytes_limit or 0,
        ),
    )
