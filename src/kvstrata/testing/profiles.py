"""Kinds of random runs, and the scripted tiers that they run over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstrata.layout.groups import Layout
from kvstrata.testing.choices import Choices
from kvstrata.testing.scripted import ScriptedTier
from kvstrata.tiers.base import Tier
from kvstrata.types import Capabilities, Flushed, Locality, Medium

MakeTiers = Callable[[Choices, Layout], Sequence[Tier]]


@dataclass(frozen=True, slots=True)
class Profile:
    """What may happen in a run."""

    name: str
    faults: bool = True
    """Tiers fail, hang, answer late, lose keys; ranks fail; time jumps."""
    churn: bool = True
    """C and n change, hits are taken in part, requests are preempted and aborted, the cache is reset."""
    asynchronous: bool = True
    """Tiers may answer probes later."""
    at_once: bool = False
    """Tiers do everything at once, and events are carried after every call."""
    roomy: bool = False
    """Primary takes everything, and waiting requests may hold all of it."""
    per_key: bool = True
    """Some requests use the per-key door."""
    focus: bool = False
    """Mostly follow one request that has something under way, until that comes."""
    scenes: bool = False
    """Mostly set up, on purpose, what random steps seldom meet."""


WILD = Profile("wild")
FOCUS = Profile("focus", focus=True)
SCENES = Profile("scenes", scenes=True)
STEADY = Profile("steady", faults=False, churn=False, per_key=False)
OWN_TIERS = Profile("own tiers", faults=False)
MIRROR = Profile("mirror", faults=False, asynchronous=False, at_once=True, roomy=True, per_key=False)


class ModelTier(ScriptedTier):
    """A scripted tier that tells the world what it stores, and whose purges become durable when the world says so."""

    purging: list[int]
    durable_at_once = True

    def purge(self, namespace: bytes) -> int:
        """Drop everything; durable at once or later."""
        self._note("purge")
        self.held.clear()
        self._tickets += 1
        if self.durable_at_once:
            self.emit(Flushed(self._tickets))
        else:
            self.purging.append(self._tickets)
        return self._tickets


def model_tiers(choices: Choices, profile: Profile) -> list[Tier]:
    """None to three scripted tiers, some of which answer probes later."""
    tiers: list[Tier] = []
    for i in range(choices.pick((1, 2, 3, 0) if profile.faults else (1, 2, 3))):
        sync = not profile.asynchronous or choices.below(2) == 0
        tier = ModelTier(
            name=f"tier{i}",
            medium=choices.pick((Medium.CPU, Medium.NVME)),
            locality=choices.pick((Locality.LOCAL, Locality.SHARED)),
            capabilities=Capabilities(
                sync,
                probe_cost_s=0.0 if sync else choices.pick((0.0, 0.02)),
                max_batch=choices.pick((1024, 3, 1)),
                shared=choices.below(2) == 1,
            ),
        )  # fmt: skip
        tier.purging = []
        tier.obeys_cancel = profile.faults and choices.below(2) == 1
        tier.durable_at_once = not profile.faults or choices.below(2) == 0
        tiers.append(tier.auto() if profile.at_once else tier)
    return tiers
