"""The entry point `vllm.general_plugins`: makes the connector known to vLLM by its name, in every process of it."""

from __future__ import annotations

import importlib
import logging

NAME = "KVStrataConnector"
MODULE = "kvstrata.integrations.vllm.connector"

_log = logging.getLogger("vllm.kvstrata")


def register() -> None:
    """Register the connector. Called by vLLM, perhaps several times in a process; never raises."""
    try:
        factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
        if NAME not in factory._registry:
            factory.register_connector(NAME, MODULE, NAME)
    except Exception as error:  # vLLM starts without plug-ins that fail, and so it should
        _log.warning("kvstrata: the connector could not be registered with this vLLM: %s", error)
