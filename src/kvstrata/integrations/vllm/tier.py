"""`KVStrataTier`: the disk tier as a secondary tier of vLLM's own `TieringOffloadingSpec`.

    "secondary_tiers": [{"type": "KVStrataTier", "module_path": "kvstrata.integrations.vllm.tier",
                         "dir": "/var/cache/kv", "limit": "200GB", "identity": "anything that changes KV"}]

vLLM hands its tiers less of the engine than its connectors: nothing that overrides the model's configuration (another
RoPE base). The tier is made inside the connector's constructor, so it looks there for the engine's whole configuration;
where it finds none, it refuses to start unless the operator states an `identity`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import inspect
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvstrata.config import parse_size
from kvstrata.errors import ConfigError
from kvstrata.integrations.vllm.identity import KV_LAYOUT_VERSION, engine_configuration, hash_seed, weights_sample
from kvstrata.integrations.vllm.shield import Shield, shielded
from kvstrata.integrations.vllm.versions import require_supported
from kvstrata.layout.namespace import encode
from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.executor import ThreadExecutor
from kvstrata.runtime.guard import GuardedTier
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.disk import DiskTier
from kvstrata.types import JobEnded, KeysDone, Presence, TierJob

_BASE = "vllm.v1.kv_offload.tiering.base"
_OFFLOAD = "vllm.v1.kv_offload.base"
_log = logging.getLogger("vllm.kvstrata")
THREADS = 8
DRAIN_S = 60.0


class _Open:
    """A job that vLLM waits for."""

    def __init__(self, job_id: int, keys: list[bytes], size: int, begun: float, *, load: bool) -> None:
        self.job_id, self.keys, self.size, self.begun, self.load = job_id, keys, size, begun, load
        self.done: list[bytes] = []


class TierMethods:
    """Everything that vLLM calls. Mixed with vLLM's base class by `tier_class`."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        dir: str,  # noqa: A002 - the name of the option
        limit: int | str,
        min_free: int | str = 0,
        identity: str = "",
        locality: Any = None,
        **options: Any,
    ) -> None:
        require_supported()
        newer = () if backpressure_detector is None else (backpressure_detector,)  # 0.30 has none
        super().__init__(offloading_spec, primary_kv_view, tier_type, *newer)  # type: ignore[call-arg]
        self.shield = Shield("tier")
        self._clock = SystemClock()
        self._executor = ThreadExecutor("kvstrata-tier", THREADS)
        self._open: dict[int, _Open] = {}
        self._ended: list[Any] = []
        self._context_class = importlib.import_module(_OFFLOAD).RequestOffloadingContext
        self._results = importlib.import_module(_OFFLOAD).LookupResult
        self._job_result = _with_known_fields(importlib.import_module(_BASE).JobResult)
        self._chunk_bytes = size = _row_bytes(primary_kv_view)
        disk = DiskTier(
            path=dir,
            limit=parse_size(limit, "limit"),
            min_free=0 if min_free == 0 else parse_size(min_free, "min_free") or 0,
            largest_chunk=size,
            io_process=False,
            **options,
        )
        self.tier = GuardedTier(disk)
        namespace = spec_namespace(offloading_spec.config, identity, callers_configuration())
        view = primary_kv_view.cast("B")
        self.tier.open(TierContext(view, namespace, size, self._clock, self._executor))
        trouble = self.tier.self_test()
        if trouble is not None:
            _log.warning("kvstrata tier: %s", trouble)

    # -- asking

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Whether the chunk is on disk."""
        try:
            return self._lookup(key)
        except Exception as error:
            self.shield.caught("lookup", error)
            return self._results.MISS

    def _lookup(self, key: bytes) -> Any:
        answer = self.tier.probe([bytes(key)])
        if isinstance(answer, int):
            return self._results.MISS
        match int(answer[0]):
            case Presence.PRESENT:
                return self._results.HIT
            case Presence.UNKNOWN:
                return self._results.RETRY
            case _:
                return self._results.MISS

    @shielded(lambda: None)
    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Mark as recently used."""
        self.tier.touch([bytes(key) for key in keys])

    def on_new_request(self, req_context: Any) -> Any:
        """No wish of our own."""
        return self._context_class()

    # -- jobs

    def submit_store(self, job_metadata: Any) -> None:
        """Write chunks from primary."""
        self._submit(job_metadata, load=False)

    def submit_load(self, job_metadata: Any) -> None:
        """Read chunks into primary."""
        self._submit(job_metadata, load=True)

    def _submit(self, job: Any, *, load: bool) -> None:
        """Hand a job to the disk; one that cannot be handed over has failed, and is reported as such."""
        try:
            keys = [bytes(key) for key in job.keys]
            size = self._chunk_bytes
            offsets = [int(chunk) * size for chunk in job.chunk_ids]  # glossary: allow
            self._open[job.job_id] = _Open(job.job_id, keys, size * len(keys), self._clock.monotonic(), load=load)
            mine = TierJob(job.job_id, keys, offsets, [size] * len(keys))
            (self.tier.submit_load if load else self.tier.submit_store)(mine)
        except Exception as error:
            self.shield.caught("submit", error)
            self._open.pop(job.job_id, None)
            self._ended.append(self._job_result(job_id=job.job_id, success=False, successful_keys=[]))

    def get_finished_jobs(self) -> list[Any]:
        """Jobs that ended since the last call."""
        try:
            self._poll()
        except Exception as error:
            self.shield.caught("get_finished_jobs", error)
        ended, self._ended = self._ended, []
        return ended

    def _poll(self) -> None:
        for event in self.tier.poll():
            match event:
                case KeysDone():
                    job = self._open.get(event.job_id)
                    if job is not None:
                        job.done += [job.keys[index] for index in event.done]
                case JobEnded():
                    job = self._open.pop(event.job_id, None)
                    if job is not None:
                        self._end(job)

    def _end(self, job: _Open) -> None:
        whole = len(job.done) == len(job.keys)
        self._ended.append(
            self._job_result(
                job_id=job.job_id,
                success=whole,
                successful_keys=None if whole else job.done,
                transfer_time=self._clock.monotonic() - job.begun,
                transfer_bytes=self._chunk_bytes * len(job.done),
            )
        )

    def has_pending_work(self) -> bool:
        """Whether the engine must step for a job to come to its end."""
        return bool(self._open or self._ended)

    @shielded(lambda: None)
    def drain_jobs(self) -> None:
        """Wait for every job."""
        self.tier.drain(DRAIN_S)
        self._poll()

    @shielded(lambda: None)
    def shutdown(self) -> None:
        """Let go of the directory."""
        self.tier.close()
        self._executor.close(1.0)


