"""The simulated engine: continuous batching over paged memory, driven through the real scheduler and worker sides.

A step is what an engine's step is: running requests get tokens (prefill in pieces, then one by one), waiting ones are
asked about, the step's work goes to every rank, blocks are written, copies begin, reports come back one or more steps
later. Blocks are overwritten as soon as the engine may; what a computation reads is checked byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvstrata.integrations.vllm.metadata import StepReport, StepWork
from kvstrata.integrations.vllm.scheduler import SchedulerSide
from kvstrata.integrations.vllm.shapes import EngineShape
from kvstrata.integrations.vllm.worker import WorkerSide
from kvstrata.testing.choices import Choices
from kvstrata.testing.oracle import consumed_by
from kvstrata.testing.simulation.content import Content
from kvstrata.testing.simulation.faults import Faults
from kvstrata.testing.simulation.memory import NULL, Memory, Pool
from kvstrata.testing.world_checks import demand


@dataclass(slots=True, eq=False)
class SimRequest:
    """One request, with the attributes that kvstrata reads of an engine's request."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    output: int
    kv_transfer_params: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool = False
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    tables: list[list[int]] = field(default_factory=list)
    state: str = "waiting"
    """waiting, loading, running; gone: aborted while its load is under way."""
    least: int = 0
    """Tokens that it had itself when its load began."""
    boundary: int = 0
    received: int = 0
    failed: bool = False
    told: bool = False
    """It has been answered since it was last let in."""
    shut_out: bool = False
    """There were too few blocks to let it in when that was tried last."""
    stale: bool = False
    """The engine flushed its cache while the load was under way: what comes is not used."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it has now."""
        return len(self.tokens)


