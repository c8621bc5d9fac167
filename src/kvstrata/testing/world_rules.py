"""What can happen in the world of random tests. Each rule does one thing, or nothing where it does not apply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.testing.choices import Choices
from kvstrata.testing.profiles import Profile
from kvstrata.testing.rules_scenes import SceneRules


class Rules(SceneRules):
    """All rules over one world."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule by name, how often it is chosen, and in which runs it belongs."""

    name: str
    weight: int
    needs: Callable[[Profile], bool] = lambda profile: True
    optional: bool = False
    """Left out of every second run, so that what it disturbs is seen undisturbed too."""

    def apply(self, rules: Rules) -> None:
        """Let it happen."""
        getattr(rules, self.name)()


def _faulty(profile: Profile) -> bool:
    return profile.faults


def _per_key(profile: Profile) -> bool:
    return profile.per_key


def _changing(profile: Profile) -> bool:
    return profile.churn


def _staged(profile: Profile) -> bool:
    return profile.scenes


RULES = (
    Rule("new_request", 14),
    Rule("poll", 10),
    Rule("engine_step", 8),
    Rule("take", 8),
    Rule("report_load", 8),
    Rule("store", 8),
    Rule("report_store", 10),
    Rule("finish", 5),
    Rule("time_small", 6),
    Rule("hand_over", 8),
    Rule("deliver", 8),
    Rule("settle", 3),
    Rule("tier_works", 2, optional=True),
    Rule("tier_probe", 10),
    Rule("tier_load", 12),
    Rule("tier_store", 8),
    Rule("tier_put", 7),
    Rule("poll_grown_computed", 3, _changing, True),
    Rule("poll_shrunk_computed", 2, _changing, True),
    Rule("poll_grown_total", 3, _changing, True),
    Rule("extend", 2, _changing, True),
    Rule("preempt", 3, _changing, True),
    Rule("abort", 2, _changing, True),
    Rule("take_after_reset", 1, _changing, True),
    Rule("reset", 1, _changing, True),
    Rule("scan", 4, _per_key, True),
    Rule("end_step", 3, _per_key, True),
    Rule("time_large", 2, _faulty, True),
    Rule("silence", 1, _faulty, True),
    Rule("overtake", 6, _faulty, True),
    Rule("late_job", 3, _faulty, True),
    Rule("scribble", 2, _faulty, True),
    Rule("twice", 2, _faulty, True),
    Rule("tier_loses", 2, _faulty, True),
    Rule("tier_writing", 1, _faulty, True),
    Rule("purge_durable", 2, _faulty, True),
    Rule("scene", 500, _staged),
)
"""All rules; their order and weights are part of what a seed means."""


def rules_of(profile: Profile, choices: Choices) -> list[Rule]:
    """The rules of one run, each as often as it weighs; every run leaves out some of the optional ones."""
    table: list[Rule] = []
    for rule in RULES:
        chosen = profile.focus and rule.name == "overtake"
        if chosen or (rule.needs(profile) and not (rule.optional and choices.below(2))):
            table.extend([rule] * (rule.weight * 8 if chosen else rule.weight))
    return table
