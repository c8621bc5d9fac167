"""Every configuration in docs/tiers.md can be copied: it is read, and its tiers can be made."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvstrata.config import config_from_dict
from kvstrata.integrations.vllm.stack import tier_options
from kvstrata.tiers.base import Tier
from kvstrata.tiers.registry import TIERS, make_tier

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "tiers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?m)^(?: {4}.*\n)+", TEXT)
EXAMPLES = [json.loads(block) for block in BLOCKS if block.lstrip().startswith("{")]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: "-".join(t["type"] for t in example["tiers"]))
def test_an_example_is_a_configuration(example: dict[str, Any]) -> None:
    config = config_from_dict(example)
    for entry in config.tiers:
        options = tier_options(entry.options, entry.name)
        if entry.type == "mooncake" and importlib.util.find_spec("mooncake") is None:
            pytest.skip("mooncake: its library is not installed here")
        assert isinstance(make_tier(entry.type, name=entry.name, **options), Tier)


def test_every_built_in_tier_has_an_example() -> None:
    shown = {tier["type"] for example in EXAMPLES for tier in example["tiers"]}
    assert shown >= set(TIERS) - {"memory"}
