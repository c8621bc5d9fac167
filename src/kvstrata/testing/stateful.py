"""Random tests of the whole stack against a plain dict: thousands of steps per second, or shrunk by Hypothesis.

    walk(seed, steps)                    one seeded run; a failure is shortened and shown as a program
    coverage = soak(range(1000), 200)    many of them; `coverage.table(LEGAL)` says where they went

    TestStack = StackMachine.TestCase    # the same rules under Hypothesis, which shrinks what it finds

Outside authors pass `make_tiers`, or override `StackMachine.make_tiers`, to run the same world over their own tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvstrata.layout.groups import Layout
from kvstrata.testing.choices import Choices, RandomChoices, ReplayedChoices
from kvstrata.testing.coverage import Coverage
from kvstrata.testing.profiles import FOCUS, MIRROR, OWN_TIERS, SCENES, STEADY, WILD, MakeTiers, Profile, model_tiers
from kvstrata.testing.shorten import Recording, shortened
from kvstrata.testing.world import World
from kvstrata.testing.world_checks import Checks
from kvstrata.testing.world_end import end_run
from kvstrata.testing.world_legal import LEGAL
from kvstrata.testing.world_rules import RULES, Rule, Rules, rules_of
from kvstrata.tiers.base import Tier

__all__ = [
    "FOCUS", "LEGAL", "MIRROR", "OWN_TIERS", "RULES", "SCENES", "STEADY", "WILD",
    "StackMachine", "WalkError", "replay", "soak", "walk",
]  # fmt: skip


class WalkError(AssertionError):
    """A run failed; the message holds the shortest program that was found for it."""


def walk(
    seed: int, steps: int, profile: Profile = WILD, coverage: Coverage | None = None, *,
    make_tiers: MakeTiers | None = None, shorten: bool = True,
) -> None:  # fmt: skip
    """One run of `steps` rules and an orderly end, all decided by the seed."""
    choices = RandomChoices(np.random.default_rng(seed))
    recording: Recording = []
    try:
        _run(choices, recording, steps, profile, coverage, make_tiers)
    except Exception as error:
        if not shorten:
            raise
        short, program, cause = shortened(recording, lambda tried: replay(tried, profile, make_tiers), error)
        text = "\n".join(program)
        raise WalkError(f"seed {seed}, {profile.name}, {len(short) - 1} steps: {cause!r}\n{text}") from error


class _Run:
    """One world with its checks and rules."""

    def __init__(
        self, choices: Choices, profile: Profile, coverage: Coverage | None, make_tiers: MakeTiers | None
    ) -> None:
        self.world = World(choices, profile, coverage, make_tiers)
        self.checks = Checks(self.world)
        self.rules = Rules(self.world, self.checks, choices)
        self.rules.fill()
        self.table = rules_of(profile, choices)

    def step(self, chosen: Rule | None = None) -> None:
        """One rule, then every check."""
        chosen = self.rules.choices.pick(self.table) if chosen is None else chosen
        chosen.apply(self.rules)
        if self.world.profile.at_once:
            self.world.settle()
        self.world.strike_breakers()
        self.checks.after()

    def end(self) -> None:
        """The orderly end."""
        end_run(self.world, self.checks)


def _run(
    choices: RandomChoices, recording: Recording, steps: int, profile: Profile, coverage: Coverage | None,
    make_tiers: MakeTiers | None,
) -> None:  # fmt: skip
    recording.append(choices.recorded)
    run = _Run(choices, profile, coverage, make_tiers)
    for _ in range(steps):
        choices.recorded = []
        recording.append(choices.recorded)
        run.step()
    choices.recorded = []
    run.end()


def replay(
    recording: Recording, profile: Profile = WILD, make_tiers: MakeTiers | None = None
) -> tuple[list[str], BaseException | None]:
    """Run a recording; the program that it was, and what it failed with."""
    choices = ReplayedChoices(recording[0])
    run = None
    try:
        run = _Run(choices, profile, None, make_tiers)
        for step in recording[1:]:
            choices.load(step)
            run.step()
        choices.load(())
        run.end()
    except Exception as error:
        return run.world.program if run is not None else [], error
    return run.world.program, None


def soak(
    seeds: Iterable[int], steps: int, profiles: Sequence[Profile] = (WILD,), make_tiers: MakeTiers | None = None
) -> Coverage:
    """Runs over many seeds, taking profiles in turn; returns what they covered."""
    coverage = Coverage()
    for seed in seeds:
        walk(seed, steps, profiles[seed % len(profiles)], coverage, make_tiers=make_tiers)
    return coverage


class HypothesisChoices(Choices):
    """Decisions of Hypothesis, which shrinks them."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def below(self, bound: int) -> int:
        """One drawn number."""
        return self.data.draw(st.integers(0, bound - 1)) if bound > 1 else 0


class StackMachine(RuleBasedStateMachine):
    """The rules as a Hypothesis machine. Subclasses may name another profile, or make their own tiers.

    Tiers that are not scripted work by themselves: what they report is carried into the core by the rules that
    deliver events. A failing example prints the program that it was.
    """

    profile: Profile = WILD
    _run: _Run | None = None

    def make_tiers(self, choices: Choices, layout: Layout) -> Sequence[Tier]:
        """The tiers of one run; the default are scripted ones."""
        return model_tiers(choices, self.profile)

    @initialize(data=st.data())
    def set_up(self, data: st.DataObject) -> None:
        """Layout, settings, tiers."""
        self._run = _Run(HypothesisChoices(data), self.profile, None, self.make_tiers)

    def step(self, chosen: Rule, data: st.DataObject) -> None:
        """One rule, with its decisions from `data`."""
        assert self._run is not None
        self._run.rules.choices = HypothesisChoices(data)
        try:
            self._run.step(chosen)
        except Exception:
            self._tell()
            raise

    def teardown(self) -> None:
        """The orderly end; its decisions are the plain ones."""
        if self._run is None:
            return
        self._run.rules.choices = ReplayedChoices()
        try:
            self._run.end()
        except Exception:
            self._tell()
            raise

    def _tell(self) -> None:
        for line in self._run.world.program if self._run is not None else ():
            note(line)


def _as_rule(chosen: Rule) -> Any:
    def apply(self: StackMachine, data: st.DataObject) -> None:
        self.step(chosen, data)

    apply.__name__ = chosen.name
    apply.__doc__ = getattr(Rules, chosen.name).__doc__
    return precondition(lambda self: chosen.needs(self.profile))(rule(data=st.data())(apply))


for _chosen in RULES:
    setattr(StackMachine, _chosen.name, _as_rule(_chosen))
