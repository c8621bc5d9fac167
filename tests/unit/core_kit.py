"""Layouts, tiers and small steps that the tests of the core share."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.core.manager import Statistics
from kvstrata.core.messages import RequestContext, RequestOptions, TierFilter
from kvstrata.core.requests import Request, RequestState
from kvstrata.core.settings import CoreConfig
from kvstrata.core.state import CoreState
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds import FullAttention, RecurrentState, SlidingWindow
from kvstrata.testing import ScriptedTier
from kvstrata.testing.stack import CoreStack
from kvstrata.types import Capabilities, JobKind, LookupResult, OffloadKey

TPC = 16
SIZE = 64
"""Tokens and bytes per chunk of `FULL`."""

FULL = Layout((Group(FullAttention(), TPC, chunk_bytes=SIZE),))
WINDOW = Layout((Group(SlidingWindow(2 * TPC, 0), TPC, chunk_bytes=SIZE),))
HYBRID = Layout(
    (
        Group(FullAttention(), TPC, chunk_bytes=SIZE),
        Group(SlidingWindow(2 * TPC, 0), TPC, chunk_bytes=SIZE),
    )
)
RECURRENT = Layout(
    (
        Group(FullAttention(), TPC, chunk_bytes=SIZE),
        Group(RecurrentState(), TPC, chunk_bytes=SIZE),
    )
)
S_RFC = Layout(
    (
        Group(FullAttention(), 128, chunk_bytes=1024),
        Group(SlidingWindow(32, 0), 16, chunk_bytes=64),
        Group(SlidingWindow(32, 0), 16, chunk_bytes=64),
    )
)
"""Four large chunks and twice 32 small ones for 512 tokens; 68 keys."""


def sync_tier(name: str = "near", **kwargs: object) -> ScriptedTier:
    """A tier that answers probes from memory."""
    return ScriptedTier(name=name, capabilities=Capabilities(sync_probe=True), **kwargs)  # type: ignore[arg-type]


def async_tier(name: str = "far", *, max_batch: int = 1024, shared: bool = False, **kwargs: object) -> ScriptedTier:
    """A tier whose probes the test answers."""
    capabilities = Capabilities(sync_probe=False, max_batch=max_batch, shared=shared)
    return ScriptedTier(name=name, capabilities=capabilities, **kwargs)  # type: ignore[arg-type]


def settings(chunks: int, size: int = SIZE, **kwargs: object) -> CoreConfig:
    """A configuration whose primary has room for `chunks` chunks of `size` bytes."""
    return CoreConfig(capacity_bytes=chunks * size, **kwargs)  # type: ignore[arg-type]


def wide(chunks: int, size: int = SIZE, **kwargs: object) -> CoreConfig:
    """The same without share, reserve and pacing, for tests of something else."""
    return settings(chunks, size, promotion_share=1.0, store_reserve=0.0, inflight_share=1.0, **kwargs)


def stack_of(
    layout: Layout = FULL, tiers: Sequence[ScriptedTier] = (), config: CoreConfig | None = None, **kwargs: object
) -> CoreStack:
    """A stack; by default with a primary of 64 chunks without limits but its size."""
    return CoreStack(layout, tiers, config=config or wide(64, max(layout.chunk_bytes)), **kwargs)  # type: ignore[arg-type]


def core_of(stack: CoreStack) -> CoreState:
    """The facts of the core, for tests that look inside."""
    return stack.core._core


def record(stack: CoreStack, request_id: str) -> Request:
    """A request's record."""
    return core_of(stack).requests.require(request_id)


def state(stack: CoreStack, request_id: str) -> RequestState:
    """Where a request stands."""
    return record(stack, request_id).state


def statistics(stack: CoreStack) -> Statistics:
    """The core's snapshot."""
    return stack.core.statistics()


def context(request_id: str = "a", **kwargs: object) -> RequestContext:
    """Who asks through the per-key door."""
    return RequestContext(request_id, **kwargs)  # type: ignore[arg-type]


def flat(keys: Sequence[Sequence[OffloadKey]]) -> list[OffloadKey]:
    """Keys of all groups in one list."""
    return [key for group in keys for key in group]


def add_held(stack: CoreStack, tier: ScriptedTier, request_id: str, tokens: int) -> list[list[OffloadKey]]:
    """A request whose chunks all are in `tier`."""
    keys = stack.add(request_id, tokens)
    hold(stack, tier, keys)
    return keys


