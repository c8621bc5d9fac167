"""Many requests at once, with everything going wrong that may: runs inside an engine's host."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kvstrata.tiers.memory import MemoryTier
from kvstrata.types import FailCause, JobEnded, KeysDone, TierEvent, TierJob

TOKENS = 32


class FailingTier(MemoryTier):
    """Fails one load of a key in twenty."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._dice = random.Random(9)

    def poll(self) -> list[TierEvent]:
        """What the tier reports, some of it turned into failures."""
        return [self._maybe(event) for event in super().poll()]

    def _maybe(self, event: TierEvent) -> TierEvent:
        if not isinstance(event, KeysDone):
            return event
        bad = [index for index in event.done if self._dice.random() < 0.05]
        good = [index for index in event.done if index not in bad]
        return KeysDone(event.job_id, good, [*event.failed, *((index, FailCause.IO_ERROR) for index in bad)])


class StallingTier(MemoryTier):
    """Claims to have every key, and never brings one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._kept: list[int] = []

    def submit_load(self, job: TierJob) -> None:
        """Keep the job."""
        self._kept.append(job.job_id)

    def cancel(self, job_id: int) -> None:
        """Ends only what it stalls when it is told to."""
        if job_id in self._kept:
            self._kept.remove(job_id)
            self._outbox_of_stalls().append(JobEnded(job_id, FailCause.CANCELLED))
        else:
            super().cancel(job_id)

    def _outbox_of_stalls(self) -> list[TierEvent]:
        if not hasattr(self, "_ended"):
            self._ended: list[TierEvent] = []
        return self._ended

    def poll(self) -> list[TierEvent]:
        """The tier's events and the ends of what stalled."""
        ended, self._ended = self._outbox_of_stalls(), []
        return [*super().poll(), *ended]


class SlowCopier:
    """Makes loads end some steps later, and some of them fail."""

    def __init__(self, real: Any, dice: random.Random, fail: float) -> None:
        self.real, self.dice, self.fail = real, dice, fail
        self.waiting: list[list[Any]] = []

    def load(self, job_id: int, pieces: Sequence[Any]) -> None:
        """Queue a load."""
        self.waiting.append([self.dice.randint(0, 3), job_id, pieces])

    def finished(self) -> list[Any]:
        """Do what is due."""
        from kvstrata.transfer.pieces import Done

        done = []
        for entry in list(self.waiting):
            entry[0] -= 1
            if entry[0] < 0:
                self.waiting.remove(entry)
                if self.dice.random() < self.fail:
                    done.append(Done(entry[1], ok=False))
                else:
                    self.real.load(entry[1], entry[2])
        return [*done, *self.real.finished()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def requests(seed: int, count: int) -> list[list[int]]:
    """Prompts that share prefixes of many lengths."""
    from engine_kit import prompt

    dice = random.Random(seed)
    bases = [prompt(900, seed=700 + i) for i in range(8)]
    distinct = []
    for i in range(40):
        base = dice.choice(bases)
        cut = dice.randint(150, 640)
        distinct.append(base[:cut] + prompt(dice.randint(5, 250), seed=800 + i))
    return [dice.choice(distinct) for _ in range(count)]


def alone(host: Any, seed: int, count: int) -> dict[str, dict[str, Any]]:
    """What each distinct prompt gives alone, without kvstrata."""
    found = {}
    for asked in requests(seed, count):
        name = str(hash(tuple(asked)))
        if name not in found:
            host.reset()
            found[name] = host.generate([asked], tokens=TOKENS, params={"kvstrata": "off"})[0]
    host.reset()
    return found


def mixed(host: Any, seed: int, count: int, abort_at_most: int, fail: float) -> dict[str, Any]:
    """Serve them all, aborting some that load; returns answers by the prompt's name, and counts."""
    from engine_host import Host

    dice = random.Random(seed + 1)
    worker = host.worker
    worker._copier = SlowCopier(worker._copier, dice, fail)
    preempted: list[str] = []
    real = host.scheduler._preempt_request

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return real(request, *args, **kwargs)

    host.scheduler._preempt_request = preempt
    side, loaded = host.side, set()
    done = side._load_done

    def load_done(job_id: int, ok: bool) -> None:
        record = side._jobs.get(job_id)
        if ok and record is not None:
            loaded.add(record.request.request_id)
        done(job_id, ok)

    side._load_done = load_done
    todo = list(enumerate(requests(seed, count)))
    names: dict[str, str] = {}
    answers: list[tuple[str, dict[str, Any]]] = []
    aborted = 0
    engine = host.llm.llm_engine
    while todo or engine.has_unfinished_requests():
        while todo and len(host.scheduler.requests) < 12:
            _, asked = todo.pop(0)
            names[host.add(asked, tokens=TOKENS, logprobs=2)] = str(hash(tuple(asked)))
        for out in engine.step():
            if out.finished:
                answers.append((names.pop(out.request_id), Host._answer(out)))
        for rid, request in list(host.scheduler.requests.items()):
            loading = (
                request.status.name == "WAITING_FOR_REMOTE_KVS"
                and rid not in host.scheduler.finished_recving_kv_req_ids
            )
            if loading and aborted < abort_at_most and dice.random() < 0.15:
                outer = next((name for name in names if rid == name or rid.startswith(name + "-")), None)
                if outer is not None:
                    host.abort([outer])
                    names.pop(outer)
                    aborted += 1
        if dice.random() < 0.02:
            host.reset()
    host.run_out()
    worker._copier = worker._copier.real
    host.scheduler._preempt_request = real
    side._load_done = done
    counts = {"aborted": aborted, "preempted": len(preempted), "loaded": len(loaded), "open": len(names)}
    return {"answers": answers, **counts}
