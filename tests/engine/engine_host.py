"""A process that holds one real engine and does what it is told: one JSON command a line in, one answer a line out.

    python engine_host.py COMMANDS_FD ANSWERS_FD

Tests start it by `engine_kit.Engine`. The engine runs in this process, so that commands can look into it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from kvstrata.runtime.executor import Signal

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling the sampler takes longer than most tests


class Host:
    """The engine and the commands on it."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.numbers = 0
        self.undo: list[Callable[[], None]] = []
        self.heard_events: list[list[Any]] = []

    # -- life

    def start(self, model: str, extra: dict[str, Any] | None, options: dict[str, Any]) -> dict[str, Any]:
        """Start the engine; without `extra` it has no connector."""
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig

        sabotage = options.pop("sabotage", None)
        if sabotage is not None:
            self.call("engine_sabotage", sabotage, {})
        transfer = None
        if extra is not None:
            transfer = KVTransferConfig(
                kv_connector=options.pop("connector", "KVStrataConnector"),
                kv_role="kv_both",
                kv_connector_extra_config=extra,
                engine_id=options.pop("engine_id"),
            )
        settings = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 4096,
            "max_num_batched_tokens": 2048,
            "enable_prefix_caching": True,
            "dtype": "float32",
            "seed": 0,
            "disable_log_stats": False,
            **options,
        }
        if "kv_events_config" in settings:
            settings["kv_events_config"] = KVEventsConfig(**settings["kv_events_config"])
        self.llm = LLM(model, kv_transfer_config=transfer, **settings)
        return {"policy": None if transfer is None else self.scheduler.recompute_kv_load_failures}

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def side(self) -> Any:
        return self.scheduler.connector.scheduler_side

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        return get_kv_transfer_group().worker_side if has_kv_transfer_group() else None

    def stop(self) -> None:
        """End the engine in order."""
        self.llm.llm_engine.engine_core.shutdown()

    # -- requests

    def _sampling(self, tokens: int, logprobs: int | None, params: dict[str, Any] | None) -> Any:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": params} if params else None
        return SamplingParams(
            max_tokens=tokens, temperature=0, detokenize=False, logprobs=logprobs, ignore_eos=True, extra_args=extra
        )

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int = 8,
        logprobs: int | None = 3,
        params: dict[str, Any] | None = None,
        salt: str | None = None,
    ) -> list[dict[str, Any]]:
        """Serve the prompts together."""
        from vllm import TokensPrompt

        asked = []
        for prompt in prompts:
            asked.append(TokensPrompt(prompt_token_ids=prompt))
            if salt is not None:
                asked[-1]["cache_salt"] = salt
        outs = self.llm.generate(asked, self._sampling(tokens, logprobs, params), use_tqdm=False)
        return [self._answer(out) for out in outs]

    @staticmethod
    def _answer(out: Any) -> dict[str, Any]:
        best = out.outputs[0]
        chosen, margins = [], []
        for token, table in zip(best.token_ids, best.logprobs or (), strict=False):
            chosen.append(table[token].logprob)
            ordered = sorted((entry.logprob for entry in table.values()), reverse=True)
            margins.append(ordered[0] - ordered[1])
        return {
            "tokens": list(best.token_ids),
            "logprobs": chosen,
            "margins": margins,
            "cached": out.num_cached_tokens,
            "reason": best.finish_reason,
        }

    def add(self, prompt: list[int], tokens: int = 8, logprobs: int | None = None) -> str:
        """Hand in a request without stepping."""
        from vllm import TokensPrompt

        self.numbers += 1
        name = f"own-{self.numbers}"
        self.llm.llm_engine.add_request(
            name, TokensPrompt(prompt_token_ids=prompt), self._sampling(tokens, logprobs, None)
        )
        return name

    def step(self, times: int = 1) -> list[str]:
        """Step the engine; returns the requests that ended."""
        ended = []
        for _ in range(times):
            for out in self.llm.llm_engine.step():
                if out.finished:
                    ended.append(out.request_id)
        return ended

    def run_out(self) -> int:
        """Step until nothing is left; returns the steps."""
        count = 0
        while self.llm.llm_engine.has_unfinished_requests() or self.scheduler.has_requests():
            self.llm.llm_engine.step()
            count += 1
            if count > 100_000:
                raise RuntimeError("the engine does not come to an end")
        return count

    def abort(self, names: list[str]) -> None:
        """Abort requests."""
        self.llm.llm_engine.abort_request(names)

    def reset(self, connector: bool = False) -> bool:
        """Empty the engine's own cache."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    # -- looking

    def look(self) -> dict[str, Any]:
        """Counters, pins, free blocks, faults."""
        side = self.side
        stats = side.stack.driver.call(lambda manager: manager.statistics())
        counters = stats.counters
        side.stack.driver.call(lambda manager: manager.check())
        names = (
            "stored",
            "promoted",
            "consumed",
            "loads",
            "loaded",
            "load_failures",
            "evicted",
            "not_taken",
            "cancelled",
            "expired",
            "failed",
            "late",
            "clock_expired",
        )
        return {
            **{name: getattr(counters, name) for name in names},
            "pinned": stats.primary.pinned_bytes,
            "reserved": stats.primary.reserved_bytes,
            "quarantined": stats.primary.quarantined_bytes,
            "requests": stats.requests,
            "jobs": stats.jobs,
            "tiers": {
                name: {
                    "promoted": tier.promoted,
                    "cascaded": tier.cascaded,
                    "failed": {str(cause): count for cause, count in tier.failed.items()},
                }
                for name, tier in stats.tiers.items()
            },
            "free_blocks": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "faults": self.faults(),
            "off": side.off,
            "troubles": side.stack.troubles,
            "pending": side.pending,
            "preemptions": sum(r.num_preemptions for r in self.scheduler.requests.values()),
        }

    def faults(self) -> dict[str, int]:
        """Everything that was caught, by place; workers in other processes log theirs."""
        shields = [self.side.shield, self.scheduler.connector.shield]
        if self.worker is not None:
            shields.append(self.worker.shield)
        return {place: count for shield in shields for place, count in shield.faults.items()}

    def stories(self, last: int = 1) -> list[dict[str, Any]]:
        """The last records."""
        return [{name: getattr(story, name) for name in story.__slots__} for story in self.side.archive.all()[-last:]]

    def groups(self) -> list[dict[str, Any]]:
        """The groups as kvstrata sees them."""
        return [
            {"kind": group.kind.name, "tokens": group.tokens_per_block, "bytes": group.block_bytes}
            for group in self.side._shape.groups
        ]

    def metrics(self) -> dict[str, float]:
        """Our counters in vLLM's own metrics."""
        return {m.name: m.value for m in self.llm.get_metrics() if m.name.startswith("vllm:kvstrata") and m.value}

    def sources(self) -> dict[str, float]:
        """vLLM's own count of cached prompt tokens by the place that they came from."""
        name = "vllm:prompt_tokens_cached_by_source"
        return {m.labels["source"]: m.value for m in self.llm.get_metrics() if m.name == name}

    def listen(self) -> None:
        """From now on keep what the engine's publisher of cache events is given."""
        publisher = self.scheduler.kv_event_publisher
        publish = publisher.publish

        def heard(batch: Any) -> None:
            for event in batch.events:
                hashes = list(getattr(event, "block_hashes", ()))
                group = getattr(event, "group_idx", None)
                self.heard_events.append([type(event).__name__, getattr(event, "medium", None), group, hashes])
            publish(batch)

        publisher.publish = heard

    def heard(self) -> list[list[Any]]:
        """What was published since the last call."""
        events, self.heard_events = self.heard_events, []
        return events

    def chunk_bytes(self) -> list[int]:
        """Bytes of a chunk in primary, per group."""
        return list(self.side._layout.chunk_bytes)

    def keys_of(self, prompt: list[int]) -> list[list[bytes]]:
        """The keys of a prompt's whole chunks, per group."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        from kvstrata.integrations.vllm.keys import KeyChain

        request = Request(
            "probe", prompt, SamplingParams(max_tokens=1), None, block_hasher=self.core.request_block_hasher
        )
        shape = self.side._shape
        return KeyChain(shape, b"").take(request.block_hashes) or [[] for _ in shape.groups]

    def planned(self, prompt: list[int], computed: int = 0) -> int:
        """The hit that the planner finds for a prompt, from what is in primary and on the tiers."""
        import numpy as np

        from kvstrata.layout.planner import resolve

        side, keys = self.side, self.keys_of(prompt)
        presence = []
        with side.stack.driver.step() as manager:
            for group in keys:
                found = np.where(manager.residency.find(group) >= 0, 2, 0) if group else np.zeros(0)
                for tier in side.stack.tiers:
                    if group:
                        found = np.maximum(found, tier.probe(group))
                presence.append(found.astype(np.int8))
        decision = resolve(side._layout, presence, computed, len(prompt))
        return int(decision.boundary - computed)

    def settle(self, seconds: float = 5.0) -> bool:
        """Wait until all that was offered is on the tiers."""
        return bool(self.side.stack.drain(seconds))

    def silence(self, seconds: float) -> None:
        """Let only the plug-in's own threads and processes work."""
        Signal().wait(seconds)

    def on_disk(self) -> int:
        """Chunks that the first tier has made durable, by its own count; nothing is hurried."""
        return int(self.side.stack.tiers[0].tier.usage().keys)

    # -- damage and faults

    def damage(self, how: str, group: int | None = None) -> int:
        """Alter what primary holds: "zero" or "shift" (each token's place gets its forerunner's). Returns chunks."""
        import numpy as np

        side = self.side
        view = np.frombuffer(side.stack.region.view, dtype=np.uint8)
        count = 0
        with side.stack.driver.step() as manager:
            residency = manager.residency
            for slot in np.flatnonzero(residency.state == 2).tolist():
                g = int(residency.group[slot])
                if group is not None and g != group:
                    continue
                at, size = int(residency.offset[slot]), int(residency.length[slot])
                part = view[at : at + size]
                if how == "zero":
                    part[:] = 0
                else:
                    self._shift(part, side._shape.groups[g])
                count += 1
        return count

    def _shift(self, part: Any, group: Any) -> None:
        import numpy as np

        at = 0
        for layer in group.layers:
            page = part[at : at + layer.page]
            at += layer.page
            if group.recurrent:
                page[:] = np.roll(page, 64)
            else:
                table = page.reshape(2, group.tokens_per_block, -1)  # heads, tokens, bytes of one token
                table[:] = np.roll(table, 1, axis=1)

    def drop_primary(self) -> int:
        """Empty primary, as eviction would; returns how many chunks went."""
        import numpy as np

        with self.side.stack.driver.step() as manager:
            residency = manager.residency
            slots = np.flatnonzero((residency.state == 2) & (residency.pins == 0)).astype(np.int32)
            residency.evict(slots)
            return len(slots)

    def load_faults(self, share: float, seed: int) -> None:
        """Let that share of the worker's loads fail."""
        dice = random.Random(seed)
        copier = self.worker._copier
        real = copier.load

        def load(job_id: int, pieces: Sequence[Any]) -> None:
            if dice.random() < share:
                raise OSError("made to fail")
            real(job_id, pieces)

        copier.load = load
        self.undo.append(lambda: setattr(copier, "load", real))

    def heal(self) -> None:
        """Take all faults back."""
        while self.undo:
            self.undo.pop()()

    def call(self, module: str, function: str, arguments: dict[str, Any]) -> Any:
        """Run a function of a test's own helper module with the host as first argument."""
        import importlib

        return getattr(importlib.import_module(module), function)(self, **arguments)


def main() -> None:
    """Serve commands until the pipe closes."""
    faulthandler.register(signal.SIGUSR1)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # not to outlive a test run that is killed
    host = Host()
    with os.fdopen(int(sys.argv[1]), "r") as commands, os.fdopen(int(sys.argv[2]), "w") as answers:
        for line in commands:
            command = json.loads(line)
            try:
                result = getattr(host, command["name"])(**command["arguments"])
                answer = {"result": result}
            except Exception:
                answer = {"error": traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
