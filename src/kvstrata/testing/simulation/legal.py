"""Which events may strike a request in which states in the simulation: the table that a soak has to fill.

A pair that is not in it fails the run in which it happens. An engine does less than the stateful world
(`testing/world_legal.py`): it stores for running requests only, and asks about a loading one not at all.
"""

from __future__ import annotations

from kvstrata.testing.coverage import FETCHING, GONE, LOADING, NEW, QUEUED, READY, RESOLVING, RUNNING

WAITING = (RESOLVING, QUEUED, FETCHING)
ASKED = (*WAITING, READY)
LIVE = (NEW, *ASKED, LOADING, RUNNING)
LATER = (NEW, *ASKED, LOADING, RUNNING, GONE)
"""Where a request may be when something that was begun for it is reported. NEW, too: a client may use the id of a
request that is over once more while copies or reads of the first one are under way, and a request that was silent while
its engine stood still is new again before the reports of that time are heard."""

LEGAL: dict[str, tuple[str, ...]] = {
    "poll": (NEW, *ASKED, RUNNING),
    "poll C grown": (NEW, *ASKED, RUNNING),
    "poll C shrunk": (NEW, *ASKED, RUNNING),
    "poll n grown": (RUNNING,),
    "extend": (RUNNING,),
    "take all": (READY,),
    "take part": (READY,),
    "take none": (READY,),
    "load ok": (LOADING, GONE),
    "load failed": (LOADING, GONE),
    "store begun": (RUNNING,),
    "store ok": LATER,
    "store failed": LATER,
    "finish": (*LIVE, GONE),
    "probe answered": LATER,
    "probe error": LATER,
    "landed": LATER,
    "failed": LATER,
    "load ended": LATER,
    "load overdue": LATER,
    "tier lost keys": LIVE,
    "breaker opened": LIVE,
    "reset memory_going_away": LIVE,
    "reset content_invalid": LIVE,
    "silence": ASKED,
    "time large": (RESOLVING, FETCHING),
}
