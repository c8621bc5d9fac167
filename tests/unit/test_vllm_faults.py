"""Whatever the scheduler side calls may raise for ever: each request gets its answer, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import vllm_kit as kit
from vllm_scene import TOKENS, Scene

from kvstrata.testing.striker import Striker

PATIENCE_S = 4.0
"""The bound on a wait: two seconds by the core's clock, and a grace."""
STEP_S = 0.05


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.side.close()


def striker(scene: Scene) -> Striker:
    stack = scene.side.stack
    owners = {"manager": stack.manager, "driver": stack.driver, "clock": stack.clock, "region": stack.region}
    return Striker({**owners, "guard": stack.tiers[0], "tier": scene.tier})


def step(scene: Scene) -> None:
    """One step of the engine with nothing in it, and some time."""
    scene.advance(STEP_S)
    scene.side.update(None)
    scene.side.build_work(kit.output({}, {}))


def answered(scene: Scene, request: kit.FakeRequest) -> int:
    """The hit that the request gets, in time."""
    for _ in range(int(PATIENCE_S / STEP_S)):
        hit, _ = scene.side.matched(request, 0)
        if hit is not None:
            return hit
        step(scene)
    raise AssertionError("no answer")


def serve(scene: Scene, name: str, tokens: list[int]) -> None:
    """A request's whole way."""
    request = scene.request(name, tokens)
    scene.take(request, answered(scene, request))
    scene.compute(request)
    scene.side.finished(request, ([],))


def everything(scene: Scene) -> None:
    """A request that stores, one that loads from the tier, one that is aborted, and what an engine asks beside."""
    serve(scene, "new", list(range(2000, 2070)))
    scene.evict()
    serve(scene, "old", TOKENS)
    request = scene.request("aborted", TOKENS)
    answered(scene, request)
    scene.side.finished(request, ([],))
    scene.side.gains()
    scene.side.events()
    scene.side.reset()
    step(scene)


def is_clean(scene: Scene) -> bool:
    stats = scene.side.stack.driver.call(lambda manager: manager.statistics())
    primary = stats.primary
    left = (primary.pinned_bytes, primary.reserved_bytes, primary.quarantined_bytes, stats.requests, stats.jobs)
    return left == (0,) * 5 and not scene.side.pending


def becomes(scene: Scene, wanted: Callable[[Scene], bool]) -> bool:
    """Whether that is so within the time after which a job counts as lost, and a closed tier is tried again."""
    for _ in range(200):
        if wanted(scene):
            return True
        scene.advance(1.0)
        step(scene)
    return False


def calls() -> list[str]:
    """Every method that is called when everything is well."""
    scene = Scene()
    seen = striker(scene)
    everything(scene)
    seen.restore()
    scene.side.close()
    return sorted(seen.called)


@pytest.mark.parametrize("place", calls())
def test_what_raises_for_ever_costs_no_answer_and_leaves_nothing(scene: Scene, place: str) -> None:
    faults = striker(scene)
    faults.strike(place)
    everything(scene)
    assert faults.struck[place] > 0
    faults.heal()
    assert becomes(scene, is_clean)
    scene.side.stack.driver.call(lambda manager: manager.check())
    serve(scene, "fresh", TOKENS)
    again = scene.request("again", TOKENS)
    assert becomes(scene, lambda scene: scene.side.matched(again, 0)[0] == 64)
    scene.take(again, 64)
    scene.side.finished(again, ([],))
    assert becomes(scene, is_clean)
    faults.restore()


def test_time_that_does_not_move_in_the_core_is_noticed(scene: Scene) -> None:
    scene.evict()
    scene.tier.mood = "slow"
    faults = striker(scene)
    faults.strike("manager.advance")
    request = scene.request()
    begun = scene.clock.monotonic()
    assert answered(scene, request) == 0
    assert 2.0 < scene.clock.monotonic() - begun <= PATIENCE_S
    assert scene.side.matched(request, 0) == (0, False)
    story = scene.end(request)
    assert (story.cause, story.note) == ("internal", "the core gave no answer in time")
    assert any("waiting" in place for place in scene.side.shield.faults)
    assert any("advance" in place for place in scene.side.shield.faults)
    faults.restore()


def test_a_core_that_waits_too_long_is_not_waited_for(scene: Scene) -> None:
    """Also where nothing raises: the core's timers are lost."""
    scene.evict()
    scene.tier.mood = "slow"
    request = scene.request()
    scene.side.matched(request, 0)
    scene.side.stack.manager._core.timers.clear()
    assert answered(scene, request) == 0
    assert scene.end(request).cause == "internal"
