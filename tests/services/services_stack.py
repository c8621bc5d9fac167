"""What the services tests drive: one tier on threads, and the whole stack (core, driver, one tier) of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import obstore
import redis
from obstore.store import S3Store
from servers import RedisServer, S3Server, Server, wait_until

from kvstrata.core.breakers import BreakerState
from kvstrata.core.manager import TieringOffloadingManager
from kvstrata.core.settings import CoreConfig
from kvstrata.layout.groups import Group, Layout
from kvstrata.layout.kinds.full import FullAttention
from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.driver import Driver
from kvstrata.runtime.executor import ThreadExecutor
from kvstrata.runtime.guard import GuardedTier
from kvstrata.testing.tier_harness import LAYOUT_TAG, NAMESPACE, payload_of
from kvstrata.tiers.base import Tier, TierContext
from kvstrata.tiers.registry import make_tier
from kvstrata.types import FailCause, JobEnded, KeysDone, OffloadKey, ProbeDone, ResetReason, TierJob

LONG_S = 60.0
TIMEOUT_S = 10.0
"""Of tiers whose server is well."""
SHORT_S = 0.7
"""Of tiers whose server is not."""
TPC = 16


@dataclass(frozen=True)
class Place:
    """Where a tier is, and how to reach behind it."""

    kind: str
    server: Any

    def options(self, part: str) -> dict[str, Any]:
        """What the tier is made with; also for another process."""
        fixed: dict[str, Any] = {"part": part, "timeout_s": TIMEOUT_S, "retry_s": 0.1}
        if self.kind == "redis":
            return {"url": self.server.url, **fixed}
        where = {"url": f"s3://{S3Server.BUCKET}/kv", "endpoint": self.server.endpoint, "region": "us-east-1"}
        return {**where, "credentials": "env:KVS", **fixed}

    def make(self, part: str, **more: Any) -> Tier:
        """A tier that is not open yet."""
        return make_tier(self.kind, **{**self.options(part), **more})

    def _name(self, key: OffloadKey, part: str, namespace: bytes) -> Any:
        scope = namespace + LAYOUT_TAG.to_bytes(8, "big")
        if self.kind == "redis":
            return b"kvstrata:c:" + scope + key
        return f"kv/parts/{part}/{scope.hex()}/{key.hex()}"

    def get(self, key: OffloadKey, part: str, namespace: bytes = NAMESPACE) -> bytes:
        """The record as it lies there."""
        name = self._name(key, part, namespace)
        if self.kind == "redis":
            with redis.Redis.from_url(self.server.url) as raw:
                return bytes(raw.get(name))
        return bytes(obstore.get(self._store(), name).bytes())

    def put(self, key: OffloadKey, part: str, record: bytes) -> None:
        """Lay something there."""
        name = self._name(key, part, NAMESPACE)
        if self.kind == "redis":
            with redis.Redis.from_url(self.server.url) as raw:
                raw.set(name, record)
        else:
            obstore.put(self._store(), name, record)

    def _store(self) -> S3Store:
        return S3Store(
            S3Server.BUCKET,
            endpoint=self.server.endpoint,
            region="us-east-1",
            access_key_id="test",
            secret_access_key="test",
            client_options={"allow_http": True},
        )


class Runner:
    """One tier on threads, with a primary of its own."""

    def __init__(self, tier: Tier, slots: int, chunk: int, *, namespace: bytes = NAMESPACE) -> None:
        self.tier = tier
        self.chunk = chunk
        self.region = memoryview(bytearray(slots * chunk))
        self.executor = ThreadExecutor(f"services-{tier.name}", 4)
        self.done: dict[int, set[int]] = {}
        self.failed: dict[int, dict[int, FailCause]] = {}
        self.ended: set[int] = set()
        self.probed: dict[int, list[int]] = {}
        self._jobs = 0
        self._context = TierContext(self.region, namespace, LAYOUT_TAG, SystemClock(), self.executor)

    def __enter__(self) -> Runner:
        self.tier.open(self._context)
        return self

    def __exit__(self, *_: object) -> None:
        self.tier.close(5.0)
        self.executor.close(5.0)

    def poll(self) -> bool:
        """Take what the tier tells; always true, for use in a condition."""
        for event in self.tier.poll():
            match event:
                case KeysDone():
                    self.done.setdefault(event.job_id, set()).update(event.done)
                    self.failed.setdefault(event.job_id, {}).update(dict(event.failed))
                case JobEnded():
                    self.ended.add(event.job_id)
                case ProbeDone():
                    self.probed[event.ticket] = event.answers.tolist()
        return True

    def _job(self, keys: Sequence[OffloadKey], first_slot: int) -> TierJob:
        self._jobs += 1
        offsets = [(first_slot + index) * self.chunk for index in range(len(keys))]
        return TierJob(self._jobs, list(keys), offsets, [self.chunk] * len(keys))

    def submit_store(self, keys: Sequence[OffloadKey], first_slot: int = 0) -> int:
        """Store the keys' payloads; returns the job."""
        job = self._job(keys, first_slot)
        for key, offset in zip(job.keys, job.offsets, strict=True):
            self.region[offset : offset + self.chunk] = payload_of(key, self.chunk)
        self.tier.submit_store(job)
        return job.job_id

    def store(self, keys: Sequence[OffloadKey]) -> set[int]:
        """Store, wait; the indices that worked."""
        job = self.submit_store(keys)
        wait_until(lambda: self.poll() and job in self.ended, "a store", LONG_S)
        return self.done.get(job, set())

    def load(self, keys: Sequence[OffloadKey]) -> dict[int, FailCause | None]:
        """Load, wait, check every byte; per index why it failed, None if it worked."""
        job = self._job(keys, 0)
        for offset in job.offsets:
            self.region[offset : offset + self.chunk] = bytes(self.chunk)
        self.tier.submit_load(job)
        wait_until(lambda: self.poll() and job.job_id in self.ended, "a load", LONG_S)
        for index in self.done.get(job.job_id, ()):
            offset = job.offsets[index]
            assert self.region[offset : offset + self.chunk] == payload_of(job.keys[index], self.chunk)
        done, failed = self.done.get(job.job_id, set()), self.failed.get(job.job_id, {})
        return {i: None if i in done else failed.get(i, FailCause.IO_ERROR) for i in range(len(keys))}

    def present(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Those that the tier says are there."""
        ticket = self.tier.probe(keys)
        if not isinstance(ticket, int):
            return []
        wait_until(lambda: self.poll() and ticket in self.probed, "a probe", LONG_S)
        return [key for key, answer in zip(keys, self.probed[ticket], strict=True) if answer == 2]


class Engine:
    """Core, driver with its thread, and one tier, as in an engine: a request is stored, forgotten, and served again."""

    BOUND_S = 1.0
    """`total_s` and `stall_s` of the core: a request must be answered within it, whatever the server does."""

    def __init__(self, tier: Tier, chunks: int, chunk: int, layout: Layout | None = None, **core: Any) -> None:
        self.chunk = chunk
        self.layout = layout or Layout((Group(FullAttention(), TPC, chunk_bytes=chunk),))
        self.region = memoryview(bytearray(chunks * chunk))
        self.clock = SystemClock()
        self.executor = ThreadExecutor("services", 4)
        self.guard = GuardedTier(tier)
        times = {"stall_s": self.BOUND_S, "total_s": self.BOUND_S, "breaker_open_s": 0.1, "breaker_open_max_s": 0.5}
        shares = {"promotion_share": 1.0, "store_reserve": 0.0, "inflight_share": 1.0, "backoff_s": 0.05}
        config = CoreConfig(capacity_bytes=len(self.region), **{**times, **shares, "backoff_max_s": 0.2, **core})
        self.manager = TieringOffloadingManager(self.layout, config, [self.guard])
        self.driver: Driver[TieringOffloadingManager] = Driver(self.manager, [self.guard], self.clock)
        self._requests = 0

    def __enter__(self) -> Engine:
        self.guard.open(TierContext(self.region, NAMESPACE, LAYOUT_TAG, self.clock, self.executor, self.driver.wake))
        assert self.guard.open_error is None, self.guard.open_error
        self.driver.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self.driver.close(10.0)
        self.executor.close(5.0)
        assert self.driver.statistics().last_faults == ()
        assert self.guard.statistics().faults == ()

    def ask(self, what: Callable[[TieringOffloadingManager], Any]) -> Any:
        """One call of the core under the driver's lock."""
        return self.driver.call(what)

    def put(self, keys: Sequence[OffloadKey]) -> None:
        """Compute and store a prompt; what the tier makes of it comes later."""
        self._requests += 1
        name = f"put-{self._requests}"
        with self.driver.step() as manager:
            manager.add_request(name, [keys])
            plan = manager.prepare_store(name, [(0, index) for index in range(len(keys))])
            if plan is not None:
                for (_, index), offset in zip(plan.chunks, plan.offsets, strict=True):
                    self.region[int(offset) : int(offset) + self.chunk] = payload_of(keys[index], self.chunk)
                manager.complete_store(plan.job_id)
            manager.finish(name)

    def put_down(self, keys: Sequence[OffloadKey]) -> None:
        """Store a prompt and wait until the tier has all of it."""
        before = self.cascaded
        self.put(keys)
        wait_until(lambda: self.cascaded - before >= len(keys), "chunks on the tier", LONG_S)

    @property
    def cascaded(self) -> int:
        """Chunks that reached the tier."""
        return int(self.ask(lambda manager: manager.statistics().tiers[self.guard.name].cascaded))

    def forget(self) -> None:
        """Drop primary; the tier keeps what it has."""
        self.ask(lambda manager: manager.reset_cache(ResetReason.MEMORY_GOING_AWAY))

    def serve(self, keys: Sequence[OffloadKey] | Sequence[Sequence[OffloadKey]], tokens: int = 0) -> tuple[int, float]:
        """Tokens of the external hit of a request with these keys, every byte checked, and how long that took.

        One token follows the whole chunks, so that all of them may be used.
        """
        self._requests += 1
        name = f"serve-{self._requests}"
        groups: Any = [keys] if isinstance(keys[0], bytes) else keys
        total = tokens or len(keys) * TPC + 1
        begun = self.clock.monotonic()
        self.ask(lambda manager: manager.add_request(name, groups))
        hit: list[int] = []

        def answered() -> bool:
            answer = self.ask(lambda manager: manager.poll(name, 0, total).hit)
            if answer is not None:
                hit.append(answer)
            return bool(hit)

        wait_until(answered, "an answer", LONG_S)
        took = self.clock.monotonic() - begun
        with self.driver.step() as manager:
            plan = manager.take(name, hit[0])
            if plan is not None:
                for key, offset, length in zip(plan.keys, plan.offsets, plan.lengths, strict=True):
                    assert self.region[int(offset) : int(offset) + int(length)] == payload_of(key, int(length))
                manager.complete_load(plan.job_id)
            manager.finish(name)
        return hit[0], took

    @property
    def read_breaker(self) -> BreakerState:
        """The state of the tier's breaker for reads."""
        state: BreakerState = self.ask(lambda manager: manager._core.tiers[0].reads.state)
        return state

    def check_idle(self) -> None:
        """Nothing is pinned, reserved or held once everything under way has ended."""

        def idle() -> bool:
            primary = self.ask(lambda manager: manager.statistics()).primary
            return not (primary.pinned_bytes or primary.reserved_bytes or primary.quarantined_bytes)

        wait_until(idle, "an idle core", LONG_S)
        self.ask(lambda manager: manager.check())


SERVERS: dict[str, type[Server]] = {"redis": RedisServer, "object": S3Server}
