"""What the parts of an opened volume share: the index, the space, the workers, and small facts about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from kvstrata.tiers.base import TierContext
from kvstrata.tiers.disk.acquire import Acquired
from kvstrata.tiers.disk.format import Realm, Words
from kvstrata.tiers.disk.index import U64, Index, keys_of, words_of
from kvstrata.tiers.disk.io import Files, address_of
from kvstrata.tiers.disk.jobs import Jobs, Operation
from kvstrata.tiers.disk.planning import BatchPlan, places_of
from kvstrata.tiers.disk.segment import padded_sum
from kvstrata.tiers.disk.tasks import Done, Task
from kvstrata.types import I32, I64, KEY_BYTES, FailCause, KeysRemoved, OffloadKey, TierEvent

_WRITTEN_MOST = 4096
"""Most records whose rows wait to be filled."""


class Workers(Protocol):
    """Who runs tasks: threads of this process (`lanes.LocalWorkers`) or another process (`process.ProcessWorkers`)."""

    load_bytes: int
    """Most bytes of one load."""

    def push(self, task: Task) -> None:
        """Queue one task; `start` hands the queued ones over."""
        ...

    def start(self) -> None:
        """Hand over what was pushed. Never blocks."""
        ...

    def forget(self, task_ids: list[int]) -> None:
        """Do not start these any more; each is still answered."""
        ...

    def take(self) -> list[Done]:
        """Answers since the last call. Never blocks."""
        ...

    def wait(self, timeout: float) -> bool:
        """Give the workers up to `timeout` seconds; whether there may be an answer."""
        ...

    def close(self, timeout: float) -> bool:
        """Take back what has not begun and wait for the rest; False if something still runs."""
        ...

    def advance(self, now: float) -> None:
        """Do what is due by time."""
        ...


@dataclass(frozen=True, slots=True)
class VolumeSettings:
    """The settings of a tier that its volume needs."""

    verify: bool
    min_free: int
    queue_bytes: int
    hot_share: float
    checkpoint_segments: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a payload lies."""

    segment: int
    offset: int
    length: int


class Written(msgspec.Struct, frozen=True, gc=False):
    """Records of one batch that was written: their rows, digests (concatenated) and plan, and where it begins."""

    rows: I64
    digests: bytes
    segment: int
    start: int
    plan: BatchPlan


class Desk:
    """Shared state of one opened directory. Lives on the caller's thread."""

    def __init__(
        self,
        files: Files,
        acquired: Acquired,
        workers: Workers,
        context: TierContext,
        settings: VolumeSettings,
        events: list[TierEvent],
        jobs: Jobs,
    ) -> None:
        self.files = files
        self.acquired = acquired
        self.workers = workers
        self.context = context
        self.settings = settings
        self.events = events
        self.jobs = jobs
        self.space = acquired.space
        self.indexes = acquired.indexes
        self.realm = Realm(context.namespace, context.layout_tag)
        self._index = self.indexes.setdefault(self.realm, Index())
        self.address = address_of(context.region)
        self.failures: Counter[FailCause] = Counter()
        self.evicted = self.moved = self.stored = self.loaded = 0
        self.peak = self.space.allocated
        self.detail = ""
        """What the last failed task said."""
        self.look_needed = False
        """Something failed so that the directory itself should be looked at."""
        self.leaving = False
        """The directory is being left: nothing new is begun."""
        self.ops: dict[int, Operation] = {}
        self.tasks_made = 0
        self.loads_answered = 0
        self._tick = acquired.stamp + 1
        self._written: list[Written] = []
        self._written_count = 0

    def new_task(self, op: Operation) -> int:
        """The id of a task whose answer goes to `op`."""
        self.tasks_made += 1
        self.ops[self.tasks_made] = op
        return self.tasks_made

    def next_tick(self) -> int:
        """The stamp of a use that happens now."""
        self._tick = min(self._tick + 1, 0xFFFFFFFF)
        return self._tick

    def wall_us(self) -> int:
        """Wall time, microseconds."""
        return max(int(self.context.clock.wall() * 1e6), 0)

    def now(self) -> float:
        """Monotonic seconds."""
        return self.context.clock.monotonic()

    # the index of this realm

    @property
    def index(self) -> Index:
        """With everything in it that was written and answered."""
        if self._written:
            self.fill_written()
        return self._index

    def new_index(self) -> None:
        """Begin anew with an empty index."""
        self.fill_written()
        self._index = self.indexes[self.realm] = Index()

    @property
    def count(self) -> int:
        """Records of this realm."""
        return self._index.count + self._written_count

    def reserve_absent(self, words: Words, lengths: int | list[int], hashes: U64) -> I64 | None:
        """Of the index: what was written needs not be in it for this, since its keys are."""
        return self._index.reserve_absent(words, lengths, hashes)

    def find(self, keys: Sequence[OffloadKey]) -> I64:
        """Rows of the keys that have the right length and are held; -1 where there is none."""
        return self.index.find_held(words_of([key for key in keys if len(key) == KEY_BYTES]))

    def add(self, written: Written, payload: int) -> None:
        """Records that were written; `payload`: their bytes, padding included.

        Their rows are filled when somebody asks the index, or when there are many: it is cheaper per key together.
        """
        self._written.append(written)
        count = len(written.rows)
        self._written_count += count
        self.stored += count
        self.space.held(written.segment, count, payload)
        if self._written_count >= _WRITTEN_MOST:
            self.fill_written()

    def fill_written(self, segment: int | None = None) -> None:
        """Fill the rows of what was added, unless nothing of it lies in `segment`, if one is named."""
        if not self._written or (segment is not None and all(each.segment != segment for each in self._written)):
            return
        written, self._written, self._written_count = self._written, [], 0
        rows = np.concatenate([each.rows for each in written])
        segments: I32 | int = written[0].segment
        if any(each.segment != segments for each in written):
            numbers = np.array([each.segment for each in written], np.int32)
            segments = np.repeat(numbers, [len(each.rows) for each in written])
        digests = np.frombuffer(b"".join([each.digests for each in written]), "<u8").reshape(-1, 2)
        places = places_of([each.plan for each in written], [each.start for each in written])
        self._index.fill(rows, segments, places, digests)

    def forget_rows(self, index: Index, rows: I64) -> None:
        """Drop rows, each named once, and what they count for."""
        if len(rows):
            self.uncount(index, rows)
            index.delete(rows)

    def uncount(self, index: Index, rows: I64) -> None:
        """Take rows out of the account of their segments."""
        numbers = index.segment[rows]
        for number in np.unique(numbers).tolist():
            mine = rows[numbers == number]
            self.space.held(number, -len(mine), -padded_sum(index.length[mine]))

    def tell_removed(self, rows: I64) -> list[OffloadKey]:
        """Report the keys of rows of this realm as removed; returns them."""
        keys = keys_of(self.index.key[rows]) if len(rows) else []
        if keys:
            self.events.append(KeysRemoved(keys))
        return keys
