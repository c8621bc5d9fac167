"""Scripted outcomes in a running engine, each named by its request's last record; runs inside an engine's host.

Every scene finds its prompt in primary and on the tier, and the engine's own cache empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_kit import prompt as fresh
from engine_scenes import abort_in, hold_tier, keep_loads, pause

from kvstrata.types import FailCause, JobEnded, KeysDone, TierJob

Scene = Callable[[Any, list[int]], None]


def _serve(host: Any, asked: list[int], wishes: dict[str, Any] | None = None) -> None:
    host.generate([asked], tokens=1, params={"kvstrata": wishes} if wishes else None)


def _evict(host: Any, keys: list[list[bytes]] | None = None) -> None:
    """Drop all of primary, or only the last chunk of each group of `keys`."""
    import numpy as np

    with host.side.stack.driver.step() as manager:
        residency = manager.residency
        slots = np.flatnonzero((residency.state == 2) & (residency.pins == 0)).astype(np.int32)
        if keys is not None:
            slots = residency.find([group[-1] for group in keys])
        residency.evict(slots[slots >= 0])


def nothing_was_stored(host: Any, asked: list[int]) -> None:
    """A prompt that nobody asked before."""
    _serve(host, fresh(400, seed=4001))


def too_short(host: Any, asked: list[int]) -> None:
    """Less than a block."""
    _serve(host, asked[:100])


def from_primary(host: Any, asked: list[int]) -> None:
    """All of it in primary."""
    _serve(host, asked)


def from_disk(host: Any, asked: list[int]) -> None:
    """All of it on the tier."""
    _evict(host)
    _serve(host, asked)


def from_both(host: Any, asked: list[int]) -> None:
    """Its last chunks on the tier only."""
    _evict(host, host.keys_of(asked))
    _serve(host, asked)


def client_says_off(host: Any, asked: list[int]) -> None:
    """The client wants nothing of kvstrata."""
    host.generate([asked], tokens=1, params={"kvstrata": "off"})


def must_not_read_caches(host: Any, asked: list[int]) -> None:
    """A request that must not read the prefix cache."""
    from vllm import SamplingParams, TokensPrompt

    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False, skip_reading_prefix_cache=True)
    host.llm.generate([TokensPrompt(prompt_token_ids=asked)], sampling, use_tqdm=False)


def capped(host: Any, asked: list[int]) -> None:
    """The client caps what is loaded."""
    _serve(host, asked, {"max_load_tokens": 256})


def not_from_that_tier(host: Any, asked: list[int]) -> None:
    """On the tier only, and the client allows primary only."""
    _evict(host)
    _serve(host, asked, {"load_tiers": []})


def impatient(host: Any, asked: list[int]) -> None:
    """On the tier only, and the client waits a millionth of a second."""
    _serve_stalled(host, asked, 1e-6)


def tier_stalls(host: Any, asked: list[int]) -> None:
    """The tier takes the load and brings nothing."""
    _serve_stalled(host, asked, 0.2)


def _serve_stalled(host: Any, asked: list[int], wait_s: float) -> None:
    _evict(host)
    release = hold_tier(host, "fetching")
    try:
        _serve(host, asked, {"wait_s": wait_s})
    finally:
        release()


def _failing(host: Any, asked: list[int], cause: FailCause) -> None:
    """The tier reports every key as failed."""
    _evict(host)
    tier = host.side.stack.tiers[0].tier
    real_load, real_poll, events = tier.submit_load, tier.poll, []

    def load(job: TierJob) -> None:
        events.append(KeysDone(job.job_id, (), [(i, cause) for i in range(len(job.keys))]))
        events.append(JobEnded(job.job_id))
        host.side.stack.driver.wake()

    def poll() -> list[Any]:
        made = list(events)
        events.clear()
        return [*real_poll(), *made]

    tier.submit_load, tier.poll = load, poll
    try:
        _serve(host, asked)
    finally:
        tier.submit_load, tier.poll = real_load, real_poll


def damaged_on_the_tier(host: Any, asked: list[int]) -> None:
    """Every chunk on the tier is damaged."""
    _failing(host, asked, FailCause.CORRUPT)


def gone_from_the_tier(host: Any, asked: list[int]) -> None:
    """The tier said that it had them, and they are gone."""
    _failing(host, asked, FailCause.GONE)


def copy_fails(host: Any, asked: list[int]) -> None:
    """The copy into the engine's blocks fails."""
    host.load_faults(1.0, 1)
    try:
        _serve(host, asked)
    finally:
        host.heal()


def never_asked(host: Any, asked: list[int]) -> None:
    """Aborted before the engine's scheduler looked at it."""
    host.abort([host.add(asked)])


def _aborted(state: str) -> Scene:
    def scene(host: Any, asked: list[int]) -> None:
        if state in ("resolving", "fetching"):
            _evict(host)
        assert abort_in(host, state, asked) == state

    scene.__name__ = f"aborted_{state}"
    return scene


def switched_off(host: Any, asked: list[int]) -> None:
    """A rank's canary died."""
    host.side.switch_off("a rank's canary died")
    try:
        _serve(host, asked)
    finally:
        host.side.off = ""


def reset_meanwhile(host: Any, asked: list[int]) -> None:
    """The content was reset while the request waited for the tier."""
    _evict(host)
    kept, let_go = keep_loads(host)
    try:
        host.add(asked, tokens=1)
        for _ in range(200):
            host.step()
            if kept:
                break
        host.reset(connector=True)
    finally:
        let_go()
    host.run_out()


def inner_error(host: Any, asked: list[int]) -> None:
    """Something inside kvstrata raises when it is asked."""
    manager = host.side.stack.manager

    def raising(*_: Any) -> None:
        raise RuntimeError("made to fail")

    manager.poll = raising
    try:
        _serve(host, asked)
    finally:
        del manager.poll


SCENES: tuple[Scene, ...] = (
    nothing_was_stored,
    too_short,
    from_primary,
    from_disk,
    from_both,
    client_says_off,
    must_not_read_caches,
    capped,
    not_from_that_tier,
    impatient,
    tier_stalls,
    damaged_on_the_tier,
    gone_from_the_tier,
    copy_fails,
    never_asked,
    *(_aborted(state) for state in ("resolving", "fetching", "ready", "allocated", "loading", "loaded")),
    switched_off,
    inner_error,
    reset_meanwhile,
)


def outcomes(host: Any, prompt: list[int]) -> dict[str, dict[str, Any]]:
    """Play every scene; the last record of each by the scene's name."""
    found = {}
    for scene in SCENES:
        host.generate([prompt], tokens=1)
        host.run_out()
        if not host.settle():
            raise RuntimeError("what was stored did not reach the tier")
        host.reset()
        host.side.archive._stories.clear()
        scene(host, prompt)
        host.run_out()
        for _ in range(50):
            if host.settle():
                break
            pause(0.1)
        (story,) = host.side.archive.all()
        found[scene.__name__] = {name: getattr(story, name) for name in story.__slots__}
        host.reset()
    return found
