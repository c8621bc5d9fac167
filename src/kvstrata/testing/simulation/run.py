"""One run: a seed decides everything, time is virtual, nothing outside is touched.

    outcome = simulate(7)              # raises SimulationError, with the shortest trace found, if anything fails
    outcome.steps, outcome.requests    # what it amounted to

A run is a row of turns; all decisions of a turn are recorded, so that a failing run is replayed, and shortened by
leaving turns out.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from kvstrata.config import config_from_dict
from kvstrata.integrations.vllm.scheduler import SchedulerSide
from kvstrata.integrations.vllm.settings import VllmSettings
from kvstrata.integrations.vllm.shield import Shield
from kvstrata.integrations.vllm.stack import Stack
from kvstrata.integrations.vllm.worker import WorkerSide
from kvstrata.runtime.driver import Driver
from kvstrata.runtime.guard import GuardedTier
from kvstrata.testing.choices import Choices, RandomChoices, ReplayedChoices
from kvstrata.testing.clock import ManualClock
from kvstrata.testing.coverage import Coverage
from kvstrata.testing.executor import InlineExecutor
from kvstrata.testing.shorten import Recording, shortened
from kvstrata.testing.simulation.content import Content
from kvstrata.testing.simulation.copies import SimCopier
from kvstrata.testing.simulation.disk import SimDiskTier
from kvstrata.testing.simulation.draw import Setup, draw_setup
from kvstrata.testing.simulation.engine import SimEngine, SimRequest
from kvstrata.testing.simulation.faults import Faults
from kvstrata.testing.simulation.strikes import strike
from kvstrata.testing.simulation.tiers import SimTier
from kvstrata.testing.simulation.watch import WatchedManager
from kvstrata.testing.simulation.watch_checks import clean
from kvstrata.testing.world_checks import demand
from kvstrata.tiers.base import Tier, TierContext
from kvstrata.types import ResetReason

LEAST_STEPS = 300
LEAST_REQUESTS = 20
MOST_TURNS = 3000
FAMILIES = 3
AWAY = (4.0, 16.0, 70.0, 4.0)
"""Seconds that may pass in a turn while the engine does nothing."""
SHORTEN_MOST = 80
"""Most runs that are spent on making a failing one shorter."""


class SimulationError(AssertionError):
    """A run failed; the message holds the shortest trace that was found for it."""


class StrictShield(Shield):
    """Nothing is shielded here: what is caught is a failure of the run."""

    def caught(self, place: str, error: BaseException) -> None:
        """Raise it."""
        raise error


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run amounted to."""

    seed: int
    steps: int
    """Events that were applied: by the core, the device, copiers, computations, faults."""
    core_steps: int
    """Those of the core alone."""
    requests: int
    promoted: int
    consumed: int
    turns: int
    digest: str
    """Of the trace: two runs of a seed have the same."""


