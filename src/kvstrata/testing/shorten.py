"""Making a failing random run shorter: steps are left out, in ever smaller rows, as long as it fails the same way."""

from __future__ import annotations

from collections.abc import Callable

Recording = list[list[int]]
"""The decisions of a run: those of the set-up, then those of each step."""

Replay = Callable[[Recording], tuple[list[str], BaseException | None]]
"""Runs a recording: the program that it was, and what it failed with."""


def shortened(
    recording: Recording, replay: Replay, error: BaseException, *, most: int = 1 << 30
) -> tuple[Recording, list[str], BaseException]:
    """The shortest recording that was found within `most` replays, its program, and what it fails with."""
    best = recording
    program, cause = replay(best)
    if cause is None:
        return best, ["# the failure did not come again"], error
    size = max(len(best) // 2, 1)
    while size and most > 0:
        at = len(best) - size
        while at >= 1 and most > 0:
            shorter = best[:at] + best[at + size :]
            lines, found = replay(shorter)
            most -= 1
            if found is not None and type(found) is type(cause) and str(found)[:12] == str(cause)[:12]:
                best, program, cause = shorter, lines, found
            at -= size
        size //= 2
    return best, program, cause
