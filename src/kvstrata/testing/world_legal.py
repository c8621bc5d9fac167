"""Which events may strike a request in which states: the table that a soak has to fill."""

from __future__ import annotations

from kvstrata.testing.coverage import (
    FETCHING,
    GONE,
    KEY_LOADING,
    KEY_NEW,
    KEY_RUNNING,
    KEY_WAITING,
    LIVE,
    NEW,
    PER_KEY,
    READY,
    RESOLVING,
    STATES,
    TWO_PHASE,
)  # fmt: skip
from kvstrata.types import FailCause

_OWNERS = STATES
"""States in which the request that a promotion or a probe was started for may be when it reports: all."""

LEGAL: dict[str, tuple[str, ...]] = {
    "poll": TWO_PHASE,
    "poll C grown": TWO_PHASE,
    "poll C shrunk": TWO_PHASE,
    "poll n grown": TWO_PHASE,
    "extend": TWO_PHASE,
    "take all": (READY,),
    "take part": (READY,),
    "take none": (READY,),
    "take of no hit": (READY,),
    "take of a lost hit": (NEW, RESOLVING, FETCHING, READY),
    "load ok": (*TWO_PHASE, KEY_NEW, KEY_WAITING, KEY_LOADING, KEY_RUNNING, GONE),
    "load failed": (*TWO_PHASE, KEY_NEW, KEY_WAITING, KEY_LOADING, KEY_RUNNING, GONE),
    "store begun": TWO_PHASE,
    "store ok": (*TWO_PHASE, GONE),
    "store failed": (*TWO_PHASE, GONE),
    "lookups": PER_KEY,
    "load of keys": (KEY_WAITING,),
    "preempt": LIVE,
    "finish": LIVE,
    "probe answered": _OWNERS,
    "probe error": _OWNERS,
    "probe overdue": _OWNERS,
    "landed": _OWNERS,
    "failed": _OWNERS,
    "load overdue": _OWNERS,
    **{f"failed {cause.value}": (FETCHING, KEY_WAITING, GONE) for cause in FailCause},
    "load ended": _OWNERS,
    "tier lost keys": LIVE,
    "breaker opened": LIVE,
    "reset memory_going_away": LIVE,
    "reset content_invalid": LIVE,
    "silence": LIVE,
    "time small": LIVE,
    "time large": LIVE,
}
