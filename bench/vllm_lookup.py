"""Cost of vLLM's own tiered offloading on the scheduler's thread: lookups of waiting requests, and promotions.

    vllm_lookup.py < ROWS > RESULTS

Imports no kvstrata. To be run by an interpreter that has vLLM; one JSON object per line in and out. A row is
{"groups": [[tokens, "full" | "sliding" | "recurrent", window], ...], "presence", "requests", "tokens", "runs"}.
`kvstrata bench resolve --vs vllm` also loads this file as a module and calls `measure` with its own keys.

Driven are vLLM's tiering manager and the lookup of its connector's scheduler, without an engine: a step is
`get_num_new_matched_tokens` for every waiting request, then the manager's end of the schedule. The tier is a
dictionary without a thread: like vLLM's file-system tier it answers RETRY first and knows at the end of the step.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import resource
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

VERSION = vllm.__version__
CHUNK_BYTES = 64
MOST_STEPS = 200
WAITING_STEPS = 3

PRESENCES = {
    "all": lambda full, i, n, at: True,
    "none": lambda full, i, n, at: False,
    "three-quarters": lambda full, i, n, at: i < n * 3 // 4,
    "window-holes": lambda full, i, n, at: i < n * 3 // 4 if full else i % 3 != 0,
    "windows-in-front": lambda full, i, n, at: full or at < 1024,
}


class Region:
    """Primary's memory."""

    def __init__(self, chunks):
        self.rows = np.zeros((chunks, CHUNK_BYTES), np.uint8)

    def create_kv_memoryview(self):
        return memoryview(self.rows)

    def cleanup(self):
        pass


class DictTier(SecondaryTierManager):
    """Knows which keys it has, pretends to move them. With an executor, lookups and jobs are answered there."""

    medium = Medium.STORAGE

    def __init__(self, view, present, executor=None):
        self.tier_type, self.locality, self._bp_detector = "dict", None, None
        self._block_size_bytes = view.strides[0]
        self.present, self.executor = present, executor
        self.known, self.asked, self.jobs, self.done = {}, [], [], []
        self.loaded = 0
        self.holding = executor is None

    def lookup(self, key, context):
        answer = self.known.get(key)
        if answer is None:
            self.known[key] = LookupResult.RETRY
            self.asked.append(key)
            return LookupResult.RETRY
        return answer

    def on_schedule_end(self, context):
        asked, self.asked = self.asked, []
        if asked and self.executor is not None:
            self.executor.submit(self.answer, asked)
        elif asked:
            self.answer(asked)

    def answer(self, asked):
        for key in asked:
            self.known[key] = LookupResult.HIT if key in self.present else LookupResult.MISS

    def submit_store(self, job):
        raise AssertionError("nothing is stored")

    def submit_load(self, job):
        self.loaded += len(job.keys)
        if self.executor is not None:
            self.executor.submit(self.done.append, JobResult(job_id=job.job_id, success=True))
        else:
            self.jobs.append(job)

    def get_finished_jobs(self):
        if self.executor is not None:
            done = self.done[:]
            del self.done[: len(done)]
            return done
        if self.holding:
            return []
        jobs, self.jobs = self.jobs, []
        return [JobResult(job_id=job.job_id, success=True) for job in jobs]

    def on_new_request(self, context):
        return RequestOffloadingContext()

    def drain_jobs(self):
        pass


class Request:
    """The part of an engine's request that is read."""

    skip_reading_prefix_cache = False
    kv_transfer_params = None

    def __init__(self, name, tokens, hashes):
        self.request_id, self.block_hashes = name, hashes
        self.num_tokens = self.num_prompt_tokens = tokens

    def is_finished(self):
        return False


def hash_tokens(groups):
    return math.gcd(*(tokens for tokens, _, _ in groups))