def _row_bytes(view: memoryview) -> int:
    """Bytes of one chunk in vLLM's primary."""
    return view.strides[0] if view.strides else view.itemsize


def _with_known_fields(kind: Any) -> Callable[..., Any]:
    """Makes a data class of vLLM without the fields that this version does not have (0.30 counts no bytes)."""
    known = {field.name for field in dataclasses.fields(kind)}
    return lambda **fields: kind(**{name: value for name, value in fields.items() if name in known})


def callers_configuration() -> Any | None:
    """The engine's configuration, from the nearest caller that holds it under vLLM's own name for it."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("vllm_config")
        if getattr(getattr(found, "model_config", None), "hf_config", None) is not None:
            return found
        frame = frame.f_back
    return None


def spec_namespace(config: Any, identity: str, engine: Any | None) -> bytes:
    """The namespace from what vLLM tells its tiers, the engine's configuration, and the operator's words.

    Raises `ConfigError` if neither the configuration nor words say what the engine computes.
    """
    if engine is None and not identity:
        raise ConfigError(
            "KVStrataTier: this vLLM does not show its tiers the model's whole configuration; name everything that "
            'changes KV (revision, overrides of the configuration, quantization) in the option "identity"'
        )
    model, parallel = config.model, config.parallel
    local = os.path.isdir(model.name)
    folder = Path(model.name)
    settings = (folder / "config.json").read_bytes() if local and (folder / "config.json").exists() else b""
    groups = tuple((group.tokens_per_block, tuple(group.layer_names)) for group in config.groups)
    seed = hash_seed("sha256")
    parts = (
        "vllm tier",
        KV_LAYOUT_VERSION,
        require_supported(),
        "" if local else model.name,
        weights_sample(folder) if local else b"",
        settings,
        model.dtype,
        groups,
        config.worker_kv_bytes_per_block,
        config.cache.tokens_per_hash,
        config.cache.blocks_per_chunk,
        (parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size),
        str(config.kv_cache_layout),
        str(seed),
        () if engine is None else (str(engine.model_config.revision or ""), engine_configuration(engine)),
        identity,
    )
    return hashlib.blake2b(encode(parts), digest_size=16).digest()


@functools.cache
def tier_class() -> type:
    """The tier class for vLLM."""
    base = importlib.import_module(_BASE).SecondaryTierManager
    medium = importlib.import_module(_OFFLOAD).Medium
    return type("KVStrataTier", (TierMethods, base), {"__module__": __name__, "medium": medium.STORAGE})


def __getattr__(name: str) -> Any:
    if name == "KVStrataTier":
        return tier_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
