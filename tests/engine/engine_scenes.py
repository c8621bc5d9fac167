"""Scenes that run inside an engine's host: they step the scheduler and look at states that pass within a step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.executor import Signal
from kvstrata.testing.striker import Striker

MAX_STEPS = 3000


def abort_in(host: Any, state: str, prompt: list[int]) -> str:
    """Abort a request in `state`; returns the state in which it really was."""
    side, scheduler = host.side, host.scheduler
    held: list[Callable[[], None]] = []
    if state in ("resolving", "fetching"):
        held.append(hold_tier(host, state))
    if state == "loading":
        held.append(_hold_loads(host))
    if state == "ready":
        held.append(_no_room(host))
    name = host.add(prompt)
    reached = "never"
    for _ in range(MAX_STEPS):
        if state == "allocated":
            # Between the scheduler's decision and the workers: the load is in this step's work.
            taken = _step_with_abort_after_schedule(host, name)
            if taken:
                reached = "allocated"
                break
            continue
        host.step()
        if _state(host, name) == state:
            reached = state
            break
    if reached != "never" and state != "allocated":
        host.abort([name])
    for release in held:
        release()
    host.run_out()
    assert side.stack.driver.call(lambda manager: manager.statistics()).requests == 0
    assert not scheduler.requests, list(scheduler.requests)
    return reached


def _internal(host: Any, name: str) -> str | None:
    """The engine's own name of a request begins with the one that it was given."""
    return next((rid for rid in host.scheduler.requests if rid == name or rid.startswith(name + "-")), None)


def _state(host: Any, name: str) -> str:
    rid = _internal(host, name)
    if rid is None:
        return "gone"
    request = host.scheduler.requests[rid]
    if request.status.name == "WAITING_FOR_REMOTE_KVS":
        return "loaded" if rid in host.scheduler.finished_recving_kv_req_ids else "loading"

    def core_state(manager: Any) -> str:
        record = manager._core.requests.get(rid)
        return "unknown" if record is None else str(record.state.value)

    return str(host.side.stack.driver.call(core_state))


def hold_tier(host: Any, state: str) -> Callable[[], None]:
    """Keep probes from being answered (resolving), or loads from being made (fetching)."""
    import numpy as np

    tier = host.side.stack.tiers[0]
    if state == "resolving":
        real = tier.tier.probe
        tier.tier.probe = lambda keys: np.ones(len(keys), np.int8)  # not known yet

        def release() -> None:
            tier.tier.probe = real

        return release
    return keep_loads(host)[1]


def keep_loads(host: Any) -> tuple[list[Any], Callable[[], None]]:
    """Keep what the tier is to load, in a list; and what hands it over."""
    tier = host.side.stack.tiers[0].tier
    real, kept = tier.submit_load, []
    tier.submit_load = kept.append

    def let_go() -> None:
        with host.side.stack.driver._lock:  # a tier is called by one thread at a time
            tier.submit_load = real
            for job in kept:
                type(tier).submit_load(tier, job)  # handed over before: if struck by now it cannot refuse it

    return kept, let_go


def stall(host: Any) -> None:
    """Let the tier take loads and bring nothing, until the host heals."""
    host.undo.append(hold_tier(host, "fetching"))


def _hold_loads(host: Any) -> Callable[[], None]:
    """Let the worker's loads end only when released."""
    copier = host.worker._copier
    real, kept = copier.load, []
    copier.load = lambda job_id, pieces: kept.append((job_id, pieces))

    def release() -> None:
        copier.load = real
        for job_id, pieces in kept:
            real(job_id, pieces)

    return release


def _no_room(host: Any) -> Callable[[], None]:
    """Let the engine find no blocks, so that a reported hit is not taken."""
    manager = host.scheduler.kv_cache_manager
    real = manager.allocate_slots
    manager.allocate_slots = lambda *args, **kwargs: None

    def release() -> None:
        manager.allocate_slots = real

    return release


def _step_with_abort_after_schedule(host: Any, name: str) -> bool:
    """One step in which the request is aborted as soon as its load is planned; whether that happened."""
    side = host.scheduler.connector
    real, done = side.build_connector_meta, []

    def build(output: Any) -> Any:
        work = real(output)
        if work.loads:
            done.append(True)
        return work

    side.build_connector_meta = build
    execute = host.core.model_executor.execute_model

    def aborting(*args: Any, **kwargs: Any) -> Any:
        if done:
            host.core.model_executor.execute_model = execute
            rid = _internal(host, name)
            from vllm.v1.request import RequestStatus

            host.scheduler.finish_requests(rid, RequestStatus.FINISHED_ABORTED)
            host.llm.llm_engine.output_processor.abort_requests([name], internal=False)
        return execute(*args, **kwargs)

    host.core.model_executor.execute_model = aborting
    try:
        host.step()
    finally:
        side.build_connector_meta = real
        host.core.model_executor.execute_model = execute
    return bool(done)


