"""A small world around the core for random tests: prompts, a simulated engine with its ranks, tiers, and real bytes.

The bytes of a chunk are made from its key and a version, written into primary by the simulated ranks, moved by the
tiers, and compared with a plain dict on every load. `world_rules` says what can happen, `world_checks` what must hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstrata.core.ledger import Job
from kvstrata.core.messages import (
    Answer,
    CancelJob,
    LoadPlan,
    RequestContext,
    RequestOptions,
    StorePlan,
    SubmitLoad,
    SubmitStore,
)
from kvstrata.core.requests import WAITING, Request, RequestState
from kvstrata.core.settings import CoreConfig
from kvstrata.testing.choices import Choices
from kvstrata.testing.coverage import Coverage, state_name
from kvstrata.testing.layouts import random_layout
from kvstrata.testing.profiles import WILD, MakeTiers, Profile, model_tiers
from kvstrata.testing.scripted import PendingJob, ScriptedTier
from kvstrata.testing.stack import CoreStack, block_key, carry_out
from kvstrata.testing.tier_harness import payload_of
from kvstrata.tiers.base import Tier
from kvstrata.types import (
    JobEnded,
    KeysDone,
    KeysRemoved,
    LookupResult,
    OffloadKey,
    ProbeDone,
    ResetReason,
    TierEvent,
)


@dataclass(slots=True, eq=False)
class EngineRequest:
    """What the simulated engine knows of one request."""

    request_id: str
    path: tuple[tuple[str, int], ...]
    """The prompt as (name, tokens up to which it is that name's); requests that share names share keys."""
    total: int
    options: RequestOptions
    per_key: bool
    context: RequestContext
    computed: int = 0
    hashed: int = 0
    """Tokens whose whole chunks have keys."""
    keyed: list[int] = field(default_factory=list)
    keys: list[list[OffloadKey]] = field(default_factory=list)
    answer: Answer | None = None
    """A definite answer that was not taken yet."""
    waited: float = 0.0
    quiet: float = 0.0
    """Seconds of `waited` since any tier last reported anything."""
    mark: float = 0.0
    last_poll: float = 0.0
    waiting_keys: bool = False
    bad: set[OffloadKey] = field(default_factory=set)
    """Keys whose load failed for this request."""


@dataclass(slots=True, eq=False)
class RankLoad:
    """A load that the ranks have not all reported."""

    plan: LoadPlan
    content: list[bytes]
    epoch: int
    left: int
    ok: bool = True


@dataclass(slots=True, eq=False)
class RankStore:
    """A store that the ranks have not all reported."""

    plan: StorePlan
    payloads: list[bytes]
    generation: int
    done: int = 0
    ok: bool = True


class World:
    """The stack, the engine and the model. Everything that happens is written down in `program`."""

    def __init__(
        self, choices: Choices, profile: Profile = WILD, coverage: Coverage | None = None,
        make_tiers: MakeTiers | None = None,
    ) -> None:  # fmt: skip
        self.profile = profile
        self.coverage = Coverage() if coverage is None else coverage
        self.program: list[str] = []
        rng = np.random.default_rng(choices.below(1 << 30))
        self.layout = random_layout(rng, groups=4)
        self.ranks = 1 + choices.below(2)
        tiers = make_tiers(choices, self.layout) if make_tiers is not None else model_tiers(choices, profile)
        self.config = self._config(choices)
        self.stack = CoreStack(
            self.layout, tiers, config=self.config, auto=False, ranks=self.ranks, events=True, checked=False
        )
        self.manager = self.stack.core
        self.core = self.manager._core
        self.tiers: list[Tier] = self.stack.tiers
        self.scripted = [tier for tier in tiers if isinstance(tier, ScriptedTier)]
        self.requests: dict[str, EngineRequest] = {}
        self.loads: dict[int, RankLoad] = {}
        self.stores: dict[int, RankStore] = {}
        self.lost: list[PendingJob] = []
        self.lost_probes: list[tuple[ScriptedTier, int, int]] = []
        self.sent: list[tuple[int, TierEvent]] = []
        """Events that were delivered, to be delivered twice."""
        self.outstanding: dict[int, int] = {}
        """Jobs that tiers have got and not ended, with their tier."""
        self.job_ids: set[int] = set()
        self.valid: dict[OffloadKey, set[bytes]] = {}
        self.old: dict[OffloadKey, set[bytes]] = {}
        """Content of earlier epochs: must not be delivered, but jobs that were overtaken may still read it."""
        self.epoch = 0
        self.generation = 0
        self.offered: dict[str, set[OffloadKey]] = {}
        """Per tier the keys whose cascade a store has asked for."""
        self._opened = 0
        self.versions = 0
        self.names = 0
        self.resident: set[OffloadKey] = set()
        """Primary as the cache events tell it."""
        self._say(f"layout = {self.layout}")
        self._say(f"config = {self.config}, ranks = {self.ranks}")
        for tier in self.tiers:
            self._say(f"tier {tier.name}: {tier.capabilities} {tier.medium} {tier.locality}")

    def _say(self, line: str) -> None:
        self.program.append(line)

    # -- set-up

    def _config(self, choices: Choices) -> CoreConfig:
        largest = max(self.layout.chunk_bytes)
        if self.profile.roomy:
            return CoreConfig(capacity_bytes=4000 * largest, promotion_share=1.0, store_reserve=0.0, inflight_share=1.0)
        pick = choices.pick
        chunks = pick((40, 24, 12, 8, 4, 3, 2, 1)) if choices.below(2) else choices.between(1, 40)
        steady = not self.profile.faults
        alignment = pick((1, 1, 1, 8))
        return CoreConfig(
            capacity_bytes=chunks * (largest + alignment - 1) + choices.below(largest),
            alignment=alignment,
            policy=pick(("lru", "s3fifo")),
            promotion_share=pick((0.5, 0.25, 1.0)),
            store_reserve=pick((0.1, 0.0, 0.3)),
            inflight_share=pick((0.25, 0.05, 1.0)),
            stall_s=2.0 if steady else pick((2.0, 0.5, 0.0, 50.0)),
            total_s=2.0 if steady else pick((2.0, 0.5, 0.0, 50.0)),
            tier_stall_s={} if steady else pick(({}, {}, {"tier0": 6.0}, {"tier0": 0.2})),
            tier_total_s={} if steady else pick(({}, {}, {"tier0": 6.0}, {"tier0": 0.2})),
            min_rate_bytes_per_s=pick((1e9, 500.0)),
            job_idle_s=pick((10.0, 3.0, 40.0)),
            job_total_s=pick((60.0, 5.0)),
            max_fetch_rounds=pick((3, 1)),
            max_verdicts=pick((65_536, 3)),
            max_requests=pick((100_000,) * 7 + (4,)) if self.profile.faults else 100_000,
            cascade_queue=pick((1024, 4, 1)),
            breaker_errors=pick((3, 1)),
        )

    # -- prompts

    def keys_of(self, path: tuple[tuple[str, int], ...], total: int) -> list[list[OffloadKey]]:
        """Keys of the whole chunks of the first `total` tokens, per group."""
        return [
            [block_key(_name_at(path, end), end, group) for end in range(tpc, total + 1, tpc)]
            for group, tpc in enumerate(self.layout.tokens_per_chunk)
        ]

    def fork(self, choices: Choices, name: str) -> tuple[tuple[str, int], ...]:
        """A prompt: one of three well-known ones, or one that leaves another request's prompt at some token."""
        paths = [request.path for request in self.requests.values()]
        if not paths or choices.below(3) < 2:
            return ((choices.pick("abc"), 1 << 30),)
        path, cut = choices.pick(paths), choices.between(1, 40)
        if choices.below(2) == 0:
            return path
        kept = [(own, until) for own, until in path if until < cut]
        return (*kept, (path[len(kept)][0], cut), (name, 1 << 30))

    def new_payload(self, key: OffloadKey, length: int) -> bytes:
        """Bytes for a key that were never used before."""
        self.versions += 1
        return payload_of(key, length, self.versions)

    # -- looking

    def record(self, request: EngineRequest) -> Request | None:
        """The core's record of a request."""
        return self.core.requests.get(request.request_id)

    def state(self, request: EngineRequest) -> str:
        """The state of a request, as the table of coverage names it."""
        return state_name(self.record(request))

    def strike(self, event: str, request: EngineRequest | str | None) -> None:
        """Count an event in the state of the request that it strikes."""
        name = request.request_id if isinstance(request, EngineRequest) else request
        self.coverage.strike(event, state_name(self.core.requests.get(name or "")))

    def strike_all(self, event: str) -> None:
        """Count an event that strikes everybody."""
        for request in self.core.requests.values():
            self.coverage.strike(event, state_name(request))

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of primary."""
        return bytes(self.stack.region[offset : offset + length])

    @property
    def now(self) -> float:
        """The time."""
        return self.stack.clock.monotonic()

    # -- calls of the engine

    def add(self, request: EngineRequest) -> None:
        """A new request."""
        request.keys = self.keys_of(request.path, request.total)
        request.keyed = [len(keys) for keys in request.keys]
        request.hashed = request.total
        self._say(f"add {request.request_id}: path={request.path} total={request.total} {request.options}")
        self.manager.add_request(request.request_id, request.keys, request.options)
        self.requests[request.request_id] = request
        self.drop_pruned()

    def drop_pruned(self) -> None:
        """Forget what the core forgot because there were too many records."""
        for name in [name for name in self.requests if self.core.requests.get(name) is None]:
            self._say(f"# {name} was the longest silent of too many records")
            self.coverage.note("records forgotten")
            del self.requests[name]

    def poll(self, request: EngineRequest, computed: int, total: int) -> Answer:
        """One poll of the two-phase door."""
        record = self.core.requests.require(request.request_id)
        waits = record.state in WAITING
        if record.state is RequestState.QUEUED:
            gap = min(self.now - request.mark, self.config.poll_gap_s)
            request.waited, request.quiet = request.waited + gap, request.quiet + gap
        if record.state is RequestState.RUNNING:
            request.waited = request.quiet = 0.0
        request.mark = request.last_poll = self.now
        answer = self.manager.poll(request.request_id, computed, total)
        self._say(f"poll {request.request_id} {computed} {total} -> {answer.hit} {answer.cause.value}")
        if record.state is not RequestState.LOADING:
            request.computed, request.total = computed, total
        request.answer = None if answer.hit is None else answer
        self.coverage.note(f"answer {answer.cause.value}")
        self.coverage.note("polls that wait" if waits and answer.hit is None else "polls with an answer")
        return answer

    def take(self, request: EngineRequest, tokens: int) -> LoadPlan | None:
        """The engine takes tokens of the hit; a plan goes to the ranks."""
        plan = self.manager.take(request.request_id, tokens)
        self._say(f"take {request.request_id} {tokens} -> {_describe(plan)}")
        request.answer = None
        request.waited = request.quiet = 0.0
        if plan is not None:
            self.accept_load(plan)
        return plan

    def accept_load(self, plan: LoadPlan) -> None:
        """The ranks get a load."""
        content = [self.read(o, n) for o, n in zip(plan.offsets.tolist(), plan.lengths.tolist(), strict=True)]
        self.loads[plan.job_id] = RankLoad(plan, content, self.epoch, self.ranks)

    def report_load(self, load: RankLoad, ok: bool) -> bool | None:
        """One rank has read the load's slots, and reports."""
        plan = load.plan
        load.ok &= ok
        load.left -= 1
        if not load.left:
            del self.loads[plan.job_id]
        done = self.manager.complete_load(plan.job_id, ok)
        self._say(f"load {plan.job_id} of {plan.request_id} reported {ok} -> {done}")
        request = self.requests.get(plan.request_id)
        if done is False and request is not None:
            request.bad.update(plan.keys)
        return done

    def prepare_store(self, request: EngineRequest, chunks: Sequence[tuple[int, int]]) -> StorePlan | None:
        """The engine offers chunks."""
        plan = self.manager.prepare_store(request.request_id, chunks)
        self._say(f"store {request.request_id} {list(chunks)} -> {_describe(plan)}")
        if plan is not None:
            payloads = [self.new_payload(k, n) for k, n in zip(plan.keys, plan.lengths.tolist(), strict=True)]
            self.stores[plan.job_id] = RankStore(plan, payloads, self.generation)
        return plan

    def report_store(self, store: RankStore, ok: bool) -> None:
        """One rank has written its part of the store's slots, and reports; a rank that fails leaves rubbish."""
        plan, rank = store.plan, store.done
        store.done += 1
        store.ok &= ok
        for offset, payload in zip(plan.offsets.tolist(), store.payloads, strict=True):
            low, high = rank * len(payload) // self.ranks, (rank + 1) * len(payload) // self.ranks
            part = payload[low:high] if ok else b"\xee" * (high - low)
            self.stack.region[offset + low : offset + high] = part
        if store.done == self.ranks:
            del self.stores[plan.job_id]
            self._sign_of_life()
            if store.ok and store.generation == self.generation:
                for key, payload in zip(plan.keys, store.payloads, strict=True):
                    self.valid.setdefault(key, set()).add(payload)
                self._owe(plan)
        self._say(f"store {plan.job_id} of {plan.request_id} reported {ok}")
        self.manager.complete_store(plan.job_id, ok)

    def _owe(self, plan: StorePlan) -> None:
        """Each tier that the request may store to is to get these chunks."""
        request = self.requests.get(plan.request_id)
        for tier in self.tiers if request is not None else ():
            if request is not None and request.options.store_tiers.accepts(tier):
                self.offered.setdefault(tier.name, set()).update(plan.keys)

    def extend(self, request: EngineRequest, total: int) -> None:
        """The engine has hashed the chunks up to `total` tokens."""
        request.hashed = total = max(total, request.hashed)
        keys = self.keys_of(request.path, total)
        fresh = [new[have:] for new, have in zip(keys, request.keyed, strict=True)]
        self._say(f"extend {request.request_id} to {total}")
        self.manager.extend_keys(request.request_id, fresh)
        request.keys = keys
        request.keyed = [len(group) for group in keys]

    def preempt(self, request: EngineRequest) -> None:
        """The engine takes the request's blocks away."""
        record = self.record(request)
        if record is not None and record.state in (RequestState.RUNNING, RequestState.LOADING):
            request.waited = request.quiet = 0.0
        self._say(f"preempt {request.request_id}")
        self.manager.preempt(request.request_id)
        request.answer = None
        request.waiting_keys = False

    def finish(self, request: EngineRequest) -> None:
        """The request is done, or aborted."""
        self._say(f"finish {request.request_id}")
        self.manager.finish(request.request_id)
        self.requests.pop(request.request_id, None)

    def reset(self, reason: ResetReason) -> None:
        """A new generation, and with invalid content a new epoch."""
        self._say(f"reset {reason.value}")
        self.generation += 1
        if reason is ResetReason.CONTENT_INVALID:
            self.epoch += 1
            for key, payloads in self.valid.items():
                self.old.setdefault(key, set()).update(payloads)
            self.valid.clear()
        self.manager.reset_cache(reason)

    def lookup(self, request: EngineRequest, key: OffloadKey) -> LookupResult:
        """One lookup of the per-key door."""
        request.last_poll = self.now
        answer = self.manager.lookup(key, request.context)
        self.drop_pruned()
        self._say(f"lookup {request.request_id} {key[:4].hex()} -> {answer.value}")
        return answer

    def end_step(self) -> None:
        """The engine's step ends."""
        self._say("on_schedule_end")
        self.manager.on_schedule_end()

    # -- time and tiers

    def advance(self, seconds: float) -> None:
        """Let time pass, in one step."""
        for request in self.requests.values():
            record = self.record(request)
            counts = record is not None and record.state in (RequestState.RESOLVING, RequestState.FETCHING)
            if counts and not request.per_key:
                request.waited += seconds
                request.quiet += seconds
        self.stack.clock.advance(seconds)
        for request in self.requests.values():
            record = self.record(request)
            if record is None or record.state is not RequestState.QUEUED:
                request.mark = self.now
        self._say(f"advance {seconds}")
        self._strike_overdue()
        self.manager.advance(self.now)

    def _strike_overdue(self) -> None:
        """Count probes and loads whose bound has passed now."""
        idle, total = self.config.job_idle_s, self.config.job_total_s
        for probe in self.manager._presence.probes.values():
            if probe.started + idle <= self.now:
                self.strike("probe overdue", probe.request.request_id)
        for job in self.core.ledger:
            if job.tier >= 0 and not job.overdue and min(job.progressed + idle, job.started + total) <= self.now:
                if job.request_id:
                    self.strike("load overdue", job.request_id)
                else:
                    self.coverage.note("cascade overdue")

    def strike_breakers(self) -> None:
        """Count breakers that have opened since the last call."""
        opened = sum(tier.reads.opened for tier in self.core.tiers)
        if opened > self._opened:
            self.strike_all("breaker opened")
        self._opened = opened

    def hand_over(self) -> None:
        """Carry the core's commands to the tiers."""
        for command in self.manager.take_commands():
            name = type(command).__name__
            if isinstance(command, SubmitLoad | SubmitStore):
                keys = " ".join(key[:4].hex() for key in command.job.keys)
                self._say(f"  {name} {command.job.job_id} to tier{command.tier}: {keys}")
                self.outstanding[command.job.job_id] = command.tier
            elif isinstance(command, CancelJob):
                self._say(f"  {name} {command.job_id} to tier{command.tier}")
            else:
                self._say(f"  {name} to tier{command.tier}")
            self.coverage.note(name)
            carry_out(command, self.tiers, self.manager)

    def deliver(self, tier: int) -> int:
        """Carry what a tier reports into the core; how much it was."""
        events = self.tiers[tier].poll()
        for event in events:
            self.tell(tier, event)
        return len(events)

    def tell(self, tier: int, event: TierEvent) -> None:
        """One event of a tier."""
        self._strike_event(tier, event)
        self._say(f"  tier{tier}: {event}" if not isinstance(event, KeysRemoved) else f"  tier{tier}: removed")
        if isinstance(event, JobEnded):
            self.outstanding.pop(event.job_id, None)
        if not isinstance(event, KeysRemoved):
            self._sign_of_life()
            self.sent.append((tier, event))
            del self.sent[:-20]
        self.manager.on_event(tier, event)

    def _sign_of_life(self) -> None:
        """Something may have made progress for anybody."""
        for request in self.requests.values():
            request.quiet = 0.0

    def _strike_event(self, tier: int, event: TierEvent) -> None:
        if isinstance(event, ProbeDone):
            probe = self.manager._presence.probes.get((tier, event.ticket))
            name = "probe error" if event.error is not None else "probe answered"
            if probe is not None:
                current = self.core.requests.get(probe.request.request_id)
                self.coverage.strike(name, state_name(probe.request if current is probe.request else None))
            else:
                self.coverage.note("probe answered late or twice")
        elif isinstance(event, KeysDone | JobEnded):
            job = self.core.ledger.get(event.job_id)
            if job is None or job.tier != tier:
                self.coverage.note("job reported after its end")
            elif job.overdue:
                self.coverage.note("job reported when overdue")
            else:
                self._strike_job(job, event)

    def _strike_job(self, job: Job, event: KeysDone | JobEnded) -> None:
        kind = "load" if job.request_id else "cascade"
        if isinstance(event, JobEnded):
            self.strike(f"{kind} ended", job.request_id) if kind == "load" else self.coverage.note("cascade ended")
            return
        causes = {cause.value for _, cause in event.failed}
        for what in sorted(causes) + (["landed"] if event.done else []):
            name = what if what == "landed" else f"failed {what}"
            if kind == "load":
                self.strike(name, job.request_id)
                if name != "landed":
                    self.strike("failed", job.request_id)
            else:
                self.coverage.note(f"cascade {name}")

    def settle(self, rounds: int = 1000) -> None:
        """Carry events and commands until neither is left."""
        for _ in range(rounds):
            self.hand_over()
            if not sum(self.deliver(i) for i in range(len(self.tiers))) and not self.core.commands:
                return
        raise AssertionError("events and commands never came to an end")


def _name_at(path: tuple[tuple[str, int], ...], end: int) -> str:
    """The names that the tokens before `end` have, one after the other."""
    names = []
    for name, until in path:
        names.append(name)
        if end <= until:
            break
    return ".".join(names)


def _describe(plan: LoadPlan | StorePlan | None) -> str:
    if plan is None:
        return "nothing"
    return f"job {plan.job_id} slots {plan.slots.tolist()}"
