"""vLLM's own connector and scheduler with `KVStrataTier` below them: store, evict, promote, load, same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_kit import Engine, difference, one, prompt
from engine_models import make

pytestmark = pytest.mark.engine
LIMIT = 64 << 20


def tiering(folder: Path, **tier: Any) -> dict[str, Any]:
    entry = {
        "type": "KVStrataTier",
        "module_path": "kvstrata.integrations.vllm.tier",
        "dir": str(folder),
        "limit": LIMIT,
        **tier,
    }
    return {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "kvstrata.integrations.vllm.host_spec",
        "cpu_bytes_to_use": 16 << 20,
        "secondary_tiers": [entry],
    }


def files(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def test_stock_tiering_over_our_disk_and_a_restart(tmp_path: Path) -> None:
    model, folder = make(tmp_path, "llama"), tmp_path / "disk"
    tokens = prompt(1100, seed=1)
    with Engine(model, tiering(folder), connector="OffloadingConnector") as engine:
        cold = one(engine, tokens)
        own = one(engine, tokens)
        for seed in range(2, 8):  # more than primary takes: the first ones are evicted from it
            one(engine, prompt(1100, seed=seed))
            assert files(folder) <= LIMIT
        engine.reset()
        back = one(engine, tokens)
        assert back["cached"] >= 1024
        assert difference(own, back) == 0.0
        assert difference(cold, back) <= 1e-4
    with Engine(model, tiering(folder), connector="OffloadingConnector") as again:
        back = one(again, tokens)
        assert back["cached"] >= 1024
        assert difference(own, back) == 0.0
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    with Engine(model, tiering(folder), connector="OffloadingConnector", hf_overrides=rope) as other:
        assert one(other, tokens)["cached"] == 0
