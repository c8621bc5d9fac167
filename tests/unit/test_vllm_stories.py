"""Why a request hit, missed, waited or was computed: its last record names the cause, for every scripted outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import vllm_kit as kit
from vllm_scene import TOKENS, Scene

from kvstrata.integrations.vllm.metadata import JobReport, RankGreeting, StepReport
from kvstrata.integrations.vllm.records import Story
from kvstrata.types import JobEnded


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.side.stack.driver.settle()
    assert made.side.stack.driver.call(lambda manager: manager.statistics()).primary.pinned_bytes == 0
    made.side.close()


def served(scene: Scene, take: int | None = None, **fields: Any) -> Story:
    """A request that is asked, taken as a whole (or `take`), and ends."""
    request = scene.request(**fields)
    hit = scene.ask(request)
    assert hit is not None
    scene.take(request, hit if take is None else take)
    return scene.end(request)


def cold(scene: Scene) -> Story:
    return served(scene, tokens=list(range(1000, 1070)))


def short(scene: Scene) -> Story:
    return served(scene, tokens=TOKENS[:15])


def from_primary(scene: Scene) -> Story:
    return served(scene)


def from_tier(scene: Scene) -> Story:
    scene.evict()
    return served(scene)


def from_both(scene: Scene) -> Story:
    scene.evict(2)
    return served(scene)


def client_off(scene: Scene) -> Story:
    return served(scene, kv_transfer_params={"kvstrata": "off"})


def must_not_read(scene: Scene) -> Story:
    return served(scene, skip_reading_prefix_cache=True)


def capped(scene: Scene) -> Story:
    return served(scene, kv_transfer_params={"kvstrata": {"max_load_tokens": 20}})


def tier_refused(scene: Scene) -> Story:
    scene.evict()
    return served(scene, kv_transfer_params={"kvstrata": {"load_tiers": []}})


def partly(scene: Scene) -> Story:
    return served(scene, take=32)


def not_taken(scene: Scene) -> Story:
    return served(scene, take=0)


def damaged(scene: Scene) -> Story:
    scene.evict()
    scene.tier.mood = "corrupt"
    return served(scene)


def gone(scene: Scene) -> Story:
    scene.evict(1)
    scene.tier.mood = "gone"
    return served(scene)


def copy_failed(scene: Scene) -> Story:
    request = scene.request()
    scene.take(request, scene.ask(request) or 0, ok=False)
    assert scene.ask(request) == 0
    return scene.end(request)


def tier_slow(scene: Scene) -> Story:
    scene.evict()
    scene.tier.mood = "slow"
    request = scene.request()
    assert scene.ask(request) is None
    scene.clock.advance(2.5)
    assert scene.ask(request) == 0
    story = scene.end(request)
    scene.clock.advance(100.0)
    scene.tier._events += [JobEnded(job) for job in list(scene.side.stack.tiers[0]._jobs)]
    return story


def never_asked(scene: Scene) -> Story:
    return scene.end(scene.request())


def aborted_resolving(scene: Scene) -> Story:
    scene.evict()
    scene.tier.mood = "unsure"
    request = scene.request()
    assert scene.ask(request) is None
    return scene.end(request)


def aborted_ready(scene: Scene) -> Story:
    request = scene.request()
    assert scene.ask(request) == 64
    return scene.end(request)


def aborted_loading(scene: Scene) -> Story:
    request = scene.request()
    scene.ask(request)
    scene.side.allocated(request, [kit.blocks(9, 8, 7, 6, 5)], 64)
    (job,) = scene.side.build_work(kit.output({}, {})).loads
    story = scene.end(request)
    scene.side.update(StepReport(loads=[JobReport(job.job_id, True)]))
    return story


def switched_off(scene: Scene) -> Story:
    scene.side.greet([RankGreeting(0, "canary: it died", (512,))])
    return served(scene)


def reset_meanwhile(scene: Scene) -> Story:
    request = scene.request()
    assert scene.ask(request) == 64
    scene.side.reset()
    scene.side.stack.driver.settle()
    assert scene.ask(request) == 0
    scene.take(request, 0)
    return scene.end(request)


def inner_error(scene: Scene) -> Story:
    request = scene.request()
    manager = scene.side.stack.manager
    manager.poll = None  # type: ignore[assignment, method-assign]
    assert scene.side.matched(request, 0) == (0, False)
    del manager.poll  # type: ignore[method-assign]
    return scene.end(request)


OUTCOMES: dict[Callable[[Scene], Story], tuple[str, int]] = {
    cold: ("nothing_stored", 0),
    short: ("nothing_stored", 0),
    from_primary: ("hit", 64),
    from_tier: ("hit", 64),
    from_both: ("hit", 64),
    client_off: ("off", 0),
    must_not_read: ("not_allowed", 0),
    capped: ("hit", 20),
    tier_refused: ("nothing_stored", 0),
    partly: ("partly_taken", 32),
    not_taken: ("not_taken", 0),
    damaged: ("nothing_stored", 0),
    gone: ("hit", 48),
    copy_failed: ("load_failed", 64),
    tier_slow: ("clock", 0),
    never_asked: ("not_asked", 0),
    aborted_resolving: ("aborted_waiting", 0),
    aborted_ready: ("aborted_ready", 0),
    aborted_loading: ("aborted_loading", 64),
    switched_off: ("switched_off", 0),
    reset_meanwhile: ("nothing_stored", 0),
    inner_error: ("internal", 0),
}


@pytest.mark.parametrize("outcome", list(OUTCOMES), ids=[outcome.__name__ for outcome in OUTCOMES])
def test_the_last_record_names_the_cause(scene: Scene, outcome: Callable[[Scene], Story]) -> None:
    story = outcome(scene)
    assert (story.cause, story.taken) == OUTCOMES[outcome]
    assert sum(tokens for _, tokens in story.sources) == story.taken
    if outcome is from_both:
        assert dict(story.sources) == {"primary": 32, "disk": 32}
    if outcome in (damaged, gone):
        assert "could not be brought" in story.note
    if outcome is tier_slow:
        assert story.waited_s >= 2.0


def test_a_request_that_waits_is_asked_without_a_round_of_the_driver(scene: Scene) -> None:
    scene.evict()
    scene.tier.mood = "slow"
    request = scene.request()
    assert scene.ask(request) is None
    driver = scene.side.stack.driver
    before = driver.statistics().rounds
    assert scene.side.matched(request, 0) == (None, False)
    assert driver.statistics().rounds == before
    scene.end(request)
    scene.clock.advance(100.0)
    scene.tier._events += [JobEnded(job) for job in list(scene.side.stack.tiers[0]._jobs)]
