"""A trial of one tier before serving: known bytes go from slots through the tier and back; how fast is measured."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstrata.core.pages import slot_bytes
from kvstrata.runtime.guard import GuardedTier
from kvstrata.tiers.base import Clock
from kvstrata.types import FailCause, JobEnded, KeysDone, TierJob, make_key

STORE_JOB = 2**62 + 1  # no number that the core will give, and none that a tier keeps for its self-test
LOAD_JOB = 2**62 + 2
PATIENCE_S = 10.0
MOST_BYTES = 32 << 20
MOST_SLOTS = 8
STEP = 4096


@dataclass(frozen=True, slots=True)
class Trial:
    """How it went. `wrong`: the tier gave other bytes than it was given; it must not be used."""

    trouble: str = ""
    wrong: bool = False
    bytes_per_s: float = 0.0


def try_tier(tier: GuardedTier, primary: memoryview, lengths: Sequence[int], clock: Clock, tail_room: int = 0) -> Trial:
    """Send slots of these lengths through a tier that is open and that nobody else uses yet."""
    lengths = _fitting(list(lengths), len(primary), tail_room)
    if not lengths:
        return Trial()
    offsets = np.cumsum([0, *(slot_bytes(length, STEP, tail_room) for length in lengths[:-1])]).tolist()
    token = os.urandom(16)
    keys = [make_key(hashlib.blake2b(token + bytes([i]), digest_size=32).digest(), 0) for i in range(len(lengths))]
    dice = np.random.default_rng(len(lengths))
    patterns = [dice.integers(0, 256, length, dtype=np.uint8) for length in lengths]
    region = np.frombuffer(primary, dtype=np.uint8)
    for offset, pattern in zip(offsets, patterns, strict=True):
        region[offset : offset + len(pattern)] = pattern
    failed = _run(tier, TierJob(STORE_JOB, keys, offsets, lengths), load=False)
    if failed:
        tier.remove(keys)
        return Trial(f"would not store: {failed}")
    for offset, pattern in zip(offsets, patterns, strict=True):
        region[offset : offset + len(pattern)] = 0
    begun = clock.monotonic()
    failed = _run(tier, TierJob(LOAD_JOB, keys, offsets, lengths), load=True)
    seconds = max(clock.monotonic() - begun, 1e-9)
    tier.remove(keys)
    tier.poll()
    if failed:
        return Trial(f"did not give back what it was given: {failed}", wrong=failed in _BAD)
    for offset, pattern in zip(offsets, patterns, strict=True):
        if not (region[offset : offset + len(pattern)] == pattern).all():
            return Trial("gave other bytes than it was given", wrong=True)
    return Trial(bytes_per_s=sum(lengths) / seconds)


_BAD = tuple(str(cause) for cause in FailCause if cause.is_content)


def _fitting(lengths: list[int], room: int, tail_room: int) -> list[int]:
    """Slots of these lengths in turn, a few of them, as far as they fit."""
    chosen: list[int] = []
    used = 0
    for i in range(max(MOST_SLOTS, len(lengths))):
        length = lengths[i % len(lengths)]
        step = slot_bytes(length, STEP, tail_room)
        if used + step > min(room, max(MOST_BYTES, step)):
            break
        chosen.append(length)
        used += step
    return chosen


def _run(tier: GuardedTier, job: TierJob, *, load: bool) -> str:
    """Do one job; empty if all of it worked, else the first cause."""
    (tier.submit_load if load else tier.submit_store)(job)
    tier.drain(PATIENCE_S)
    done, cause, ended = 0, "", False
    for event in tier.poll():
        if isinstance(event, KeysDone) and event.job_id == job.job_id:
            done += len(event.done)
            cause = cause or next((str(why) for _, why in event.failed), "")
        elif isinstance(event, JobEnded) and event.job_id == job.job_id:
            ended = True
            cause = cause or ("" if done == len(job.keys) else str(event.cause))
    if not ended:
        return f"no end within {PATIENCE_S:g} s"
    return cause
