"""What all rules of the world of random tests have: the world, its checks, the source of decisions, and picking."""

from __future__ import annotations

from kvstrata.core.messages import ALL_TIERS, TierFilter
from kvstrata.core.requests import RequestState
from kvstrata.testing.choices import Choices
from kvstrata.testing.scripted import ScriptedTier
from kvstrata.testing.world import EngineRequest, World
from kvstrata.testing.world_checks import Checks
from kvstrata.types import Locality, Medium, ResetReason


class RuleBase:
    """The rules over one world, and what they have in common."""

    def __init__(self, world: World, checks: Checks, choices: Choices) -> None:
        self.world = world
        self.checks = checks
        self.choices = choices

    # -- picking

    def _one(self, *states: RequestState) -> EngineRequest | None:
        """A request of the two-phase door, in one of these states if any are named."""
        world = self.world
        fitting = []
        for request in world.requests.values():
            record = world.record(request)
            if record is not None and not request.per_key and (not states or record.state in states):
                fitting.append(request)
        return self.choices.pick(fitting) if fitting else None

    def _any(self) -> EngineRequest | None:
        every = list(self.world.requests.values())
        return self.choices.pick(every) if every else None

    def _tier(self) -> ScriptedTier | None:
        return self.choices.pick(self.world.scripted) if self.world.scripted else None

    def _filter(self) -> TierFilter:
        choices = self.choices
        match choices.below(8):
            case 5:
                return TierFilter(names=frozenset(choices.some(t.name for t in self.world.tiers)))
            case 6:
                return TierFilter(media=frozenset({choices.pick((Medium.CPU, Medium.NVME))}))
            case 7:
                return TierFilter(localities=frozenset({choices.pick((Locality.LOCAL, Locality.SHARED))}))
        return ALL_TIERS

    # -- what strikes everybody

    def _reset(self, reason: ResetReason) -> None:
        self.world.strike_all(f"reset {reason.value}")
        self.world.reset(reason)

    def _advance(self, event: str, seconds: float) -> None:
        self.world.strike_all(event)
        self.world.advance(seconds)
        self.checks.after_advance()
