"""The scheduler side: resolve, fetch and plan, on the two-phase door. Called by the engine's scheduler, in its thread.

A request's way: `new_request`; `matched` until it is a number; `allocated` says what the engine takes; the load goes
out with `build_work`, and comes back with `update`; stores go out with each step's work; `finished`.

Every entry is shielded: an error inside is recorded, and the request is computed or the store is dropped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kvstrata.core.manager import TieringOffloadingManager
from kvstrata.core.messages import LoadPlan
from kvstrata.integrations.vllm.events import engine_events
from kvstrata.integrations.vllm.fences import Sources, new_owners
from kvstrata.integrations.vllm.keys import KeyChain
from kvstrata.integrations.vllm.metadata import CopyJob, RankGreeting, StepReport, StepWork
from kvstrata.integrations.vllm.options import read_wishes
from kvstrata.integrations.vllm.patience import Patience, bound_s
from kvstrata.integrations.vllm.planning import load_copies, misses, store_copies, store_sources
from kvstrata.integrations.vllm.records import HIT_CAUSE, Archive, RequestRecord, Story
from kvstrata.integrations.vllm.settings import VllmSettings
from kvstrata.integrations.vllm.shapes import EngineShape
from kvstrata.integrations.vllm.shield import Shield, shielded
from kvstrata.integrations.vllm.sources import HitSources, tokens_by_source
from kvstrata.integrations.vllm.stack import Stack
from kvstrata.integrations.vllm.stats import HIT_TOKENS, Meter, totals
from kvstrata.layout.cursor import StoreCursor
from kvstrata.layout.kept import default_keep_interval, joint_boundaries, whole_chunks
from kvstrata.runtime.owed import Owed
from kvstrata.types import ResetReason

_log = logging.getLogger("vllm.kvstrata")
T = TypeVar("T")

NO_JOB = -1
"""Id of a load that the core does not know: it is reported as failed."""

ALARM_PAUSE_S = 10.0
"""How often the core is asked whether something is wrong on the whole."""

LEAST_GAP_S = 0.1
"""What a gap between two polls counts at most where the core counts nothing."""


class OverdueError(Exception):
    """The core let a request wait for longer than its own clocks allow."""


class SchedulerSide:
    """One engine's scheduler side. The stack is open and stays the caller's to close by `close`."""

    def __init__(
        self, shape: EngineShape, settings: VllmSettings, stack: Stack, scope: Any, faults: Shield | None = None
    ) -> None:
        self.shield = Shield("scheduler side") if faults is None else faults
        self.archive = Archive(settings.records)
        self.stack = stack
        self._shape = shape
        self._settings = settings
        self._scope = scope
        self._layout = stack.layout
        self._interval = settings.keep_interval or shape.retention_interval or default_keep_interval(stack.layout)
        self._records: dict[str, RequestRecord] = {}
        self._loads: list[CopyJob] = []
        self._early: list[CopyJob] = []
        self._jobs: dict[int, RequestRecord] = {}
        """Loads that the ranks have and have not all reported."""
        self._stores: dict[int, Sources] = {}
        """Stores that the ranks have and have not all reported, with the blocks that they read."""
        self._reports: dict[int, int] = {}
        """How many ranks have reported a job, where not all have."""
        self.off = ""
        """Why kvstrata does nothing; empty while it works."""
        self.traffic = StepReport()
        """Sums of what the ranks reported since `take_traffic`."""
        self.hit_tokens: dict[str, int] = {}
        self._meter = Meter()
        self._alarmed: set[str] = set()
        """Places of alarms that were told."""
        self._alarms_due = -math.inf
        self._owed = Owed()
        """What the core must learn and would not take."""
        stack.driver.on_fault = self.shield.caught

    # -- requests

    @shielded(lambda: None)
    def new_request(self, request: Any) -> None:
        """The engine has a new request."""
        self._open(request)

    def _open(self, request: Any) -> RequestRecord:
        wishes = read_wishes(
            request.kv_transfer_params,
            self._settings.store,
            may_load=not getattr(request, "skip_reading_prefix_cache", False),
            wait_s=self._settings.config.core.total_s,
            known=[tier.name for tier in self._settings.config.tiers],
        )
        if wishes.complaint:
            _log.warning("kvstrata: kv_transfer_params of a request: %s", wishes.complaint)
        prompt = int(request.num_prompt_tokens)
        cursor = None
        if wishes.store != "none":
            named = self._shape.states_handed_off
            cursor = StoreCursor(
                self._layout,
                prompt,
                None if named else self._interval,
                total=prompt if wishes.store == "prompt" else None,
                junctions=self._prompt_boundaries(prompt) if wishes.store == "all" and not named else (),
                named_only=named,
            )
        story = Story(request.request_id, "off" if wishes.off else "not_asked", prompt=prompt, note=wishes.complaint)
        record = RequestRecord(request, KeyChain(self._shape, self._scope(request)), wishes, cursor, story)
        record.kept = prompt
        record.keeps_ends = wishes.store == "all" and not self._shape.states_handed_off and not self._layout.all_full
        old = self._records.get(request.request_id)
        if old is not None:
            self._leave(old)
        self._records[request.request_id] = record
        if not wishes.off:
            keys = record.chain.take(request.block_hashes) or [[] for _ in self._shape.groups]
            with self.stack.driver.step() as manager:
                manager.add_request(request.request_id, keys, wishes.options)
        return record

    def _extend(self, manager: TieringOffloadingManager, record: RequestRecord) -> None:
        fresh = record.chain.take(record.request.block_hashes)
        if fresh is not None:
            manager.extend_keys(record.request.request_id, fresh)

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond `computed` can be loaded; None: ask again."""
        try:
            return self._matched(request, computed)
        except Exception as error:
            self.shield.caught("matched", error)
            self._lost(request.request_id)
            return 0, False

    def _matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        if self.off:
            known = self._records.get(request.request_id)
            if known is not None:
                known.tell(cause="switched_off", note=self.off)
            return 0, False
        record = self._records.get(request.request_id) or self._open(request)
        if record.wishes.off or record.broken:
            return 0, False
        now, total = self.stack.clock.monotonic(), int(request.num_tokens)
        fresh = record.chain.take(request.block_hashes)
        waiting = fresh is None and record.polled and not record.answered
        if waiting and self.stack.driver.waits(request.request_id, computed, total):
            return self._wait(record, computed, total, now), False
        with self.stack.driver.step() as manager:
            if fresh is not None:
                manager.extend_keys(request.request_id, fresh)
            answer = manager.poll(request.request_id, computed, total)
            failed = manager.failed_chunks(request.request_id) if answer.hit is not None else 0
        record.polled = True
        if record.waiting_since is None:
            record.waiting_since = now
        record.answered = answer.hit is not None
        if answer.hit is None:
            return self._wait(record, computed, total, now), False
        record.patience = None
        # What a failed load leaves to compute is told by the failure, not by what is found afterwards.
        cause = record.story.cause if record.load_failed and not answer.hit else str(answer.cause)
        record.tell(cause=cause, computed=computed, hit=answer.hit, waited_s=now - record.waiting_since)
        if failed and not record.load_failed:
            record.tell(note=f"{failed} chunks could not be brought")
        return answer.hit, answer.hit > 0

    def _wait(self, record: RequestRecord, computed: int, total: int, now: float) -> int | None:
        """None while the request may wait; 0 when the core should have answered long ago, for whatever reason."""
        config, driver = self.stack.core_config, self.stack.driver
        if record.patience is None:
            record.patience = Patience(bound_s(config, self._layout, record.wishes.options, total), now)
        if record.patience.lasts(now, math.inf if driver.stuck else config.poll_gap_s or LEAST_GAP_S):
            return None
        waited = 0.0 if record.waiting_since is None else now - record.waiting_since
        self.shield.caught("waiting", OverdueError(f"no answer from the core after {waited:.1f} s"))
        record.tell(computed=computed, hit=0, waited_s=waited, note="the core gave no answer in time")
        self._lost(record.request.request_id)
        return 0

    @shielded(lambda: None)
    def _lost(self, request_id: str) -> None:
        """A request whose state is not known any more: kvstrata does nothing for it from now on."""
        record = self._records.get(request_id)
        if record is not None:
            record.polled = False
            record.broken = True
            record.cursor = None
            record.patience = None
            record.tell(cause="internal")
            self._finish(request_id)

    def _finish(self, request_id: str) -> None:
        self._tell(request_id, lambda manager: manager.finish(request_id))

    def _tell(self, subject: Hashable, fact: Callable[[TieringOffloadingManager], T]) -> T | None:
        """The result of a fact that the core must learn; if that fails, None, and it is told again in later steps."""

        def told() -> T:
            with self.stack.driver.step() as manager:
                return fact(manager)

        if not self._owed.holds(subject):
            try:
                return told()
            except Exception as error:
                self.shield.caught("tell", error)
        self._owed.add(subject, told, 0.0)
        return None

    def allocated(self, request: Any, tables: Sequence[Sequence[Any]], tokens: int) -> None:
        """The engine takes `tokens` of the hit and has given the request these blocks, by its group numbers."""
        try:
            self._allocated(request, tables, tokens)
        except Exception as error:
            self.shield.caught("allocated", error)
            self._lost(request.request_id)
            if tokens > 0 and not any(job.request_id == request.request_id for job in self._loads):
                # The engine waits for this request now; it must be told, and told once.
                self._loads.append(CopyJob(NO_JOB, request.request_id, valid=False))

    def _allocated(self, request: Any, tables: Sequence[Sequence[Any]], tokens: int) -> None:
        record = self._records.get(request.request_id)
        if record is None or not record.polled:
            if tokens > 0:
                self._loads.append(CopyJob(NO_JOB, request.request_id, valid=False))
            return
        record.polled = False
        record.waiting_since = None
        with self.stack.driver.step() as manager:
            sources = manager.hit_sources(request.request_id) if tokens > 0 else ()
            plan = manager.take(request.request_id, tokens)
        record.tell(taken=tokens)
        if record.story.hit > tokens and record.story.cause == HIT_CAUSE:
            record.tell(cause="partly_taken" if tokens > 0 else "not_taken")
        if plan is not None:
            self._hand_over(record, plan, tables)
            self._name_sources(record, plan, sources)

    @shielded(lambda: None)
    def _name_sources(self, record: RequestRecord, plan: LoadPlan, sources: HitSources) -> None:
        names = [tier.name for tier in self.stack.tiers]
        record.sources = tokens_by_source(self._layout, plan, sources, names)
        record.tell(sources=tuple(sorted(record.sources.items())))

    def _hand_over(self, record: RequestRecord, plan: LoadPlan, tables: Sequence[Sequence[Any]]) -> None:
        """Queue the load for the ranks; from here on it comes back, whatever happens."""
        job = CopyJob(plan.job_id, plan.request_id, valid=plan.complete)
        self._jobs[plan.job_id] = record
        record.load = plan.job_id
        self._loads.append(job)
        if plan.complete:
            job.valid = False  # until all of it is planned
            job.groups = load_copies(self._shape, plan, tables)
            empty = misses(self._shape, plan, job.groups)
            if empty is not None:
                raise RuntimeError(f"group {empty}: the engine gave no block that the load may fill")
            job.valid = True

    # -- steps

    def build_work(self, output: Any) -> StepWork:
        """What the workers are to do in this step: loads that were taken, and stores of what becomes final in it."""
        work = StepWork(early=self._early, loads=self._loads)
        if self._stores:
            work.fences = self._fences(output)
        self._early, self._loads = [], []
        for job in (*work.early, *work.loads):
            job.groups = list(job.groups)
        state = getattr(output, "kv_connector_block_state", None)
        if state is not None and not self.off:
            for request_id, scheduled in output.num_scheduled_tokens.items():
                self._store_step(request_id, scheduled, state, work)
        self._end_step()
        return work

    def _fences(self, output: Any) -> list[int]:
        """Stores whose blocks this step may write; all of them where that is not known."""
        try:
            fresh = new_owners(output, self._loads)
            return [job for job, sources in self._stores.items() if sources.endangered(fresh)]
        except Exception as error:
            self.shield.caught("fences", error)
            return list(self._stores)

    @shielded(lambda: None)
    def _end_step(self) -> None:
        if len(self._owed):
            self._owed.tell(self.stack.clock.monotonic())
        with self.stack.driver.step() as manager:
            manager.on_schedule_end()

    @shielded(lambda: None)
    def _store_step(self, request_id: str, scheduled: int, state: Any, work: StepWork) -> None:
        """Store what of one request becomes whole and final in this step."""
        record = self._records.get(request_id)
        if record is None or record.cursor is None or record.wishes.off:
            return
        request = record.request
        final = min(int(request.num_computed_tokens) + scheduled, int(request.num_tokens))
        states = self._states(record, state.boundary_state_offloads.get(request_id, ()), final)
        if record.keeps_ends:
            self._keep_end(record, record.cursor, final)
        if final < record.cursor.next_at:
            return
        tables = state.get_block_ids(request_id)
        if tables is not None:
            self._store(record, record.cursor.advance(final), tables, states, work.stores)

    def _keep_end(self, record: RequestRecord, cursor: StoreCursor, final: int) -> None:
        """Keep the newest boundary of what is generated as soon as it is whole.

        Where answers are stored too, nobody knows where they end, and when they have ended a window's older blocks are
        gone.
        """
        span = max(self._layout.tokens_per_chunk)
        mark = final // span * span
        if mark > record.kept:
            record.kept = mark
            cursor.keep(mark)

    def _prompt_boundaries(self, prompt: int) -> list[int]:
        """The boundaries at the end of a prompt that need nothing beyond it."""
        whole = whole_chunks(self._layout, prompt, prompt, finished=True)
        return [int(mark) for mark in joint_boundaries(self._layout, [max(prompt - 1, 0), prompt], whole) if mark > 0]

    def _states(
        self, record: RequestRecord, offers: Iterable[tuple[int, int, int]], final: int
    ) -> Mapping[tuple[int, int], int]:
        """The recurrent states that the engine hands off in this step: (group, chunk) -> block.

        A boundary is kept only if every recurrent group has its state.
        """
        cursor = record.cursor
        if cursor is None or not offers:
            return {}
        numbers = {group.index: g for g, group in enumerate(self._shape.groups) if group.recurrent}
        end = final
        if record.wishes.store == "prompt":
            end = min(end, int(record.request.num_prompt_tokens))
        found: dict[int, dict[int, int]] = {}
        for index, block, boundary in offers:
            g = numbers.get(index)
            if g is not None and block and boundary <= end and boundary % self._layout.tokens_per_chunk[g] == 0:
                found.setdefault(boundary, {})[g] = block
        states = {}
        for boundary, blocks in sorted(found.items()):
            if len(blocks) == len(numbers):
                cursor.keep(boundary)
                for g, block in blocks.items():
                    states[g, boundary // self._layout.tokens_per_chunk[g] - 1] = block
        return states

    def _store(
        self,
        record: RequestRecord,
        chunks: Sequence[Any],
        tables: Sequence[Sequence[int]],
        states: Mapping[tuple[int, int], int],
        out: list[CopyJob],
    ) -> None:
        sources: dict[tuple[int, int], list[int]] = {}
        for g, indices in enumerate(chunks):
            table = tables[self._shape.groups[g].index]
            for chunk in indices.tolist():
                blocks = store_sources(self._shape, g, chunk, table, states)
                if blocks is not None:
                    sources[g, chunk] = blocks
        if not sources:
            return
        tokens = self._layout.tokens_per_chunk
        wanted = sorted(sources, key=lambda at: ((at[1] + 1) * tokens[at[0]], at[0]))
        with self.stack.driver.step() as manager:
            self._extend(manager, record)
            keyed = record.chain.counts
            wanted = [(g, chunk) for g, chunk in wanted if chunk < keyed[g]]
            plan = manager.prepare_store(record.request.request_id, wanted)
        if plan is None:
            return
        try:
            copies = store_copies(plan, lambda g, chunk: sources[g, chunk], len(self._shape.groups))
            self._stores[plan.job_id] = Sources.of(self._shape, copies)
        except Exception:
            for _ in range(self._shape.ranks):  # nobody will copy it: its slots go back
                self._complete_store(plan.job_id, False)
            raise
        out.append(CopyJob(plan.job_id, plan.request_id, copies))

    # -- what comes back

    @shielded(lambda: None)
    def update(self, report: Any) -> None:
        """Reports of all ranks on this step's jobs."""
        if not isinstance(report, StepReport):
            return
        for fault in report.faults:
            _log.warning("kvstrata: %s", fault)
        for load in report.loads:
            self._load_done(load.job_id, load.ok)
        for store in report.stores:
            self._store_done(store.job_id, store.ok)
        self.traffic = self.traffic.aggregate(StepReport([], [], *_sums(report)))

    def _last_report(self, job_id: int) -> bool:
        """Count one rank's report of a job; whether it was the last one."""
        reports = self._reports.get(job_id, 0) + 1
        if reports < self._shape.ranks:
            self._reports[job_id] = reports
            return False
        self._reports.pop(job_id, None)
        return True

    def _load_done(self, job_id: int, ok: bool) -> None:
        if job_id == NO_JOB:
            return
        # Own books first: the engine goes on stepping while a job is in them.
        last = self._last_report(job_id)
        record = self._jobs.pop(job_id, None) if last else None
        if record is not None:
            record.load = None
        used = self._complete_load(job_id, ok)
        if record is None:
            return
        if used:
            for source, tokens in record.sources.items():
                self.hit_tokens[source] = self.hit_tokens.get(source, 0) + tokens
        else:
            record.load_failed = True
            record.tell(cause="load_failed", note="the chunks could not be copied on every rank")

    @shielded(lambda: None)
    def _complete_load(self, job_id: int, ok: bool) -> bool | None:
        return self._tell(("load", job_id), lambda manager: manager.complete_load(job_id, ok))

    def _complete_store(self, job_id: int, ok: bool) -> None:
        self._tell(("store", job_id), lambda manager: manager.complete_store(job_id, ok))

    @shielded(lambda: None)
    def _store_done(self, job_id: int, ok: bool) -> None:
        if self._last_report(job_id):
            self._stores.pop(job_id, None)
        self._complete_store(job_id, ok)

    @property
    def pending(self) -> bool:
        """Whether the engine must go on stepping: a copy was handed out and has not been reported."""
        return bool(self._stores or self._jobs or self._early or self._loads)

    # -- the end of a request

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> None:
        """The request is over, in whatever state; its blocks are given back after this call."""
        record = self._records.pop(request.request_id, None)
        if record is None:
            return
        self._store_rest(record, tables)
        self._leave(record)

    @shielded(lambda: None)
    def _store_rest(self, record: RequestRecord, tables: Sequence[Sequence[int]]) -> None:
        """Store what only now is final: generated tokens' last chunks, and what a drafter might still have written.

        The blocks have no owner any more when the copy is made, but nothing writes them before: it is the first thing
        that the workers do in the next step.
        """
        cursor, request = record.cursor, record.request
        if cursor is None or record.load is not None or record.polled or self.off or not tables:
            return
        if record.wishes.store == "prompt" and not any(group.drafter for group in self._shape.groups):
            return
        final = min(int(request.num_computed_tokens), max(int(request.num_prompt_tokens), int(request.num_tokens) - 1))
        self._store(record, cursor.advance(final, finished=True), tables, {}, self._early)

    @shielded(lambda: None)
    def _leave(self, record: RequestRecord) -> None:
        request_id = record.request.request_id
        if record.load is not None:
            record.tell(cause="aborted_loading")
        elif record.polled and not record.answered:
            record.tell(cause="aborted_waiting")
        elif record.polled and record.story.hit:
            record.tell(cause="aborted_ready")
        self.archive.add(record.story)
        self._finish(request_id)

    def sources_of(self, request_id: str) -> Mapping[str, int]:
        """Tokens of a request's load by the place that they came from."""
        record = self._records.get(request_id)
        return {} if record is None else record.sources

    # -- the whole

    @shielded(lambda: None)
    def greet(self, greetings: Sequence[RankGreeting]) -> None:
        """The ranks have mapped primary; if one has not, kvstrata does nothing."""
        for greeting in greetings:
            expected = tuple(self._shape.rank_bytes(g) for g in range(len(self._shape.groups)))
            if greeting.trouble:
                self.switch_off(f"rank {greeting.rank}: {greeting.trouble}")
            elif greeting.rank_bytes != expected:
                self.switch_off(f"rank {greeting.rank}: its blocks have {greeting.rank_bytes} bytes, not {expected}")
        missing = self._shape.ranks - len(greetings)
        if missing > 0:
            self.switch_off(f"{missing} of {self._shape.ranks} ranks did not report")

    def switch_off(self, why: str) -> None:
        """Stop doing anything for requests; the engine serves on."""
        if not self.off:
            self.off = why
            _log.error("kvstrata is off: %s", why)

    @shielded(lambda: False)
    def reset(self, reason: ResetReason = ResetReason.CONTENT_INVALID) -> bool:
        """Begin a new generation."""
        with self.stack.driver.step() as manager:
            manager.reset_cache(reason)
        return True

    @shielded(dict)
    def gains(self) -> dict[str, float]:
        """What counters have gained since the last call."""
        self._look_for_alarms()
        counters = self.stack.driver.call(lambda manager: manager.counters)
        now = totals(counters, self.traffic, self.shield.total)
        now |= {f"{HIT_TOKENS}.{place}": tokens for place, tokens in self.hit_tokens.items()}
        return self._meter.gains(now)

    def _look_for_alarms(self) -> None:
        """Tell each alarm of the core once. A snapshot of the core goes over all requests: not in every step."""
        now = self.stack.clock.monotonic()
        if now < self._alarms_due:
            return
        self._alarms_due = now + ALARM_PAUSE_S
        for alarm in self.stack.driver.call(lambda manager: manager.statistics()).alarms:
            if alarm.place not in self._alarmed:
                self._alarmed.add(alarm.place)
                _log.warning("kvstrata: %s", alarm.text)

    @shielded(list)
    def events(self) -> list[Any]:
        """Cache events since the last call, as the engine's."""
        found = self.stack.driver.call(lambda manager: manager.take_events())
        return engine_events(self._shape, found) if found else []

    @shielded(lambda: None)
    def close(self) -> None:
        """Drain and give everything back."""
        self.stack.close()


def _sums(report: StepReport) -> tuple[int, float, int, float]:
    return report.load_bytes, report.load_seconds, report.store_bytes, report.store_seconds