class Simulation:
    """The world of one run. `trace` is what happened, line by line."""

    def __init__(self, choices: Choices, seed: int, coverage: Coverage, *, keep_trace: bool) -> None:
        self.choices = choices
        self.seed = seed
        self.coverage = coverage
        self.trace: list[str] = []
        self._keep_trace = keep_trace
        self._hash = hashlib.blake2b(digest_size=16)
        self.faults = Faults.draw(choices, seed)
        self.steady = not self.faults.rate
        self.setup: Setup = draw_setup(choices, steady=self.steady)
        self.content = Content(self.setup.shape)
        self.clock = ManualClock()
        self.layout = self.setup.shape.layout()
        self.disks: dict[int, SimDiskTier] = {}
        self.sim_tiers: list[SimTier] = []
        self.made = 0
        self.names = self.tails = 0
        self.away = 0
        """Turns for which the engine still does nothing."""
        self.history: list[list[int]] = []
        """Tokens of finished requests, for the next turn of a conversation."""
        self.ended: list[str] = []
        """Ids of requests that are over, for clients that use one again."""
        self.namespace_epoch = 0
        self.steps_before = self.world_before = 0
        self.promoted_before = self.consumed_before = self.finished_before = 0
        self._make_tiers()
        self.say(f"{self.setup}, faults {self.faults.rate} % of {sorted(self.faults.allowed)}")
        self._streams = [self._stream(family) for family in range(FAMILIES)]
        self._start_process()
        self._fill()

    def say(self, line: str) -> None:
        """Write down what happens."""
        self._hash.update(line.encode())
        if self._keep_trace:
            self.trace.append(line)

    @property
    def digest(self) -> str:
        """Of all that was written down."""
        return self._hash.hexdigest()

    # -- set-up

    def _make_tiers(self) -> None:
        choices, count = self.choices, self.choices.pick((1, 2, 3))
        disk_at = choices.below(3)
        self.tiers: list[SimTier | SimDiskTier] = []
        for i in range(count):
            name = f"tier{i}"
            if i == disk_at % (count + 1):
                disk = self.disks[i] = SimDiskTier(name, choices, self.faults, max(self.layout.chunk_bytes))
                self.tiers.append(disk)
            else:
                tier = SimTier(name, choices, self.faults, self.content, self.clock, steady=self.steady)
                self.sim_tiers.append(tier)
                self.tiers.append(tier)

    def _stream(self, family: int) -> list[int]:
        """The tokens that prompts of a family begin with, and what an engine hashes of them."""
        tokens = [family * 100_000 + at for at in range(self.setup.longest)]
        per, hashes = self.setup.shape.tokens_per_hash, list[bytes]()
        for at in range(0, len(tokens) - per + 1, per):
            hashes.append(self.content.next_hash(hashes[-1] if hashes else b"", tokens[at : at + per]))
        self.family_keys = [*getattr(self, "family_keys", []), self.content.keys_of(hashes)]
        return tokens

    def _fill(self) -> None:
        """Tiers hold something from the start."""
        for tier in self.sim_tiers:
            for keys in self.family_keys:
                if self.choices.below(4):
                    self.put_some(tier, keys)
        for disk in self.disks.values():
            for keys in self.family_keys:
                if self.choices.below(4):
                    disk.put([key for group in keys for key in group], self.content, self.region)

    def put_some(self, tier: SimTier, keys: list[list[bytes]]) -> None:
        """Another engine has stored these chunks, or some of them."""
        whole = self.choices.below(3) < 2
        for group in keys:
            for key in group if whole else self.choices.some(group):
                tier.put_chunk(key)

    def _start_process(self) -> None:
        """A process begins: primary, tiers, core, both sides of the connector, the engine."""
        setup, shape = self.setup, self.setup.shape
        namespace = b"simulation" + self.namespace_epoch.to_bytes(6, "big")
        whole = np.zeros(setup.config.capacity_bytes + 4096, np.uint8)
        start = (16 - whole.ctypes.data) % 4096
        self.region = whole.data[start : start + setup.config.capacity_bytes]
        guarded: list[GuardedTier] = []
        for i, tier in enumerate(self.tiers):
            real: Tier = tier.begin() if isinstance(tier, SimDiskTier) else cast(Tier, tier)
            executor = self.disks[i].executor if i in self.disks else InlineExecutor()
            guard = GuardedTier(real)
            guard.open(TierContext(self.region, namespace, 1, self.clock, executor))
            demand(guard.open_error is None, f"{tier.name} does not open: {guard.open_error}")
            guarded.append(guard)
        self.guarded = guarded
        for disk in self.disks.values():
            disk.executor.run_all()
            disk.check_recovered()
        self.manager = WatchedManager(
            self.layout, setup.config, guarded, ranks=shape.ranks, content=self.content, region=self.region,
            coverage=self.coverage, say=self.say, steady=self.steady,
        )  # fmt: skip
        for i, disk in self.disks.items():
            self.manager.listeners[i] = disk.heard
        for tier in self.sim_tiers:
            tier.epoch_of = lambda job_id: self.manager.jobs[job_id].epoch
        self.driver = Driver(cast(Any, self.manager), guarded, self.clock, strict=True)
        self.engine = SimEngine(
            shape, self.content, self.faults, self.choices, blocks=setup.blocks, budget=setup.budget, lag=setup.lag,
            most=setup.most_running, caches=setup.caches, say=self.say,
        )  # fmt: skip
        self.engine.on_finish = self._over
        self._connect()

    def _connect(self) -> None:
        setup, shape = self.setup, self.setup.shape
        settings = VllmSettings(
            config_from_dict(
                {
                    "primary": {"size": setup.config.capacity_bytes},
                    "tiers": [{"type": "memory", "name": tier.name} for tier in self.tiers],
                }
            ),
            blocks_per_chunk=shape.blocks_per_chunk, store=setup.store,
            keep_interval=setup.keep_interval, canary=False, records=4,
        )  # fmt: skip
        stack = SimpleNamespace(
            layout=self.layout,
            core_config=setup.config,
            driver=self.driver,
            clock=self.clock,
            tiers=self.guarded,
            close=lambda: None,
        )
        shield = StrictShield("simulation")
        self.engine.scheduler = SchedulerSide(shape, settings, cast(Stack, stack), lambda request: b"", shield)
        self.copiers = [SimCopier(self.engine.memory, rank, self.region) for rank in range(shape.ranks)]
        workers = []
        for rank, copier in enumerate(self.copiers):
            copier.choices = self.choices
            copier.on_failure = lambda: self.faults.strike("copy failed")
            copier.fail_percent = self.faults.rate // 3 if "copy failed" in self.faults.allowed else 0
            worker = WorkerSide(shape, rank, "simulation", canary=False, faults=shield)
            worker._copier, worker._trouble = copier, ""
            workers.append(worker)
        self.engine.workers = workers

    # -- counts

    @property
    def steps(self) -> int:
        """Events that the core applied so far."""
        return self.steps_before + self.manager.steps

    @property
    def world_steps(self) -> int:
        """Events beside the core so far: device I/O, moved blocks, forward passes, faults of the whole."""
        parts = [self.engine.events, *(copier.events for copier in self.copiers)]
        return self.world_before + sum(parts) + sum(disk.events for disk in self.disks.values())

    @property
    def finished(self) -> int:
        """Requests that were served so far."""
        return self.finished_before + self.engine.finished

    def outcome(self, turns: int) -> Outcome:
        """What it amounted to."""
        counters = self.manager._core.counters
        return Outcome(
            self.seed, self.steps + self.world_steps, self.steps, self.finished,
            self.promoted_before + counters.promoted, self.consumed_before + counters.consumed, turns, self.digest,
        )  # fmt: skip

    # -- turns

    def turn(self) -> None:
        """A little time passes, and everybody does something."""
        choices = self.choices
        self.clock.advance(choices.pick(AWAY if self.away else self.setup.pace))
        if self.away:
            self.away -= 1
            self._tiers_work()
            if not self.away:
                self.engine.receive()  # what the ranks had to say about the last step before
            return
        if len(self.engine.requests) < 6 and self.made - self.finished < 9 and choices.below(2) == 0:
            self.new_request()
        if not self.steady:
            strike(self)
            if self.sim_tiers and choices.below(24) == 23:  # another engine has stored something
                self.put_some(choices.pick(self.sim_tiers), choices.pick(self.family_keys))
        self._tiers_work()
        if not self.steady and choices.below(8) == 7:
            return  # an engine that is busy elsewhere
        if self.engine.requests or self.engine.leaving or self.engine.scheduler.pending:
            self.engine.step()
        for copier in self.copiers:
            copier.progress(self.setup.copying)
        self.driver.pump()

    def _tiers_work(self) -> None:
        for tier in self.tiers:
            tier.work(75) if isinstance(tier, SimDiskTier) else tier.work()
        self.driver.pump()
        for disk in self.disks.values():
            disk.check_presence()
        for i, disk in self.disks.items():
            if self.choices.below(16) == 15:
                disk.flush(self.guarded[i])
        for tier in self.sim_tiers:
            if self.choices.below(16) == 15:
                tier.flush()

    def new_request(self, like: SimRequest | None = None, name: str = "") -> None:
        """A prompt, that of `like` or a new one, under a new id or this."""
        choices = self.choices
        self.made += 1
        name = name or self._name()
        tokens = self._prompt() if like is None else like.tokens[: like.num_prompt_tokens]
        request = SimRequest(name, list(tokens), len(tokens), choices.between(1, 6))
        if choices.below(6) == 5:
            request.kv_transfer_params = {"kvstrata": self._wish()}
        request.skip_reading_prefix_cache = choices.below(20) == 19
        self.engine.add(request)

    def _prompt(self) -> list[int]:
        """It begins like others: like its family, or like a conversation that was held before."""
        choices, longest = self.choices, self.setup.longest
        if self.history and choices.below(3) == 2:
            tokens = choices.pick(self.history[-8:])[: longest - 1]
        else:
            length = max(choices.between(1, longest), choices.between(1, longest))
            tokens = self._streams[choices.below(FAMILIES)][:length]
        if choices.below(3) == 2:
            self.tails += 1
            tail = choices.below(longest - len(tokens) + 1)
            tokens = [*tokens, *(1_000_000 + 1000 * self.tails + i for i in range(tail))]
        return tokens

    def _name(self) -> str:
        """A new id, or that of a request which is over: jobs that were begun for it may still be under way."""
        known = {**self.engine.requests, **self.engine.leaving}
        again = [name for name in self.ended[-3:] if name not in known]
        if again and self.choices.below(4) == 3:
            return again[-1]
        self.names += 1
        return f"r{self.names}"

    def _over(self, request: SimRequest) -> None:
        self.history.append(list(request.tokens))
        self.ended.append(request.request_id)

    def _wish(self) -> Any:
        choices = self.choices
        wishes: list[Any] = [
            {"store": "none"}, {"store": "prompt"}, {"load_tiers": []}, {"load_tiers": ["tier0"]}, "off",
            {"max_load_tokens": choices.below(20)},
        ]  # fmt: skip
        if not self.steady:
            wishes.append({"wait_s": choices.pick((0.3, 1.0))})
        return choices.pick(wishes)

    # -- the whole

    def reset(self, reason: ResetReason) -> bool:
        """The engine resets its cache; with invalid content it flushes its own first."""
        self.say(f"reset {reason.value}")
        if reason is ResetReason.CONTENT_INVALID:
            self.engine.flush()
            self.content.epoch += 1
        if not self.steady and self.choices.below(2):
            # What tiers are doing is late: what they write must not come back behind the purge.
            for tier in self.sim_tiers:
                tier.stalled_until = self.clock.monotonic() + self.choices.pick((0.2, 1.0, 12.0))
        if reason is ResetReason.CONTENT_INVALID:
            for disk in self.disks.values():
                disk.safe.clear()
                disk.told.clear()
        for copier in self.copiers:
            copier.epoch_changed()
        self.engine.scheduler.reset(reason)
        return True

    def restart(self, *, power: bool) -> None:
        """The process dies; another one opens what its tiers have kept, and clients ask again."""
        self.say("power cut" if power else "restart")
        counters = self.manager._core.counters
        self.steps_before += self.manager.steps
        self.world_before += self.engine.events + sum(copier.events for copier in self.copiers)
        self.promoted_before += counters.promoted
        self.consumed_before += counters.consumed
        self.finished_before += self.engine.finished
        again = [(r.tokens[: r.num_prompt_tokens], r.output) for r in self.engine.requests.values()]
        renamed, self.namespace_epoch = self.namespace_epoch != self.content.epoch, self.content.epoch
        for disk in self.disks.values():
            disk.die(power=power, renamed=renamed)
        for tier in self.sim_tiers:
            if power:
                tier.crash(silent=True)
            tier.forget_process()
            if renamed:  # of another namespace: foreign to the new process
                tier.held.clear()
                tier.durable.clear()
        self._start_process()
        for tokens, output in again:
            self.names += 1
            self.engine.add(SimRequest(f"r{self.names}", tokens, len(tokens), output))

    # -- the end

    def end(self) -> None:
        """Everything becomes well and comes to its end; nothing may be left."""
        self.say("the end: everything is well from now on")
        self.faults.rate = 0
        for tier in self.tiers:
            tier.heal()
        for copier in self.copiers:
            copier.fail_percent = 0
        self._wind_up()
        for seconds in (0.0, 130.0, 130.0, 130.0, 130.0):
            self.clock.advance(seconds)
            self._settle()
        self._wind_up()
        self.engine.scheduler.build_work(SimpleNamespace(num_scheduled_tokens={}))
        self._settle()
        clean(self.manager)
        demand(len(self.engine.pool.free) == self.setup.blocks - 1, "blocks of the accelerator were not given back")
        self._check_cascaded()

    def _wind_up(self) -> None:
        for turn in range(800):
            fenced = any(tier.fenced for tier in self.manager._core.tiers)
            if self.engine.idle and self.manager.idle and not fenced:
                return
            self.clock.advance(0.002 if self.steady else 0.02 if turn < 200 else 0.5)
            self._settle()
            if not self.engine.idle:
                self.engine.step()
            for copier in self.copiers:
                copier.progress(100)
        raise AssertionError("requests or jobs are still there although everything is well")

    def _settle(self) -> None:
        for _ in range(2000):  # jobs that are left when time jumps would be overdue
            done = 0
            for tier in self.tiers:
                done += tier.work(100) if isinstance(tier, SimDiskTier) else tier.work()
            if not self.driver.pump() and not done:
                return

    def _check_cascaded(self) -> None:
        """Tiers hold right bytes; where nothing failed, what is in primary is on every tier that it was stored for."""
        for tier in self.sim_tiers:
            for key, payload in tier.held.items():
                fault = self.content.chunk_fault(key, payload)
                demand(not fault, f"{tier.name} holds {fault}")
        if not self.steady:
            return
        for each, guard in zip(self.tiers, self.guarded, strict=True):
            owed = list(self.manager.resident & self.manager.offered.get(each.name, set()))
            lacking = [key for key in owed if isinstance(each, SimTier) and key not in each.held]
            if isinstance(each, SimDiskTier) and owed:
                counted = self.manager._core.tiers[self.tiers.index(each)].counters
                demand(counted.cascade_failed == 0, f"{guard.name} refused chunks although nothing failed")
            demand(not lacking, f"{each.name} never got {len(lacking)} chunks that were stored for it")


