"""Faults that strike the whole: the process, the engine, its ranks, tiers from outside, the device, time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.core.requests import RequestState
from kvstrata.testing.simulation.faults import weighted
from kvstrata.types import ResetReason

if TYPE_CHECKING:
    from kvstrata.testing.simulation.run import Simulation

OF_THE_WHOLE = weighted(
    {
        "crash": 3, "limit change": 3, "keys removed": 3, "reset memory": 3, "reset content": 2, "clock jump": 2,
        "silence": 2, "abort": 6, "preempt": 3, "cache dropped": 4, "device error": 3, "bit rot": 2, "device full": 2,
        "restart": 2, "power cut": 2,
    }
)  # fmt: skip
"""Faults that a turn may meet. Some find nothing to strike in many turns, and are drawn more often."""


def strike(run: Simulation) -> None:
    """A turn begins: perhaps something goes wrong."""
    if run.choices.below(3):
        return
    kind = run.faults.meets(run.choices, OF_THE_WHOLE)
    if kind and _happen(run, kind):
        run.say(f"fault: {kind}")
        run.world_before += 1
        run.faults.strike(kind)


def _happen(run: Simulation, kind: str) -> bool:
    choices = run.choices
    match kind:
        case "crash" | "limit change" | "keys removed":
            return _strike_tier(run, kind)
        case "reset memory":
            fetching = any(r.state is RequestState.FETCHING for r in run.manager._core.requests.values())
            return (fetching or choices.below(2) == 0) and run.reset(ResetReason.MEMORY_GOING_AWAY)
        case "reset content":
            return run.reset(ResetReason.CONTENT_INVALID)
        case "clock jump":
            run.clock.advance(choices.pick((1.0, 2.5, 4.0, 11.0)))
            run.clock.set_wall(1_600_000_000.0 + choices.below(1 << 28))
        case "silence":
            run.away = choices.pick((2, 3, 5))
        case "abort":
            return _abort(run)
        case "preempt":
            if not run.engine.running:
                return False
            victims = list(reversed(run.engine.running))
            for victim in victims if choices.below(2) else [choices.pick(victims)]:
                run.engine.preempt(victim)
            if "copy failed" in run.faults.allowed:
                for copier in run.copiers:
                    copier.fail_one()
        case "cache dropped":
            if not run.engine.pool.cached:
                return False
            run.engine.pool.clear()
        case "restart" | "power cut":
            if kind == "power cut" and not run.disks:
                return False
            run.restart(power=kind == "power cut")
        case _:
            disks = list(run.disks.values())
            return bool(disks) and choices.pick(disks).misbehave(kind)
    return True


def _abort(run: Simulation) -> bool:
    """A client gives up, and may ask again at once under the same id; jobs of the first time go on meanwhile."""
    choices, victims = run.choices, list(run.engine.requests.values())
    if not victims:
        return False
    core = run.manager._core.requests
    records = [core.get(request.request_id) for request in victims]
    loading = [request for request in victims if request.state == "loading"]
    fetching = [
        request
        for request, record in zip(victims, records, strict=True)
        if record is not None and record.state is RequestState.FETCHING
    ]
    some = fetching or victims
    victim = choices.pick(choices.pick((victims, loading or some, some, some)))
    run.engine.abort(victim)
    run.ended.append(victim.request_id)
    run.made -= 1
    if victim.state != "gone" and choices.below(3):
        run.new_request(victim if choices.below(3) == 0 else None, victim.request_id)
    return True


def _strike_tier(run: Simulation, kind: str) -> bool:
    choices = run.choices
    if not run.sim_tiers:
        return False
    tier = choices.pick(run.sim_tiers)
    match kind:
        case "crash":
            tier.crash(silent=choices.below(2) == 1)
        case "limit change":
            tier.change_limit(choices.pick((None, 500, 3_000, 20_000)))
        case _:
            if choices.below(2):
                run.put_some(tier, choices.pick(run.family_keys))
            return bool(tier.remove_some())
    return True
