"""What the scheduler side keeps of a request while it lives, and the record that stays behind."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from kvstrata.core.messages import AnswerCause
from kvstrata.integrations.vllm.keys import KeyChain
from kvstrata.integrations.vllm.options import Wishes
from kvstrata.integrations.vllm.patience import Patience
from kvstrata.layout.cursor import StoreCursor


@dataclass(frozen=True, slots=True)
class Story:
    """Why a request hit, missed, waited or recomputed: its last record."""

    request_id: str
    cause: str
    """An `AnswerCause`, or "off" (the client said so), "switched_off", "not_asked", "partly_taken", "not_taken",
    "load_failed", "aborted_waiting", "aborted_ready", "aborted_loading", "internal"."""
    prompt: int = 0
    computed: int = 0
    """Tokens that the engine had itself."""
    hit: int = 0
    """Tokens that kvstrata offered."""
    taken: int = 0
    """Tokens that the engine took."""
    waited_s: float = 0.0
    sources: tuple[tuple[str, int], ...] = ()
    """Tokens by the place that they came from."""
    note: str = ""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One live request."""

    request: Any
    chain: KeyChain
    wishes: Wishes
    cursor: StoreCursor | None
    story: Story
    keeps_ends: bool = False
    """Generated tokens are stored, and some group stores only what a kept boundary consumes."""
    kept: int = 0
    """Up to where ends were kept."""
    polled: bool = False
    """The engine asked and has not told yet what it takes."""
    waiting_since: float | None = None
    patience: Patience | None = None
    """How long this wait may still last, by the plug-in's own count."""
    answered: bool = False
    """The last answer was a number."""
    broken: bool = False
    """Something inside failed: kvstrata does nothing for it any more."""
    load_failed: bool = False
    load: int | None = None
    """The load handed to the ranks and not reported yet."""
    sources: dict[str, int] = field(default_factory=dict)
    """Tokens of the load by the place that they came from."""

    def tell(self, **changes: Any) -> None:
        """Note what happened."""
        self.story = replace(self.story, **changes)


class Archive:
    """The last records of finished requests."""

    def __init__(self, most: int) -> None:
        self._stories: deque[Story] = deque(maxlen=most)

    def add(self, story: Story) -> None:
        """Keep a record."""
        self._stories.append(story)

    def last(self, request_id: str) -> Story | None:
        """The last record of a request."""
        return next((story for story in reversed(self._stories) if story.request_id == request_id), None)

    def all(self) -> list[Story]:
        """Every record that is kept, oldest first."""
        return list(self._stories)


HIT_CAUSE = str(AnswerCause.HIT)