def hold(stack: CoreStack, tier: ScriptedTier, keys: Sequence[Sequence[OffloadKey]]) -> None:
    """Make `tier` have these keys, by group, with payloads of the right length."""
    for group, part in enumerate(keys):
        tier.put(part, length=stack.layout.chunk_bytes[group])


def fill(
    stack: CoreStack, request_id: str, tokens: int, *, seed: str | None = None, cascade: bool = False
) -> list[list[OffloadKey]]:
    """Store all chunks of a request and finish it: they stay in primary, evictable."""
    everywhere = RequestOptions() if cascade else RequestOptions(store_tiers=TierFilter(names=frozenset()))
    keys = stack.add(request_id, tokens, everywhere, seed=seed)
    stack.store(request_id)
    stack.finish(request_id)
    return keys


def finish_loads(stack: CoreStack, *tiers: ScriptedTier) -> None:
    """End every load of the tiers, also those that follow, as a healthy tier would."""
    while any(tier.loads for tier in tiers):
        for tier in tiers:
            for job in list(tier.loads):
                job.finish()
        stack.pump()
        stack.check()


def answer_probes(stack: CoreStack, *tiers: ScriptedTier) -> None:
    """Answer every probe of the tiers, also those that follow."""
    while any(tier.probes for tier in tiers):
        for tier in tiers:
            for probe in list(tier.probes):
                probe.finish()
        stack.pump()
        stack.check()


def loaded_keys(tier: ScriptedTier) -> list[OffloadKey]:
    """All keys that the tier was told to load so far, in order."""
    return [key for call in tier.calls_of("submit_load") for key in call.keys]


def stored_keys(tier: ScriptedTier) -> list[OffloadKey]:
    """All keys that the tier was told to store so far, in order."""
    return [key for call in tier.calls_of("submit_store") for key in call.keys]


def in_primary(stack: CoreStack, keys: Sequence[OffloadKey]) -> list[bool]:
    """Whether primary has a slot for each key, ready or reserved."""
    return [slot >= 0 for slot in stack.core.residency.find(keys).tolist()]


def go_idle(stack: CoreStack) -> None:
    """Nothing must be left of anything: all requests finish, and the core must be clean."""
    for request in core_of(stack).requests.values():
        stack.finish(request.request_id)
    for job in list(core_of(stack).ledger):
        for _ in range(job.reports_left):
            if job.kind is JobKind.LOAD:
                stack.core.complete_load(job.job_id)
            elif job.kind is JobKind.STORE:
                stack.core.complete_store(job.job_id)
    stack.pump()
    while unfinished := [job for tier in stack.tiers for job in [*tier.loads, *tier.stores]]:  # type: ignore[attr-defined]
        for pending in unfinished:
            pending.finish()
        stack.pump()
    stack.check()
    residency = stack.core.residency
    assert residency.pinned_bytes == residency.held_bytes == 0
    assert residency.reserved_bytes == residency.quarantined_bytes == 0
    counters = core_of(stack).counters
    stack.core.close_account()
    classes = counters.consumed + counters.not_taken + counters.cancelled + counters.expired + counters.failed
    assert counters.promoted == classes


# the per-key door

MISS, HIT, PENDING, RETRY = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY


def look(stack: CoreStack, name: str, keys: list[OffloadKey]) -> list[LookupResult]:
    """All answers of one step; the step does not end."""
    return [stack.lookup(key, context(name)) for key in keys]


def step(stack: CoreStack, name: str, keys: list[OffloadKey]) -> list[LookupResult]:
    """One scheduler step of one request."""
    stack.pump()
    answers = look(stack, name, keys)
    stack.end_step()
    return answers


def held_by(tier: ScriptedTier, stack: CoreStack, seed: str, chunks: int) -> list[OffloadKey]:
    """Keys of a prompt that the tier has."""
    keys = stack.keys(seed, chunks * TPC)
    hold(stack, tier, keys)
    return flat(keys)


def window_scan(stack: CoreStack, name: str, keys: list[OffloadKey], window: int) -> tuple[int, bool]:
    """An engine's scan from the right: (end of the found window or 0, whether it has to wait)."""
    streak, pending, deferred = 0, False, False
    for i in range(len(keys) - 1, -1, -1):
        answer = stack.lookup(keys[i], context(name))
        if answer in (HIT, PENDING):
            streak, pending = streak + 1, pending or answer is PENDING
            if streak == window:
                return i + window, deferred or pending
        else:
            deferred |= answer is RETRY
            streak, pending = 0, False
    return 0, deferred
