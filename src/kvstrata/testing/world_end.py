"""The orderly end of a random run: everything becomes healthy, and nothing may be left."""

from __future__ import annotations

from kvstrata.core.requests import RequestState
from kvstrata.testing.profiles import ModelTier
from kvstrata.testing.rules_tiers import finish_all
from kvstrata.testing.scripted import PendingJob, PendingProbe
from kvstrata.testing.world import World
from kvstrata.testing.world_checks import Checks
from kvstrata.types import Flushed


def end_run(world: World, checks: Checks) -> None:
    """Everything becomes healthy and comes to its end; afterwards the system must be clean."""
    world.program.append("# the end: tiers are healthy from now on")
    for tier in world.scripted:
        tier.writing.clear()
        tier.on_probe, tier.on_load, tier.on_store = PendingProbe.finish, PendingJob.finish, PendingJob.finish
        if isinstance(tier, ModelTier):
            tier.durable_at_once = True
            for ticket in tier.purging:
                tier.emit(Flushed(ticket))
            tier.purging = []
        finish_all(tier)
    for job in world.lost:
        job.finish()
    world.lost = []
    for turn in range(400):
        if not _wind_up(world, checks, 0.0005 if not world.profile.faults else 0.05 if turn < 100 else 1.0):
            break
    else:
        raise AssertionError("requests still wait although every tier is healthy")
    for seconds in (0.0, 0.0, 130.0, 130.0, 130.0, 130.0):
        world.advance(seconds)
        checks.after_advance()
        world.settle()
    world.end_step()
    world.settle()
    checks.clean()
    checks.cascaded()


def _wind_up(world: World, checks: Checks, seconds: float) -> bool:
    """One step towards the end; whether anything is left."""
    world.settle()
    for load in list(world.loads.values()):
        checks.untouched(load)
        while load.left:
            world.report_load(load, load.plan.complete)
    for store in list(world.stores.values()):
        while store.done < world.ranks:
            world.report_store(store, True)
    for request in list(world.requests.values()):
        record = world.record(request)
        if record is None:
            world.requests.pop(request.request_id)
        elif request.per_key or record.state in (RequestState.RUNNING, RequestState.NEW):
            world.finish(request)
        else:
            before = checks.before_poll()
            answer = world.poll(request, record.computed, record.total)
            checks.polled(request, answer, before, False)
            if answer.hit is not None:
                checks.planned(request, answer.hit, world.take(request, answer.hit), answer.hit)
        checks.after()
    world.settle()
    checks.after()
    world.advance(seconds)
    checks.after_advance()
    return bool(world.requests or world.loads or world.stores)