def group_config(index, tokens, kind, window, per_hash):
    shape = {"block_size": tokens, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    if kind == "full":
        spec = FullAttentionSpec(**shape)
    elif kind == "sliding":
        spec = SlidingWindowSpec(**shape, sliding_window=window)
    else:
        spec = MambaSpec(block_size=tokens, shapes=((64,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
    return offloading.GroupOffloadConfig(
        group_idx=index,
        tokens_per_block=tokens,
        tokens_per_chunk=tokens,
        hashes_per_chunk=tokens // per_hash,
        kv_event_group_spec=None,
        sliding_window_size_in_chunks=offloading.get_sliding_window_size_in_chunks(spec, tokens),
        kv_cache_spec=spec,
        manager_cls=KVCacheSpecRegistry.get_manager_class(spec),
    )


def scheduler_of(configs, per_hash, manager):
    """The connector's scheduler with what its lookup reads; its constructor wants a whole engine."""
    side = offloading.OffloadingConnectorScheduler.__new__(offloading.OffloadingConnectorScheduler)
    side.config = offloading.SchedulerOffloadConfig(
        kv_group_configs=tuple(configs),
        blocks_per_chunk=1,
        tokens_per_hash=per_hash,
        num_workers=1,
        offload_prompt_only=True,
        supports_partial_tail=False,
    )
    side.manager = manager
    side._connector_stats = offloading.OffloadingConnectorStats()
    windows = {i: config.sliding_window_size_in_chunks for i, config in enumerate(configs)}
    side._full_attention_groups = tuple(i for i, window in windows.items() if window is None)
    bounded = [i for i, window in windows.items() if window is not None]
    side._sliding_window_groups = tuple(sorted(bounded, key=lambda i: windows[i], reverse=True))
    side._lookup_groups = side._full_attention_groups + side._sliding_window_groups
    recurrent = [config.tokens_per_chunk for config in configs if isinstance(config.kv_cache_spec, MambaSpec)]
    side._mamba_align_size = recurrent[0] if recurrent else None
    side._partial_tail_block_size = 0
    side._chunks_being_loaded, side._req_status, side._jobs = set(), {}, {}
    side._events_tracker = types.SimpleNamespace(record_lookup=lambda *_: None)
    return side


class Engine:
    """The scheduler's thread: polls what waits, ends the step, and is timed."""

    def __init__(self, groups, hashes, present, tokens, executor=None):
        per_hash = hash_tokens(groups)
        self.configs = [group_config(i, *group, per_hash) for i, group in enumerate(groups)]
        self.keys = len(hashes) * sum(tokens // group[0] for group in groups)
        primary = CPUPrimaryTierOffloadingManager(num_chunks=self.keys + 64, mmap_region=Region(self.keys + 64))
        self.tier = DictTier(primary.get_kv_memoryview(), present, executor)
        self.manager = TieringOffloadingManager(primary, [self.tier])
        self.side = scheduler_of(self.configs, per_hash, self.manager)
        self.waiting = []
        for i, chain in enumerate(hashes):
            request = Request(f"r{i}", tokens, chain)
            context = ReqContext(req_id=request.request_id)
            status = offloading.RequestOffloadState(
                config=self.side.config,
                req=request,
                req_context=context,
                offloading_context=self.manager.on_new_request(context),
            )
            status.update_offload_keys()
            self.side._req_status[request.request_id] = status
            self.waiting.append(request)
        self.requests = list(self.waiting)
        self.hits = {}
        self.spent_s = self.cpu_s = 0.0

    def step(self, requests):
        ask = self.side.get_num_new_matched_tokens
        cpu, began = cpu_s(), time.perf_counter()
        answers = [ask(request, 0)[0] for request in requests]
        self.manager.on_schedule_end(ScheduleEndContext([], []))
        took = time.perf_counter() - began
        self.spent_s += took
        self.cpu_s += cpu_s() - cpu
        for request, hit in zip(requests, answers, strict=True):
            if hit is not None:
                self.hits[request.request_id] = hit
        return took

    def step_waiting(self):
        took = self.step(self.waiting)
        self.waiting = [request for request in self.waiting if request.request_id not in self.hits]
        return took

    def consumed(self):
        """Chunks that loads of these hits take, as the connector's scheduler counts them."""
        chunks = 0
        for hit in self.hits.values():
            for config in self.configs if hit else ():
                end = -(-hit // config.tokens_per_chunk)
                window = config.load_window_size_in_chunks(hit)
                chunks += end if window is None else min(end, window)
        return chunks


def cpu_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(groups, hashes, present, tokens):
    """One run: seconds of the scheduler's thread, and what was moved."""
    engine = Engine(groups, hashes, present, tokens)
    gc.collect()
    steps, asked, quiet = [], -1, False
    while engine.waiting and not quiet and len(steps) < MOST_STEPS:
        before = (len(engine.tier.known), engine.tier.loaded)
        spent, cpu = engine.spent_s, engine.cpu_s
        steps.append(engine.step_waiting())
        quiet = engine.waiting and len(steps) > 1 and before == (len(engine.tier.known), engine.tier.loaded)
    if quiet:  # the last one found nothing to do: it was a waiting step
        del steps[-1]
        engine.spent_s, engine.cpu_s = spent, cpu
    submit_s, submit_cpu = engine.spent_s, engine.cpu_s
    names = engine.waiting or engine.requests
    step_s = min(engine.step(names) for _ in range(WAITING_STEPS))
    engine.spent_s = engine.cpu_s = 0.0
    engine.tier.holding = False
    for _ in range(MOST_STEPS):
        if not engine.waiting:
            break
        engine.step_waiting()
    if engine.waiting:
        raise RuntimeError(f"{len(engine.waiting)} requests have no answer after {MOST_STEPS} steps")
    asked = len(engine.tier.known)
    return {
        "submit_s": submit_s,
        "step_s": step_s,
        "promoted": engine.tier.loaded,
        "consumed": engine.consumed(),
        "probed": asked,
        "first_s": steps[0],
        "fetch_s": steps[-1],
        "ready_s": submit_s + engine.spent_s,
        "cpu_s": submit_cpu + engine.cpu_s,
    }


def measure_with_threads(groups, hashes, present, tokens, pause_s=0.001):
    """One run whose tier answers on a thread of its own; the scheduler's thread steps every `pause_s`."""
    with ThreadPoolExecutor(1) as executor:
        engine = Engine(groups, hashes, present, tokens, executor)
        gc.collect()
        cpu, steps = cpu_s(), 0
        while engine.waiting and steps < 10_000:
            engine.step_waiting()
            steps += 1
            if engine.waiting:
                time.sleep(pause_s)
        cpu = cpu_s() - cpu
    consumed = -1 if engine.waiting else engine.consumed()
    return {
        "ready_s": engine.spent_s,
        "steps": steps,
        "cpu_s": cpu,
        "promoted": engine.tier.loaded,
        "consumed": consumed,
    }


def prompts(groups, presence, requests, tokens):
    """Block hashes per request, and the keys that the tier has."""
    per_hash, here = hash_tokens(groups), PRESENCES[presence]
    hashes, present = [], set()
    for request in range(requests):
        chain = [hashlib.sha256(b"%d:%d" % (request, i)).digest() for i in range(tokens // per_hash)]
        hashes.append(chain)
        for g, (size, kind, _) in enumerate(groups):
            count = tokens // size
            for i in range(count):
                if here(kind == "full", i, count, i * size):
                    present.add(make_offload_key(chain[(i + 1) * (size // per_hash) - 1], g))
    return hashes, present


def best(runs):
    """Each figure's best."""
    return {name: min(run[name] for run in runs) for name in runs[0]} | {"runs": len(runs)}


def main():
    gc.collect()
    gc.freeze()  # as engines do once they are loaded
    last, made = None, ([], set())
    for line in sys.stdin:
        row = json.loads(line)
        try:
            asked = (row["groups"], row["presence"], row["requests"], row["tokens"])
            if asked != last:
                last, made = None, ([], set())
                last, made = asked, prompts(*asked)
            hashes, present = made
            runs = [measure(row["groups"], hashes, present, row["tokens"]) for _ in range(row["runs"])]
            answer = best(runs) | {"version": VERSION}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
