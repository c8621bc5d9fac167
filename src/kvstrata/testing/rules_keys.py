"""Rules of the per-key door: scans, and loads of what they have found."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.core.requests import RequestState
from kvstrata.core.residency import SlotState
from kvstrata.testing.rules_base import RuleBase
from kvstrata.testing.world import EngineRequest
from kvstrata.testing.world_checks import demand
from kvstrata.types import LookupResult, OffloadKey


class KeyRules(RuleBase):
    """What the engine does through the per-key door."""

    def scan(self, request: EngineRequest | None = None) -> None:
        """One request scans its keys, prefix or window, and loads what it has found."""
        world, choices = self.world, self.choices
        if request is None:
            fitting = [r for r in world.requests.values() if r.per_key]
            request = choices.pick(fitting) if fitting else None
        if request is None or not any(request.keys):
            return
        record = world.record(request)
        if record is not None and record.state is RequestState.LOADING and choices.below(4) < 3:
            return
        found, wait = self._lookups(request)
        if wait and choices.below(3) == 2:
            residency = world.core.residency
            found = [k for k in found if (s := residency.slot_of(k)) >= 0 and residency.state[s] == SlotState.READY]
            wait = False
        if found and not wait and choices.below(4) != 3:
            self._load_keys(request, found)

    def _lookups(self, request: EngineRequest) -> tuple[list[OffloadKey], bool]:
        """One scan: what it has found, and whether some of that is still on its way."""
        self.world.strike("lookups", request)
        found, wait = self._scan_groups(request)
        request.waiting_keys = wait
        request.mark = self.world.now
        return found, wait

    def _scan_groups(self, request: EngineRequest) -> tuple[list[OffloadKey], bool]:
        """Scan every group. What surely counts as waiting: the gaps after scans that had to wait."""
        world = self.world
        if request.waiting_keys:
            request.waited += min(world.now - request.mark, world.config.poll_gap_s)
        found: list[OffloadKey] = []
        wait = False
        for group, keys in zip(world.layout.groups, request.keys, strict=True):
            window = not group.kind.prefix and self.choices.below(2) == 0
            hits, pending = self._window(request, keys) if window else self._prefix(request, keys)
            found += hits
            wait |= pending
        return found, wait

    def _look(self, request: EngineRequest, key: OffloadKey) -> LookupResult:
        answer = self.world.lookup(request, key)
        self.checks.looked_up(request, key, answer)
        self.world.coverage.note(f"lookup {answer.value}")
        return answer

    def _prefix(self, request: EngineRequest, keys: Sequence[OffloadKey]) -> tuple[list[OffloadKey], bool]:
        found, wait = [], False
        for key in keys:
            answer = self._look(request, key)
            if answer is LookupResult.MISS:
                break
            wait |= answer is not LookupResult.HIT
            found.append(key)
        return found, wait

    def _window(self, request: EngineRequest, keys: Sequence[OffloadKey]) -> tuple[list[OffloadKey], bool]:
        streak: list[OffloadKey] = []
        pending, retry = False, False
        for key in reversed(keys):
            answer = self._look(request, key)
            if answer in (LookupResult.MISS, LookupResult.RETRY):
                streak, pending, retry = [], False, retry or answer is LookupResult.RETRY
                continue
            pending |= answer is LookupResult.HIT_PENDING
            streak.append(key)
            if len(streak) == 2:
                break
        return streak, pending or retry

    def _load_keys(self, request: EngineRequest, found: list[OffloadKey]) -> None:
        world = self.world
        found = list(dict.fromkeys(found))
        world.strike("load of keys", request)
        plan = world.manager.prepare_load(found, request.context)
        world.program.append(f"prepare_load {request.request_id} {len(found)} -> {plan and plan.job_id}")
        gone = [key for key in found if world.core.residency.slot_of(key) < 0 or key in request.bad]
        demand(plan is not None or bool(gone), f"{request.request_id}: hits cannot be loaded")
        if plan is not None:
            self.checks.content(plan)
            world.accept_load(plan)
            request.waited, request.waiting_keys = 0.0, False

    def end_step(self) -> None:
        """The engine's step ends."""
        self.world.end_step()
