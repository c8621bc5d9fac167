"""200 requests under memory pressure with failing and stalling tiers and failing loads: each gets its own tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_kit import Engine
from engine_models import make

pytestmark = pytest.mark.engine
SEED, COUNT = 4, 200


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "async"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("mixed")
    tiers = [
        {"type": "engine_mix:FailingTier", "name": "failing", "limit": "256MiB"},
        {"type": "engine_mix:StallingTier", "name": "stalling", "limit": "256MiB"},
    ]
    extra = {
        "primary": {"size": "16MiB"},
        "tiers": tiers,
        "core": {"stall_s": 0.3, "total_s": 0.5, "job_idle_s": 0.5, "job_total_s": 1.0},
    }
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 17,
        "max_model_len": 1024,
        "async_scheduling": request.param,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
    }
    with Engine(make(folder, "llama"), extra, **options) as started:
        yield started


def test_every_request_gets_the_tokens_that_it_gets_alone(engine: Engine) -> None:
    scene = {"seed": SEED, "count": COUNT}
    right = engine.call(module="engine_mix", function="alone", arguments=scene)
    result = engine.call(module="engine_mix", function="mixed", arguments={**scene, "abort_at_most": 15, "fail": 0.2})
    looked = engine.look()
    assert result["open"] == 0
    assert len(result["answers"]) == COUNT - result["aborted"]
    wrong = [
        (answer["tokens"], right[name]["tokens"], right[name]["margins"])
        for name, answer in result["answers"]
        if answer["reason"] != "length" or not same(answer, right[name])
    ]
    assert wrong == []
    assert {name: looked[name] for name in ("pinned", "requests")} == {"pinned": 0, "requests": 0}
    assert looked["faults"] == {}
    counts = {"loads": looked["loads"], "failed": looked["load_failures"], **result}
    del counts["answers"]
    assert result["loaded"] >= 100, counts  # requests, not loads
    assert looked["load_failures"] >= 20, counts
    assert looked["tiers"]["failing"]["failed"].get("io_error", 0) >= 3, looked["tiers"]
    assert result["preempted"] >= 10, counts
    assert result["aborted"] >= 10, counts


def same(answer: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether tokens are equal, up to a place where the two best ones were a hair's breadth apart."""
    for mine, token, margin in zip(answer["tokens"], right["tokens"], right["margins"], strict=True):
        if mine != token:
            return bool(margin <= 1e-3)
    return True