class SimEngine:
    """One engine with its ranks. `connect` makes the two sides of the connector; they die with the engine."""

    def __init__(
        self, shape: EngineShape, content: Content, faults: Faults, choices: Choices, *, blocks: int, budget: int,
        lag: int, most: int, caches: bool, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.shape, self.content, self.faults, self.choices = shape, content, faults, choices
        self.memory = Memory(shape, content, blocks)
        self.pool = Pool(shape, blocks)
        self.layout = shape.layout()
        self.budget, self.lag, self.most, self.caches = budget, lag, most, caches
        self.waiting: list[SimRequest] = []
        self.running: list[SimRequest] = []
        self.requests: dict[str, SimRequest] = {}
        self.leaving: dict[str, SimRequest] = {}
        """Aborted requests whose load is under way: their blocks are still being written."""
        self.finished = 0
        self.events = 0
        """Forward passes of a request."""
        self.computed_tokens = 0
        self.loaded_tokens = 0
        self.on_finish: Callable[[SimRequest], None] = lambda request: None
        self.scheduler: SchedulerSide
        self.workers: Sequence[WorkerSide]
        self._say = say
        self._reports: list[tuple[int, list[tuple[set[str], set[str]]], list[StepReport | None]]] = []
        self._steps = 0
        self._moves = [g.recurrent and g.kind.parameters.get("mode") == "align" for g in shape.groups]
        """Which groups keep one state that moves on."""
        self._aligned = [
            group.tokens_per_block * shape.blocks_per_chunk
            for group, moves in zip(shape.groups, self._moves, strict=True) if moves
        ]  # fmt: skip

    # -- requests

    def hash_up(self, request: SimRequest) -> None:
        """Hash the tokens that became whole, and note what their chunks must hold."""
        per, hashes = self.shape.tokens_per_hash, request.block_hashes
        before = len(hashes)
        for at in range(len(hashes) * per, len(request.tokens) - per + 1, per):
            hashes.append(self.content.next_hash(hashes[-1] if hashes else b"", request.tokens[at : at + per]))
        if len(hashes) != before:
            self.content.note(hashes, before)

    def add(self, request: SimRequest) -> None:
        """A new request."""
        self.hash_up(request)
        request.tables = [[] for _ in self.shape.groups]
        self.requests[request.request_id] = request
        self.waiting.append(request)
        tokens = f"{request.num_prompt_tokens} + {request.output} tokens"
        self._say(f"new {request.request_id}: {tokens} {request.kv_transfer_params}")
        self.scheduler.new_request(request)

    def abort(self, request: SimRequest) -> None:
        """A client gives up, in whatever state its request is."""
        self._say(f"abort {request.request_id} ({request.state})")
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
        self._leave(request)

    def _leave(self, request: SimRequest) -> None:
        loading = request.state == "loading"
        if request.state == "running":
            self._settle_drafters(request)
        self.scheduler.finished(request, request.tables if any(request.tables) else ())
        del self.requests[request.request_id]
        if loading:
            request.state = "gone"
            self.leaving[request.request_id] = request
        else:
            self._free(request)

    def _settle_drafters(self, request: SimRequest) -> None:
        """No token follows: a drafter's newest block is final now."""
        for g, group in enumerate(self.shape.groups):
            at = request.num_computed_tokens
            if group.drafter and at % group.tokens_per_block == 0 and at:
                self._write(request, g, at // group.tokens_per_block - 1, whole=True)

    def _free(self, request: SimRequest) -> None:
        for table in request.tables:
            self.pool.give(list(reversed(table)))
            table.clear()

    def preempt(self, request: SimRequest) -> None:
        """Its blocks are needed, or the engine flushes its cache."""
        self._say(f"preempt {request.request_id}")
        self._free(request)
        self.running.remove(request)
        request.num_computed_tokens, request.state = 0, "waiting"
        self.waiting.insert(0, request)

    def flush(self) -> None:
        """What was computed so far is not valid any more (weights changed): everything begins anew."""
        for request in list(reversed(self.running)):
            self.preempt(request)
        for request in self.requests.values():
            if request.state == "loading":
                request.stale = True
            elif any(request.tables):
                self._free(request)
                request.num_computed_tokens = 0
        self.pool.clear()

    # -- a step

    def step(self) -> None:
        """Schedule, tell the ranks, compute, let reports come back."""
        self._steps += 1
        scheduled: dict[str, int] = {}
        fresh: list[Any] = []
        grown: list[Any] = []
        budget = self._schedule_running(scheduled, grown)
        self._schedule_waiting(scheduled, fresh, budget)
        offers = self._offers(scheduled)
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            scheduled_new_reqs=fresh,
            scheduled_cached_reqs=SimpleNamespace(new_block_ids=grown),
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads=offers, get_block_ids=self._block_ids),
        )
        work = self.scheduler.build_work(output)
        self._say(
            f"step {self._steps}: {scheduled}, loads {len(work.loads)}, stores {len(work.stores)}, fences {work.fences}"
        )
        self._execute(work, scheduled, [*fresh_blocks(fresh), *grown_blocks(grown)])
        self._advance(scheduled)
        self.receive()

    def _block_ids(self, name: str) -> tuple[tuple[int, ...], ...] | None:
        return tuple(map(tuple, self.requests[name].tables)) if name in self.requests else None

    def _execute(self, work: StepWork, scheduled: dict[str, int], handed: Sequence[int]) -> None:
        for worker in self.workers:
            worker.before_forward(work)
        self.memory.scribble(handed, 0xAA)
        for name, tokens in scheduled.items():
            self._forward(self.requests[name], tokens)
        for worker in self.workers:
            worker.start_loads(work)
            worker.after_forward(work)

    def collect(self) -> None:
        """The ranks say what has ended; it reaches the scheduler some steps later."""
        results = [worker.results() for worker in self.workers]
        reports = [worker.report() for worker in self.workers]
        self._reports.append((self._steps + self.lag, results, reports))

    def receive(self) -> None:
        """Reports of the ranks that are due reach the scheduler."""
        self.collect()
        while self._reports and self._reports[0][0] <= self._steps:
            _, results, reports = self._reports.pop(0)
            told = [report for report in reports if report is not None]
            if told:
                whole = told[0]
                for report in told[1:]:
                    whole = whole.aggregate(report)
                self.scheduler.update(whole)
            for received, failed in results:
                for name in sorted(received):
                    self._received(name, failed=name in failed)

    def _received(self, name: str, *, failed: bool) -> None:
        request = self.requests.get(name) or self.leaving.get(name)
        demand(request is not None, f"{name}: a load is reported that the engine does not know; that kills it")
        if request is None:
            return
        demand(request.state in ("loading", "gone"), f"{name}: a load is reported in state {request.state}")
        request.received += 1
        request.failed |= failed
        demand(request.received <= len(self.workers), f"{name}: a rank reports its load twice")
        if request.received < len(self.workers):
            return
        if request.state == "gone":
            del self.leaving[name]
            self._free(request)
            return
        request.state, request.received = "waiting", 0
        self._loaded(request)

    def _loaded(self, request: SimRequest) -> None:
        failed, request.failed = request.failed, False
        if request.stale:
            request.stale = False
            self._free(request)
            request.num_computed_tokens = 0
            return
        if failed:
            self._say(f"load of {request.request_id} failed")
            request.num_computed_tokens = request.least
            if not self.layout.all_full:  # windows got blocks only for what they reach from the boundary
                self._free(request)
                request.num_computed_tokens = 0
            return
        for g, group in enumerate(self.layout.groups):
            tokens = self.shape.groups[g].tokens_per_block
            for i in consumed_by(group, tokens, request.least, request.boundary) or ():
                self.memory.demand_right(
                    f"{request.request_id} was loaded", g, self._block(request, g, i), self._hash(request, g, i)
                )
        request.num_computed_tokens = min(request.boundary, request.num_tokens - 1)
        self.loaded_tokens += request.num_computed_tokens - request.least
        self._say(f"load of {request.request_id} up to {request.boundary}")
        self._cache(request)

    def _block(self, request: SimRequest, g: int, i: int) -> int:
        table = request.tables[g]
        return table[i] if i < len(table) else NULL

    def _hash(self, request: SimRequest, g: int, i: int) -> bytes:
        per = self.shape.groups[g].tokens_per_block // self.shape.tokens_per_hash
        return request.block_hashes[(i + 1) * per - 1]

    # -- scheduling

    def _schedule_running(self, scheduled: dict[str, int], grown: list[Any]) -> int:
        budget = self.budget
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            tokens = self._piece(request, budget)
            while (more := self._grow(request, request.num_computed_tokens + tokens)) is None:
                if self.running == [request]:
                    if self._make_way(request):
                        continue
                    if self._loading:
                        break  # what is being loaded can give way once it has landed
                victim = self.running[-1]
                self.preempt(victim)
                if victim is request:
                    break
            if more is not None:
                scheduled[request.request_id] = tokens
                grown.append(more)
                budget -= tokens
        return budget

    def _piece(self, request: SimRequest, budget: int) -> int:
        """How many tokens are computed next; recurrent states are handed off at the end of a piece only."""
        tokens = min(request.num_tokens - request.num_computed_tokens, budget)
        for size in self._aligned:
            tokens = min(tokens, size - request.num_computed_tokens % size)
        return max(tokens, 1)

    def _schedule_waiting(self, scheduled: dict[str, int], fresh: list[Any], budget: int) -> None:
        blocked = False
        for request in list(self.waiting):
            if request.state != "waiting" or request not in self.waiting:
                continue
            if budget <= 0:
                return
            if request.num_computed_tokens == 0 and not any(request.tables):
                if len(self.running) + self._loading >= self.most:
                    # An engine may look through its whole queue before it admits anybody.
                    if not request.told or self.choices.below(6) == 5:
                        request.told = self._ask(request) is not None
                    continue
                request.shut_out = blocked or not self._admit(request)
                if request.shut_out:
                    blocked = True  # nobody behind it is let in; those that were loaded go on
                    continue
                if request.state == "loading" or not any(request.tables):
                    continue  # its load is under way, or it waits for an answer
            if len(self.running) >= self.most:
                continue
            tokens = self._piece(request, budget)
            had = [list(table) for table in request.tables]
            if self._grow(request, request.num_computed_tokens + tokens) is None:
                if not scheduled and not self.running:
                    self._make_way(request)
                return
            self.waiting.remove(request)
            request.state = "running"
            self.running.append(request)
            scheduled[request.request_id] = tokens
            new = [[b for b in table if b and b not in old] for table, old in zip(request.tables, had, strict=True)]
            fresh.append(SimpleNamespace(block_ids=request.tables, fresh=new))
            budget -= tokens

    def _make_way(self, asking: SimRequest) -> bool:
        """The youngest of those that were loaded and wait gives its blocks back; it is asked about again."""
        # Never an older one than who asks, nor that one itself unless somebody older waits to be let in: else two that
        # do not fit side by side would give way to each other for ever.
        at = self.waiting.index(asking) if asking in self.waiting else 0
        shut_out = any(request.state == "waiting" and request.shut_out for request in self.waiting[:at])
        for request in reversed(self.waiting):
            if request is asking and not shut_out:
                return False
            if request.state == "waiting" and any(request.tables):
                self._free(request)
                request.num_computed_tokens = 0
                return True
        return False

    @property
    def _loading(self) -> int:
        return sum(request.state == "loading" for request in self.requests.values()) + len(self.leaving)

    def _ask(self, request: SimRequest) -> int | None:
        return self._matched(request, self._computed(request))

    def _matched(self, request: SimRequest, computed: int) -> int | None:
        hit, asynchronous = self.scheduler.matched(request, computed)
        demand(
            hit is None or asynchronous == (hit > 0), f"{request.request_id}: a hit of {hit} that is not asynchronous"
        )
        return hit

    def _computed(self, request: SimRequest) -> int:
        if request.skip_reading_prefix_cache or not self.caches:
            return 0
        return self.pool.computed(request.block_hashes, request.num_tokens)

    def _admit(self, request: SimRequest) -> bool:
        """Ask, and let it in; False if it has to wait for blocks, and everybody behind it too."""
        computed = self._computed(request)
        hit = self._matched(request, computed)
        if hit is None:
            return True
        request.told = False
        tokens = hit
        if hit and self.faults.meets(self.choices, ("part taken",)):
            tokens = self.choices.pick((0, self.choices.below(hit + 1)))
            self.faults.strike("part taken")
        if not self._allot(request, computed, computed + tokens):
            return False
        shown = [[self.pool.shown(block) for block in table] for table in request.tables]
        self.scheduler.allocated(request, shown, tokens)
        request.num_computed_tokens = request.least = computed
        request.boundary = computed + tokens
        self._say(f"admit {request.request_id}: {computed} own, {tokens} of {hit} taken")
        if tokens:
            request.state = "loading"
        return True

    def _allot(self, request: SimRequest, computed: int, boundary: int) -> bool:
        """Blocks found in the own cache, and new ones for what is loaded; windows get only what they reach."""
        tables: list[list[int]] = []
        need = 0
        for g, group in enumerate(self.shape.groups):
            size = group.tokens_per_block
            held = set(consumed_by(self.layout.groups[g], size, 0, computed) or ()) if computed else set()
            fill = (
                set(consumed_by(self.layout.groups[g], size, computed, boundary) or ())
                if boundary > computed
                else set()
            )
            table = [NULL] * (-(-boundary // size) if boundary > computed else -(-computed // size))
            for i in held:
                table[i] = self.pool.cached[(g, self._hash(request, g, i))]
            for i in fill:
                if table[i] == NULL:
                    table[i] = -1
                    need += 1
            tables.append(table)
        kept = {block for table in tables for block in table if block > 0}
        if need > len(self.pool.free) - sum(block in self.pool.free for block in kept):
            return False
        for table in tables:
            for block in table:
                if block > 0:
                    self.pool.refer(block)
        for table in tables:
            for i, block in enumerate(table):
                if block < 0:
                    table[i] = (self.pool.take(1) or [NULL])[0]
        request.tables = tables
        if not boundary:
            request.tables = [[] for _ in self.shape.groups]
            return self._grow(request, min(request.num_tokens, 1)) is not None
        return True

    def _grow(self, request: SimRequest, end: int) -> list[list[int]] | None:
        """Blocks for tokens up to `end`; what windows have left behind goes back. None if there are too few."""
        plans, need = [], 0
        for g, group in enumerate(self.shape.groups):
            size, table = group.tokens_per_block, request.tables[g]
            count = -(-end // size)
            if group.recurrent:
                wanted = [] if self._moves[g] and any(table) else list(range(len(table), count))
                if self._moves[g]:
                    wanted = wanted[-1:]
            else:
                wanted = list(range(len(table), count))
            plans.append((count, wanted))
            need += len(wanted)
        self._drop_left_behind(request)
        blocks = self.pool.take(need)
        if blocks is None:
            return None
        new: list[list[int]] = []
        for g, (count, wanted) in enumerate(plans):
            table = request.tables[g]
            if self._moves[g] and any(table) and count > len(table):
                block = table[-1]  # the state moves on in its block
                table[-1] = NULL
                table.extend([NULL] * (count - len(table)))
                table[-1] = block
            table.extend([NULL] * (count - len(table)))
            own = []
            for i in wanted:
                table[i] = blocks.pop()
                own.append(table[i])
            new.append(own)
        return new

    def _drop_left_behind(self, request: SimRequest) -> None:
        at = request.num_computed_tokens
        for g, group in enumerate(self.shape.groups):
            values = group.kind.parameters
            match group.kind.name:
                case "sliding_window":
                    begin = at - (int(values["window"]) - 1) - int(values["retained_extra_tokens"])
                case "chunked_local":
                    begin = at // int(values["chunk_tokens"]) * int(values["chunk_tokens"])
                case _:
                    continue
            table = request.tables[g]
            gone = [i for i in range(min(max(begin, 0) // group.tokens_per_block, len(table))) if table[i] != NULL]
            self.pool.give([table[i] for i in gone])
            for i in gone:
                table[i] = NULL

    def _offers(self, scheduled: dict[str, int]) -> dict[str, list[tuple[int, int, int]]]:
        """States that are whole at the end of this step, by request: (group, block, boundary)."""
        offers: dict[str, list[tuple[int, int, int]]] = {}
        for name, tokens in scheduled.items() if self._aligned else ():
            request = self.requests[name]
            end = request.num_computed_tokens + tokens
            for g, group in enumerate(self.shape.groups):
                if self._moves[g] and end % group.tokens_per_block == 0:
                    offers.setdefault(name, []).append((group.index, request.tables[g][-1], end))
        return offers

    # -- computing

    def _forward(self, request: SimRequest, tokens: int) -> None:
        """Read what attention reaches, write what is computed."""
        begin, end = request.num_computed_tokens, request.num_computed_tokens + tokens
        self.computed_tokens += tokens
        self.events += 1
        for g, group in enumerate(self.shape.groups):
            size, table = group.tokens_per_block, request.tables[g]
            for i in consumed_by(self.layout.groups[g], size, 0, begin) or () if begin else ():
                if (i + 1) * size <= begin and not (group.drafter and (i + 1) * size == begin):
                    block = table[-1] if self._moves[g] else table[i]
                    self.memory.demand_right(f"{request.request_id} computes", g, block, self._hash(request, g, i))
            if group.recurrent and self._moves[g]:
                self._write_state(request, g, end)
                continue
            for i in range(begin // size, -(-end // size)):
                whole = (i + 1) * size <= end and not (group.drafter and (i + 1) * size == end)
                self._write(request, g, i, whole=whole)
            if group.drafter and begin % size == 0 and begin:
                self._write(request, g, begin // size - 1, whole=True)

    def _write(self, request: SimRequest, g: int, i: int, *, whole: bool) -> None:
        block = request.tables[g][i]
        if block == NULL:
            return
        if self.pool.names.get(block):  # its own newest block, loaded and cached whole: the same bytes again
            return
        if whole:
            self.memory.compute(g, block, self._hash(request, g, i))
        else:
            self.memory.scribble([block], 0xBB)

    def _write_state(self, request: SimRequest, g: int, end: int) -> None:
        block, size = request.tables[g][-1], self.shape.groups[g].tokens_per_block
        if end % size == 0:
            self.memory.compute(g, block, self._hash(request, g, end // size - 1))
        else:
            self.memory.scribble([block], 0xCC)

    def _advance(self, scheduled: dict[str, int]) -> None:
        for name, tokens in scheduled.items():
            request = self.requests[name]
            request.num_computed_tokens += tokens
            self._cache(request)
            if request.num_computed_tokens < request.num_tokens:
                continue
            request.tokens.append(self.next_token(request))
            self.hash_up(request)
            if request.num_tokens >= request.num_prompt_tokens + request.output:
                self.end(request)

    def next_token(self, request: SimRequest) -> int:
        """The model's next token: decided by the prompt, so that two runs of a prompt share it."""
        return (request.tokens[-1] * 31 + len(request.tokens)) % 1009

    def end(self, request: SimRequest) -> None:
        """It is done."""
        self._say(f"end {request.request_id}")
        self.running.remove(request)
        self.on_finish(request)
        self.finished += 1
        self._leave(request)

    def _cache(self, request: SimRequest) -> None:
        """Whole blocks are found by their hash from now on; a moving state and a drafter's newest block are not."""
        if not self.caches:
            return
        at = request.num_computed_tokens
        for g, group in enumerate(self.shape.groups):
            if self._moves[g] or group.drafter:
                continue
            table, size = request.tables[g], group.tokens_per_block
            for i in range(min(at // size, len(table))):
                if table[i] != NULL and table[i] not in self.pool.names:
                    self.pool.cache(g, table[i], self._hash(request, g, i))

    @property
    def idle(self) -> bool:
        """Whether nobody is served and no copy is under way."""
        return not (self.requests or self.leaving or self.scheduler.pending or self._reports_owed)

    @property
    def _reports_owed(self) -> bool:
        return any(
            any(received for received, _ in results) or any(report is not None for report in reports)
            for _, results, reports in self._reports
        )


def fresh_blocks(fresh: Sequence[Any]) -> list[int]:
    """Blocks that requests scheduled for the first time have got in this step."""
    return [block for one in fresh for table in one.fresh for block in table]


def grown_blocks(grown: Sequence[Any]) -> list[int]:
    """Blocks that running requests have got in this step."""
    return [block for tables in grown for table in tables for block in table]
