"""Engine tests need vLLM; without it they are skipped by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder's tests where there is no vLLM."""
    if importlib.util.find_spec("vllm") is not None:
        return
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed; make test-engine installs it"))
