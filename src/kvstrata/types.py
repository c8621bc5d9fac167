"""Frozen values shared by every layer: keys, answers, causes, jobs and the events of tiers.

Nothing here has behaviour beyond small pure helpers. Words are those of `docs/glossary.md`. What is made for every job
is a `Struct`: it is made in a tenth of the time of a dataclass.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

OffloadKey: TypeAlias = bytes
"""Block hash of the chunk's last block, then the group index as 4 bytes big endian."""

BLOCK_HASH_BYTES = 32
KEY_BYTES = BLOCK_HASH_BYTES + 4
"""Length of a key made from a 32-byte block hash; tiers that outlive the process accept only this length."""

DIGEST_BYTES = 16
"""Length of an xxh3-128 payload digest (big endian, as `xxhash.xxh3_128_digest` gives it)."""

I8: TypeAlias = npt.NDArray[np.int8]
I32: TypeAlias = npt.NDArray[np.int32]
I64: TypeAlias = npt.NDArray[np.int64]
Bool: TypeAlias = npt.NDArray[np.bool_]


def make_key(block_hash: bytes, group: int) -> OffloadKey:
    """The key of the chunk of `group` whose last block has `block_hash`."""
    return block_hash + group.to_bytes(4, "big")


def key_group(key: OffloadKey) -> int:
    """The group index inside a key."""
    return int.from_bytes(key[-4:], "big")


class LookupResult(enum.Enum):
    """The four answers of a lookup (docs/architecture.md has the table of what each means to a scan)."""

    MISS = "miss"
    HIT = "hit"
    HIT_PENDING = "hit_pending"
    RETRY = "retry"


class Presence(enum.IntEnum):
    """What is known of one key at one place; the values of int8 presence arrays.

    UNKNOWN also stands for "being written": a tier that is itself still writing a key does not know yet. ASSUMED is
    never a tier's answer: the core infers it where asking costs a round trip. It counts as present for a plan, which
    finds out by fetching.
    """

    ABSENT = 0
    UNKNOWN = 1
    PRESENT = 2
    ASSUMED = 3


class FailCause(enum.StrEnum):
    """Why a key of a transfer, or a probe, failed. Closed: every tier maps what it sees to one of these."""

    GONE = "gone"  # plain absence: evicted or deleted meanwhile
    WRONG_SIZE = "wrong_size"  # length differs from what was asked
    CORRUPT = "corrupt"  # checksum or digest differs
    FOREIGN = "foreign"  # another namespace, layout, format version or key
    IO_ERROR = "io_error"
    TIMEOUT = "timeout"
    REFUSED = "refused"  # the tier would not take it: queue full, closed, read-only
    NO_SPACE = "no_space"  # a store that the limit, or the device, has no room for
    CANCELLED = "cancelled"

    @property
    def is_content(self) -> bool:
        """The bytes themselves are bad; stays a miss until stored again (DESIGN section 3, rule 7)."""
        return self in (FailCause.WRONG_SIZE, FailCause.CORRUPT, FailCause.FOREIGN)

    @property
    def is_passing(self) -> bool:
        """The place may recover; the key is left alone for a back-off."""
        return self in (FailCause.IO_ERROR, FailCause.TIMEOUT, FailCause.REFUSED)


class Medium(enum.StrEnum):
    """What a tier is built on, for per-request tier filters."""

    CPU = "cpu"
    NVME = "nvme"
    SHARED_FS = "shared_fs"
    OBJECT = "object"
    MEMORY_STORE = "memory_store"


class Locality(enum.StrEnum):
    """Who can reach a tier."""

    LOCAL = "local"
    SHARED = "shared"


class JobKind(enum.StrEnum):
    """The four directions of a job; one ledger holds them all."""

    STORE = "store"  # accelerator -> primary
    LOAD = "load"  # primary -> accelerator
    PROMOTE = "promote"  # secondary -> primary
    CASCADE = "cascade"  # primary -> secondary


class ResetReason(enum.StrEnum):
    """Why the cache is reset."""

    MEMORY_GOING_AWAY = "memory_going_away"  # primary is dropped, lower tiers are kept
    CONTENT_INVALID = "content_invalid"  # every tier is fenced by a new epoch


class TierJob(msgspec.Struct, frozen=True):
    """One batch that a tier reads into, or writes from, primary.

    `keys[i]` has its bytes at `region[offsets[i] : offsets[i] + lengths[i]]`. Keys of one request come in token
    order. Until the job has ended, the tier may touch exactly these ranges and nothing else: a load job writes
    them, a store job only reads them. `digests`, when given, are the xxh3-128 payload digests that were made where
    the bytes were hot; a tier that verifies stores them instead of hashing again.
    """

    job_id: int
    keys: Sequence[OffloadKey]
    offsets: Sequence[int]
    lengths: Sequence[int]
    digests: Sequence[bytes] | None = None


@dataclass(frozen=True, slots=True)
class ProbeDone:
    """Answers of one asynchronous probe: an int8 array of `Presence` in the order of the probed keys."""

    ticket: int
    answers: I8
    error: FailCause | None = None
    """Set when the tier failed to find out; `answers` is then all ABSENT and counts as an error of the tier."""


class KeysDone(msgspec.Struct, frozen=True, gc=False):
    """Progress of an unfinished job: indices into `TierJob.keys`. Each index is reported at most once."""

    job_id: int
    done: Sequence[int] = ()
    failed: Sequence[tuple[int, FailCause]] = ()


class JobEnded(msgspec.Struct, frozen=True, gc=False):
    """The job touches primary no more. Comes exactly once per accepted job, after its last `KeysDone`.

    Keys of the job that were reported neither done nor failed count as failed with `cause`.
    """

    job_id: int
    cause: FailCause = FailCause.IO_ERROR


@dataclass(frozen=True, slots=True)
class KeysRemoved:
    """The tier no longer has these keys (evicted, deleted, found bad)."""

    keys: Sequence[OffloadKey]


@dataclass(frozen=True, slots=True)
class Flushed:
    """Everything stored before this `flush` ticket was taken is durable (`ok`), or could not be made so."""

    ticket: int
    ok: bool = True


TierEvent: TypeAlias = ProbeDone | KeysDone | JobEnded | KeysRemoved | Flushed


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a tier can do, stated by itself."""

    sync_probe: bool
    """`probe` answers at once from memory; otherwise it returns a ticket and answers by `ProbeDone`."""
    probe_cost_s: float = 0.0
    """Round trip of one probe, in seconds; above 0 probes of prefix groups gallop (unless they answer at once)."""
    max_batch: int = 1024
    """Most keys in one probe or job."""
    shared: bool = False
    """Others write this tier too: content verdicts on its keys expire with a back-off."""
    tail_room: int = 0
    """Bytes behind every payload in primary that would spare this tier work, if it is given them."""


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What a tier holds now. Bytes are counted as allocated: headers, padding and temporary files included."""

    bytes_held: int
    bytes_reserved: int
    bytes_limit: int | None
    keys: int
    bytes_peak: int = 0
    evicted: int = 0


Wake: TypeAlias = Callable[[], None]
