"""How often each event struck in each state of a request: the proof that a random test went everywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvstrata.core.requests import Door, Request, RequestState

GONE = "gone"
"""The state of a request that was finished, while something of it is still under way."""

NEW, RESOLVING, QUEUED, FETCHING, READY, LOADING, RUNNING = (
    "new", "resolving", "queued", "fetching", "ready", "loading", "running",
)  # fmt: skip
KEY_NEW, KEY_WAITING, KEY_LOADING, KEY_RUNNING = "key new", "key waiting", "key loading", "key running"

TWO_PHASE = (NEW, RESOLVING, QUEUED, FETCHING, READY, LOADING, RUNNING)
PER_KEY = (KEY_NEW, KEY_WAITING, KEY_LOADING, KEY_RUNNING)
LIVE = TWO_PHASE + PER_KEY
STATES = (*LIVE, GONE)

_NAMES = {state: state.value for state in RequestState}
_PER_KEY_NAMES = {
    NEW: KEY_NEW, RESOLVING: KEY_WAITING, READY: KEY_WAITING, LOADING: KEY_LOADING, RUNNING: KEY_RUNNING,
}  # fmt: skip


def state_name(request: Request | None) -> str:
    """The name of a request's state in the table; None is a finished request."""
    if request is None:
        return GONE
    name = _NAMES[request.state]
    return _PER_KEY_NAMES[name] if request.door is Door.PER_KEY else name


class Coverage:
    """Counts of (event, state) pairs, and of things that happened on the way."""

    def __init__(self) -> None:
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.seen: Counter[str] = Counter()

    def strike(self, event: str, state: str) -> None:
        """An event struck a request in this state."""
        self.pairs[(event, state)] += 1

    def note(self, what: str, count: int = 1) -> None:
        """Something worth counting happened."""
        self.seen[what] += count

    def add(self, other: Coverage) -> None:
        """Take over what another run counted."""
        self.pairs.update(other.pairs)
        self.seen.update(other.seen)

    def missing(self, legal: Mapping[str, tuple[str, ...]], least: int) -> list[str]:
        """The legal pairs that struck less often than `least`."""
        return [
            f"{event} x {state}: {self.pairs[(event, state)]}"
            for event, states in legal.items()
            for state in states
            if self.pairs[(event, state)] < least
        ]

    def summary(self, legal: Mapping[str, tuple[str, ...]]) -> str:
        """One line: how many legal pairs there are, and which struck least."""
        pairs = [(event, state) for event, states in legal.items() for state in states]
        event, state = least = min(pairs, key=lambda pair: self.pairs[pair])
        struck = sum(self.pairs[pair] > 0 for pair in pairs)
        text = f"{struck} of {len(pairs)} legal pairs struck, least often {event} x {state}: {self.pairs[least]}"
        never = ", ".join(f"{event} x {state}" for event, state in pairs if not self.pairs[(event, state)])
        return f"{text}; never: {never}" if never else text

    def table(self, legal: Mapping[str, tuple[str, ...]]) -> str:
        """All counts as text; "-" where a pair is not legal and did not happen."""
        events = [*legal, *sorted({event for event, _ in self.pairs} - set(legal))]
        width = max(map(len, events), default=0)
        lines = [" " * width + "".join(f"{state:>13}" for state in STATES)]
        for event in events:
            cells = []
            for state in STATES:
                count = self.pairs[(event, state)]
                cells.append(f"{count if count or state in legal.get(event, ()) else '-':>13}")
            lines.append(f"{event:<{width}}" + "".join(cells))
        return "\n".join([*lines, "", *(f"{count:>10} {what}" for what, count in sorted(self.seen.items()))])
