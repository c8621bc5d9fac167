"""What the scheduler side and the worker side tell each other in one engine step. Plain values that can be sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class GroupCopy:
    """Blocks of one group, in parallel lists: engine block, where its chunk begins in primary, its place in a part.

    A chunk in primary is the parts of all ranks; in each part block number `inside[i]` is `blocks[i]`.
    """

    group: int
    blocks: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    inside: list[int] = field(default_factory=list)


@dataclass(slots=True)
class CopyJob:
    """One load or store for every rank. A load that is not `valid` copies nothing and is reported as failed."""

    job_id: int
    request_id: str
    groups: Sequence[GroupCopy] = ()
    valid: bool = True


@dataclass(slots=True)
class StepWork:
    """What the workers are to do in one step.

    `early` are stores from blocks that were given back: they are copied before anything of this step writes.
    """

    early: list[CopyJob] = field(default_factory=list)
    loads: list[CopyJob] = field(default_factory=list)
    stores: list[CopyJob] = field(default_factory=list)
    fences: list[int] = field(default_factory=list)
    """Stores under way whose blocks have a new owner from this step on."""


@dataclass(slots=True)
class JobReport:
    """One rank's word on one job."""

    job_id: int
    ok: bool


@dataclass(slots=True)
class StepReport:
    """What ranks report of one step."""

    loads: list[JobReport] = field(default_factory=list)
    stores: list[JobReport] = field(default_factory=list)
    load_bytes: int = 0
    load_seconds: float = 0.0
    store_bytes: int = 0
    store_seconds: float = 0.0
    faults: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to say."""
        return not (self.loads or self.stores or self.faults)

    def aggregate(self, other: StepReport) -> StepReport:
        """Both ranks' reports together."""
        return StepReport(
            self.loads + other.loads,
            self.stores + other.stores,
            self.load_bytes + other.load_bytes,
            max(self.load_seconds, other.load_seconds),
            self.store_bytes + other.store_bytes,
            max(self.store_seconds, other.store_seconds),
            self.faults + other.faults,
        )


@dataclass(slots=True)
class RankGreeting:
    """What a rank tells before serving: whether it can copy, and how it sees the cache."""

    rank: int
    trouble: str = ""
    """Empty if the rank mapped primary and its canary lives, else why not."""
    rank_bytes: tuple[int, ...] = ()
    """Bytes of its part of a chunk, per group."""
