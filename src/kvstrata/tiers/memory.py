"""The memory tier: chunks as bytes in a dictionary of this process. For tests, the oracle's twin and large replays.

Work is done inside the call (it is one copy), events are there at the next poll. Nothing outlives `close`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import xxhash

from kvstrata.errors import ConfigError
from kvstrata.tiers.base import TierContext
from kvstrata.types import (
    I8,
    Capabilities,
    FailCause,
    Flushed,
    JobEnded,
    KeysDone,
    KeysRemoved,
    Locality,
    Medium,
    OffloadKey,
    TierEvent,
    TierJob,
    TierUsage,
)

_NOT_CHECKED = b""
"""Digest of an entry that was stored without verification."""


class MemoryTier:
    """A `Tier` (tiers/base.py) over one dictionary, in order of use: the first is the coldest.

    `limit`: bytes of payload, None for no limit. `verify=False` is for tests only: it switches off the check of
    payload digests, to show that damage would be seen without it.
    """

    medium = Medium.CPU
    locality = Locality.LOCAL
    capabilities = Capabilities(sync_probe=True)

    def __init__(self, *, name: str = "memory", limit: int | None = None, verify: bool = True) -> None:
        self.name = name
        self._limit = limit
        self._verify = verify
        self._context: TierContext | None = None
        self._entries: OrderedDict[OffloadKey, tuple[bytes, bytes]] = OrderedDict()  # payload, digest
        self._events: list[TierEvent] = []
        self._held = 0
        self._peak = 0
        self._evicted = 0
        self._tickets = 0

    def open(self, context: TierContext) -> None:
        """Start empty. Raises `ConfigError` for a limit that makes no sense."""
        if self._limit is not None and self._limit < 1:
            raise ConfigError(f"tier {self.name}: limit: {self._limit} must be at least 1 byte")
        self._context = context

    def close(self, timeout: float = 5.0) -> None:
        """Drop everything."""
        self._context = None
        self._entries.clear()
        self._held = 0

    # what is there

    def probe(self, keys: Sequence[OffloadKey]) -> I8:
        """Presence of each key, at once."""
        answers = np.fromiter(map(self._entries.__contains__, keys), dtype=np.int8, count=len(keys))
        answers <<= 1  # Presence.PRESENT is 2
        return answers

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Mark as recently used; of one chain the head becomes the warmest."""
        entries = self._entries
        for key in reversed(keys):
            if key in entries:
                entries.move_to_end(key)

    def usage(self) -> TierUsage:
        """What is held at this instant."""
        return TierUsage(self._held, 0, self._limit, len(self._entries), self._peak, self._evicted)

    # jobs

    def submit_load(self, job: TierJob) -> None:
        """Copy each payload into its range of primary and verify it there."""
        context = self._context
        if context is None:
            self._emit(JobEnded(job.job_id, FailCause.REFUSED))
            return
        entries, region = self._entries, context.region
        done: list[int] = []
        failed: list[tuple[int, FailCause]] = []
        bad: dict[OffloadKey, None] = {}
        for index, (key, offset, length) in enumerate(zip(job.keys, job.offsets, job.lengths, strict=True)):
            entry = entries.get(key)
            if entry is None:
                failed.append((index, FailCause.GONE))
                continue
            payload, digest = entry
            if len(payload) != length:
                failed.append((index, FailCause.WRONG_SIZE))
                bad[key] = None
                continue
            target = region[offset : offset + length]
            target[:] = payload
            if self._verify and digest is not _NOT_CHECKED and xxhash.xxh3_128_digest(target) != digest:
                failed.append((index, FailCause.CORRUPT))
                bad[key] = None
                continue
            done.append(index)
        self.touch(job.keys)
        self._drop(bad)  # a bad entry would keep a later store of its key from healing it
        self._emit(KeysDone(job.job_id, done, failed), JobEnded(job.job_id))

    def submit_store(self, job: TierJob) -> None:
        """Copy each key's payload out of its range of primary."""
        if self._context is None:
            self._emit(JobEnded(job.job_id, FailCause.REFUSED))
            return
        fresh, failed = self._admit(job)
        self.touch(job.keys)  # before room is made: what this job names is no victim of it
        if self._limit is not None:
            self._make_room(self._limit - sum(job.lengths[index] for index in fresh.values()))
        self._put(job, fresh, self._context.region)
        refused = {index for index, _ in failed}
        done = [index for index in range(len(job.keys)) if index not in refused]
        self._emit(KeysDone(job.job_id, done, failed), JobEnded(job.job_id))

    def _admit(self, job: TierJob) -> tuple[dict[OffloadKey, int], list[tuple[int, FailCause]]]:
        """New keys with the index to copy from, and the indices for which the limit has no room."""
        entries = self._entries
        fresh: dict[OffloadKey, int] = {}
        failed: list[tuple[int, FailCause]] = []
        room = self._limit
        if room is not None:
            room -= sum(len(entries[key][0]) for key in set(job.keys) if key in entries)
        for index, key in enumerate(job.keys):
            if key in entries or key in fresh:
                continue
            if room is not None:
                if job.lengths[index] > room:
                    failed.append((index, FailCause.NO_SPACE))
                    continue
                room -= job.lengths[index]
            fresh[key] = index
        return fresh, failed

    def _make_room(self, most: int) -> None:
        """Evict the coldest until at most `most` bytes are held."""
        victims: list[OffloadKey] = []
        while self._held > most:
            key, (payload, _) = self._entries.popitem(last=False)
            self._held -= len(payload)
            victims.append(key)
        if victims:
            self._evicted += len(victims)
            self._events.append(KeysRemoved(victims))

    def _put(self, job: TierJob, fresh: dict[OffloadKey, int], region: memoryview) -> None:
        digests = job.digests
        for key, index in reversed(fresh.items()):  # the tail of the chain is the coldest
            offset = job.offsets[index]
            payload = bytes(region[offset : offset + job.lengths[index]])
            if digests is not None:
                digest = digests[index]
            else:
                digest = xxhash.xxh3_128_digest(payload) if self._verify else _NOT_CHECKED
            self._entries[key] = (payload, digest)
            self._held += len(payload)
        self._peak = max(self._peak, self._held)

    def cancel(self, job_id: int) -> None:
        """Jobs are done by the time they could be cancelled."""

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Drop keys."""
        self._drop(dict.fromkeys(keys))

    def _drop(self, keys: dict[OffloadKey, None]) -> None:
        removed: list[OffloadKey] = []
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._held -= len(entry[0])
                removed.append(key)
        if removed:
            self._emit(KeysRemoved(removed))

    # tickets

    def purge(self, namespace: bytes) -> int:
        """Drop everything, if the namespace is the one that the tier was opened with."""
        if self._context is not None and namespace == self._context.namespace:
            self._drop(dict.fromkeys(self._entries))
        return self.flush()

    def flush(self) -> int:
        """Nothing outlives the process, so there is nothing to wait for."""
        self._tickets += 1
        self._emit(Flushed(self._tickets, ok=self._context is not None))
        return self._tickets

    def poll(self) -> list[TierEvent]:
        """Everything that happened since the last call."""
        events = self._events
        self._events = []
        return events

    def _emit(self, *events: TierEvent) -> None:
        self._events += events
        if self._context is not None:
            self._context.wake()

    def drain(self, timeout: float) -> bool:
        """No job is ever unfinished."""
        return True

    def self_test(self) -> str | None:
        """None if the tier is open."""
        return None if self._context is not None else f"tier {self.name} is not open"

    def damage(self, key: OffloadKey) -> bool:
        """Test instrument: alter one byte of the payload behind the tier's back; False if the key is not there."""
        entry = self._entries.get(key)
        if entry is None or not entry[0]:
            return False
        altered = bytearray(entry[0])
        altered[len(altered) // 2] ^= 0xFF
        self._entries[key] = (bytes(altered), entry[1])
        return True