class _Drawn(RandomChoices):
    """Decisions of the seed; `plain` ones from the orderly end on, so that a replay has the same end."""

    plain = False

    def below(self, bound: int) -> int:
        """The next number, or the plainest."""
        return 0 if self.plain else super().below(bound)


class _Run:
    """One run, step by step, from decisions that are drawn or replayed."""

    def __init__(self, seed: int, coverage: Coverage, *, keep_trace: bool = False) -> None:
        self.seed, self.coverage, self.keep_trace = seed, coverage, keep_trace
        self.simulation: Simulation | None = None

    def play(self, choices: _Drawn, recording: Recording, turns: int | None) -> Outcome:
        """Draw decisions, and write them down. `turns` None: until there were steps and requests enough."""
        recording.append(choices.recorded)
        simulation = self.simulation = Simulation(choices, self.seed, self.coverage, keep_trace=self.keep_trace)
        turn = 0
        while turn < MOST_TURNS if turns is None else turn < turns:
            if turns is None and simulation.steps >= LEAST_STEPS and simulation.finished >= LEAST_REQUESTS:
                break
            choices.recorded = []
            recording.append(choices.recorded)
            simulation.turn()
            turn += 1
        choices.plain = True
        simulation.end()
        return simulation.outcome(turn)

    def replay(self, recording: Recording) -> BaseException | None:
        """Take the decisions of a recording; what the run failed with."""
        choices = ReplayedChoices(recording[0])
        self.keep_trace = True
        try:
            simulation = self.simulation = Simulation(choices, self.seed, self.coverage, keep_trace=True)
            for turn in recording[1:]:
                choices.load(turn)
                simulation.turn()
            choices.load(())
            simulation.end()
        except Exception as error:
            return error
        return None

    @property
    def trace(self) -> list[str]:
        """What happened."""
        return self.simulation.trace if self.simulation is not None else []


def simulate(
    seed: int, coverage: Coverage | None = None, *, turns: int | None = None, shorten: bool = True,
    struck: Counter[str] | None = None,
) -> Outcome:  # fmt: skip
    """One run, all decided by the seed. Raises `SimulationError` if anything that must hold did not.

    `coverage` and `struck` gain what the run reached, and how often each kind of fault struck.
    """
    recording: Recording = []
    run = _Run(seed, Coverage() if coverage is None else coverage)
    try:
        outcome = run.play(_Drawn(np.random.default_rng(seed)), recording, turns)
    except Exception as error:
        if not shorten:
            raise
        best, trace, cause = shortened(recording, lambda tried: _replayed(seed, tried), error, most=SHORTEN_MOST)
        text = "\n".join(trace)
        raise SimulationError(
            f"seed {seed}, {len(best) - 1} turns of {len(recording) - 1}: {cause!r}\n{text}"
        ) from error
    if struck is not None and run.simulation is not None:
        struck.update(run.simulation.faults.struck)
    return outcome


def _replayed(seed: int, recording: Recording) -> tuple[list[str], BaseException | None]:
    run = _Run(seed, Coverage())
    cause = run.replay(recording)
    return run.trace, cause