def random_aborts(host: Any, seed: int, count: int, lengths: list[int]) -> dict[str, int]:
    """Requests that come and are aborted at random moments; some share prompts, so that they load."""
    dice = random.Random(seed)
    from engine_kit import prompt

    prompts = [prompt(dice.randint(*lengths), seed=600 + i) for i in range(12)]
    alive: dict[str, int] = {}
    aborted = finished = made = 0
    while aborted < count or alive:
        while aborted + len(alive) < count + 6 and len(alive) < 6 and aborted < count:
            name = host.add(dice.choice(prompts), tokens=dice.randint(1, 6))
            alive[name] = dice.randint(0, 4)
            made += 1
        for name in [name for name, left in alive.items() if left <= 0]:
            host.abort([name])
            del alive[name]
            aborted += 1
        for name in host.step():
            if alive.pop(name, None) is not None:
                finished += 1
        for name in alive:
            alive[name] -= 1
        if dice.random() < 0.1 and not host.scheduler.running:
            host.reset()
    return {"aborted": aborted, "finished": finished}


class StrikableClock(SystemClock):
    """The real clock, with room for a wrapper."""


def _striker(host: Any) -> Striker:
    """Every object outside the plug-in that its two sides call."""
    stack = host.side.stack
    if not isinstance(stack.clock, StrikableClock):
        stack.clock = stack.driver._clock = StrikableClock()
    return Striker(
        {
            "manager": stack.manager,
            "driver": stack.driver,
            "clock": stack.clock,
            "region": stack.region,
            "guard": stack.tiers[0],
            "tier": stack.tiers[0].tier,
            "copier": host.worker._copier,
        }
    )


def dependencies(host: Any, prompt: list[int]) -> list[str]:
    """Every method that is called when everything is well, by object and name."""
    seen = _striker(host)
    _everything(host, prompt, 0, seen)
    seen.restore()
    return sorted(seen.called)


def _everything(host: Any, prompt: list[int], number: int, seen: Striker) -> dict[str, Any]:
    """Requests that store, load from the tier, and are aborted, one while the tier reads; counters; a reset."""
    from engine_kit import prompt as fresh

    host.side._alarms_due = -math.inf  # what is looked at every ten seconds is due with the first step
    host.generate([fresh(300, seed=2000 + number)])
    _hand_over(host)
    _evict(host)
    host.reset()
    answer = dict(host.generate([prompt])[0])
    name = host.add(fresh(300, seed=3000 + number), tokens=50)
    host.step(2)
    host.abort([name])
    host.run_out()
    _abort_while_the_tier_reads(host, prompt, seen)
    host.metrics()
    host.reset(connector=True)
    return answer


def _abort_while_the_tier_reads(host: Any, prompt: list[int], seen: Striker) -> None:
    """The one thing that has a job cancelled, with a read that cannot end first; nothing happens if none begins."""
    _evict(host)
    host.reset()
    kept, let_go = keep_loads(host)
    name = host.add(prompt)
    while not kept and _internal(host, name) is not None:
        host.step()
    cancels = _times(seen, "guard.cancel")
    host.abort([name])
    for _ in range(50 if kept else 0):
        if _times(seen, "guard.cancel") > cancels:
            break
        pause(0.02)
    let_go()
    host.run_out()


def _times(seen: Striker, place: str) -> int:
    return seen.called[place] + seen.struck[place]


def _hand_over(host: Any) -> None:
    """Let the driver's thread hand over what is queued for the tier, if it can; asks nothing that may fail."""
    for _ in range(50):
        with host.side.stack.driver._lock:
            if not host.side.stack.manager._core.tiers[0].cascades:
                return
        pause(0.02)


def _evict(host: Any) -> None:
    """Empty primary without asking anything that may be made to fail."""
    import numpy as np

    with host.side.stack.driver._lock:
        residency = host.side.stack.manager.residency
        residency.evict(np.flatnonzero((residency.state == 2) & (residency.pins == 0)).astype(np.int32))


def with_fault(host: Any, place: str, prompt: list[int], number: int) -> dict[str, Any]:
    """Serve while one method raises at every call, then heal; what was answered, struck, and what stayed behind.

    Some methods are called only if a job happens to be under way, so all is done again until the method was struck.
    """
    faults = _striker(host)
    answers = []
    try:
        while not faults.struck[place] and len(answers) < 20:
            faults.heal()
            host.generate([prompt])
            host.settle()
            faults.strike(place)
            answers.append(_everything(host, prompt, number + 40 * len(answers), faults))
            for _ in range(5):  # what the driver's thread does in its own time
                if faults.struck[place]:
                    break
                pause(0.1)
    finally:
        faults.heal()
    left = _left(host)
    for turn in range(40):
        if not any(left.values()):
            break
        pause(0.1)
        host.generate([[5 + turn] * 20], tokens=1)
        left = _left(host)
    faults.restore()
    return {
        "tokens": [answer["tokens"] for answer in answers],
        "reasons": [answer["reason"] for answer in answers],
        "struck": faults.struck[place],
        "left": left,
    }


def pause(seconds: float) -> None:
    """Let the plug-in's own threads work."""
    Signal().wait(seconds)


def _left(host: Any) -> dict[str, int]:
    looked = host.look()
    names = ("pinned", "reserved", "quarantined", "requests", "jobs", "pending")
    return {name: int(looked[name]) for name in names}
