"""`KVStrataConnector`: the thin face towards vLLM. Each method hands on to the scheduler side or the worker side.

The class is made when it is first asked for, because its base class is vLLM's: `KVStrataConnector` of this module.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from kvstrata.errors import ConfigError
from kvstrata.integrations.vllm import startup
from kvstrata.integrations.vllm.metadata import RankGreeting, StepReport, StepWork
from kvstrata.integrations.vllm.scheduler import SchedulerSide
from kvstrata.integrations.vllm.settings import DISABLE, disabled
from kvstrata.integrations.vllm.shield import Shield
from kvstrata.integrations.vllm.stats import prom_class, stats_class
from kvstrata.integrations.vllm.versions import require_supported
from kvstrata.integrations.vllm.worker import WorkerSide

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_log = logging.getLogger("vllm.kvstrata")


class ConnectorMethods:
    """Everything that vLLM calls. Mixed with vLLM's base classes by `connector_class`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        version = require_supported()
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        self.shield = Shield("connector")
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        self._blocks = int(kv_cache_config.num_blocks)
        self._work = StepWork()
        if disabled():
            _log.warning("kvstrata is off: %s is set", DISABLE)
        elif role.name == "SCHEDULER":
            self.scheduler_side = startup.scheduler_side(vllm_config, kv_cache_config, version)
        else:
            self.worker_side = startup.worker_side(vllm_config, kv_cache_config)

    # -- what the engine asks of a connector as such

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped is a later miss, nothing worse."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """On an accelerator each layer's block must be one piece of memory."""
        return None if vllm_config.device_config.device_type == "cpu" else "LBHNC"

    # -- worker side

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """The engine's KV tensors."""
        if self.worker_side is not None:
            self.worker_side.register(kv_caches, self._blocks)

    def get_handshake_metadata(self) -> RankGreeting | None:
        """What this rank tells the scheduler side before serving."""
        return None if self.worker_side is None else self.worker_side.greet()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """This step's work."""
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]
        if isinstance(connector_metadata, StepWork):
            self._work = connector_metadata

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        super().clear_connector_metadata()  # type: ignore[misc]
        self._work = StepWork()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Before anything of this step is computed."""
        if self.worker_side is not None and isinstance(kv_connector_metadata, StepWork):
            self.worker_side.before_forward(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin loads; all of them are asynchronous."""
        if self.worker_side is not None:
            self.worker_side.start_loads(self._work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No load is for the step that begins it."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Stores are made for all layers at once, after the step."""

    def wait_for_save(self) -> None:
        """The step's forward has been queued: begin its stores."""
        if self.worker_side is not None:
            self.worker_side.after_forward(self._work)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Loads that have ended."""
        received, failed = (set(), set()) if self.worker_side is None else self.worker_side.results()
        return importlib.import_module(_BASE).KVConnectorTransferResults(
            finished_sending=set(), finished_recving=received, failed_recving=failed
        )

    def build_connector_worker_meta(self) -> StepReport | None:
        """This rank's report."""
        return None if self.worker_side is None else self.worker_side.report()

    # -- scheduler side

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, RankGreeting]) -> None:
        """What the ranks told before serving."""
        if self.scheduler_side is not None:
            self.scheduler_side.greet([metadata[rank] for rank in sorted(metadata)])

    def on_new_request(self, request: Any) -> None:
        """A new request."""
        if self.scheduler_side is not None:
            self.scheduler_side.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded."""
        if self.scheduler_side is None:
            return 0, False
        return self.scheduler_side.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """What the engine took."""
        if self.scheduler_side is not None:
            self.scheduler_side.allocated(request, blocks.blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Mapping[Any, int]:
        """The tokens taken, by where they came from."""
        try:
            return startup.hit_sources(self.scheduler_side, request.request_id, num_external_tokens)
        except Exception as error:
            self.shield.caught("get_external_cache_hit_sources", error)
            return {}

    def build_connector_meta(self, scheduler_output: Any) -> StepWork:
        """This step's work for the workers."""
        if self.scheduler_side is None:
            return StepWork()
        return self.scheduler_side.build_work(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers report."""
        if self.scheduler_side is not None:
            self.scheduler_side.update(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """A request is over; one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """A request is over. Its blocks may go back at once."""
        if self.scheduler_side is not None:
            self.scheduler_side.finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether a copy is under way that only another step brings to its end."""
        return self.scheduler_side is not None and self.scheduler_side.pending

    def reset_cache(self) -> bool | None:
        """The engine's reset has no reason: the content counts as invalid."""
        return None if self.scheduler_side is None else self.scheduler_side.reset()

    def take_events(self) -> Iterable[Any]:
        """Cache events since the last call."""
        return () if self.scheduler_side is None else self.scheduler_side.events()

    def get_kv_connector_stats(self) -> Any:
        """What was counted since the last call; the scheduler side counts for all."""
        if self.scheduler_side is None:
            return None
        gains = self.scheduler_side.gains()
        return stats_class()(data=gains) if gains else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """The statistics object around numbers that were sent."""
        return stats_class()(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> Any:
        """What puts the numbers into Prometheus."""
        return prom_class()(*arguments, **named)

    def shutdown(self) -> None:
        """The engine ends."""
        if self.worker_side is not None:
            self.worker_side.close()
        if self.scheduler_side is not None:
            self.scheduler_side.close()


@functools.cache
def connector_class() -> type:
    """The connector class. Raises `ConfigError` for a vLLM without the interface that it needs."""
    require_supported()
    try:
        base = importlib.import_module(_BASE)
        parents = (ConnectorMethods, base.KVConnectorBase_V1, base.SupportsHMA)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"this vLLM lacks the connector interface: {error}") from error
    return type("KVStrataConnector", parents, {"__module__": __name__, "__doc__": __doc__})


def __getattr__(name: str) -> Any:
    if name == "KVStrataConnector":
        return connector_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
