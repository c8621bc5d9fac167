"""Every architecture check can fail: each is shown a small bad sample, and a good one beside it."""

from __future__ import annotations

import checkers
import pytest


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("layout/planner.py", "from kvstrata.core.slots import SlotTable"),
        ("layout/planner.py", "import kvstrata.core"),
        ("layout/planner.py", "from kvstrata import core"),
        ("layout/planner.py", "from ..core import slots"),
        ("layout/kinds/full.py", "from ...policy.lru import Lru"),
        ("policy/lru.py", "def late():\n    from kvstrata.layout import groups"),
        ("core/manager.py", "from kvstrata.config import Config"),
        ("core/manager.py", "from kvstrata.tiers.base import Tier"),
        ("tiers/fs.py", "from kvstrata.runtime.executor import make_lock"),
        ("tiers/fs.py", "from kvstrata.primary.region import Region"),
        ("runtime/driver.py", "from kvstrata.sim.replay import replay"),
        ("testing/clock.py", "from kvstrata.sim import stack"),
        ("integrations/vllm/plugin.py", "from kvstrata.cli.app import main"),
        ("types.py", "from kvstrata.layout.groups import Group"),
        ("novel/thing.py", "x = 1"),
    ],
)
def test_an_upward_import_is_found(path: str, text: str) -> None:
    assert len(checkers.layer_complaints(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/manager.py", "from kvstrata.layout.planner import resolve\nimport numpy\nfrom . import slots"),
        ("layout/kinds/full.py", "from .base import Kind\nfrom ..groups import Group"),
        ("sim/stack.py", "from kvstrata.testing.clock import ManualClock"),
        ("cli/app.py", "from kvstrata import __version__"),
        ("tiers/fs.py", "import os"),
    ],
)
def test_a_downward_import_passes(path: str, text: str) -> None:
    assert checkers.layer_complaints(path, text) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "import torch.cuda",
        "from time import monotonic",
        "def late():\n    import threading",
        "from random import Random",
        "import socket",
        "from os import path",
        "from pathlib import Path",
        "import logging",
        "text = open('x').read()",
    ],
)
def test_the_outside_world_is_found_in_a_pure_layer(text: str) -> None:
    for path in ("core/manager.py", "layout/planner.py", "policy/lru.py", "types.py"):
        assert len(checkers.purity_complaints(path, text)) == 1
    assert checkers.purity_complaints("tiers/fs.py", text) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("tiers/fs.py", "import time"),
        ("runtime/driver.py", "from threading import Lock"),
        ("runtime/clock.py", "import threading"),
        ("runtime/executor.py", "import time"),
        ("runtime/executor.py", "import _thread"),
        ("core/manager.py", "import random"),
        ("sim/workloads.py", "import random\nvalue = random.random()"),
        ("sim/workloads.py", "from random import Random\nsource = Random()"),
        ("sim/workloads.py", "import numpy as np\nsource = np.random.default_rng()"),
        ("sim/workloads.py", "import numpy as np\nvalue = np.random.randint(3)"),
    ],
)
def test_clocks_threads_and_chance_are_found_outside_their_modules(path: str, text: str) -> None:
    assert len(checkers.guarded_module_complaints(path, text)) == 1


def test_clocks_threads_and_seeded_chance_pass_in_their_modules() -> None:
    assert checkers.guarded_module_complaints("runtime/clock.py", "import time") == []
    assert checkers.guarded_module_complaints("runtime/executor.py", "import threading") == []
    seeded = "import random\nimport numpy as np\na = random.Random(3)\nb = np.random.default_rng(seed=4)"
    assert checkers.guarded_module_complaints("sim/workloads.py", seeded) == []


def test_a_long_file_and_a_long_function_are_found() -> None:
    body = "    x = 1\n"
    assert checkers.size_complaints("a.py", "x = 1\n" * 601) == ["a.py: 601 lines, at most 600"]
    assert checkers.size_complaints("a.py", "def f():\n" + body * 60) == ["a.py:1: f has 61 lines, at most 60"]
    assert checkers.size_complaints("a.py", "class A:\n  async def f():\n" + body * 60) != []
    assert checkers.size_complaints("a.py", "x = 1\n" * 500 + "def f():\n" + body * 59) == []


def test_a_missing_docstring_is_found() -> None:
    assert checkers.docstring_complaints("a.py", "x = 1") == ["a.py: no docstring"]
    assert checkers.docstring_complaints("a.py", '"""Doc."""\nclass A:\n    x = 1') == ["a.py:2: A has no docstring"]
    assert checkers.docstring_complaints("a.py", '"""Doc."""\ndef f(): ...') == ["a.py:2: f has no docstring"]
    assert checkers.docstring_complaints("a.py", '"""Doc."""\ndef _f(): ...\nclass _B: ...') == []
    assert checkers.docstring_complaints("__init__.py", "") == []


def test_an_export_that_is_not_there_is_found() -> None:
    text = "from a import b\nimport c.d\nx: int = 1\ny = 2\nclass K: ...\n__all__ = ['b','c','x','y','K']"
    assert checkers.export_complaints("a.py", text) == []
    assert checkers.export_complaints("a.py", "__all__ = ['gone']") == [
        "a.py: __all__ names 'gone', which is not there"
    ]


GLOSSARY = """
| word | means | never |
| --- | --- | --- |
| chunk | the unit | offload block, `cache block` |
| pin | a reference | ref count |
| load | to the accelerator |  |
"""


def test_the_glossary_names_strays() -> None:
    assert checkers.glossary(GLOSSARY) == [
        checkers.Stray("offload block", "chunk"),
        checkers.Stray("cache block", "chunk"),
        checkers.Stray("ref count", "pin"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "offload_block = 1",
        "# the offload block is full",
        "class OffloadBlock:",
        "offload_blocks: int",
        "CACHE_BLOCK = 3",
        "refcount += 1",
        "self.ref_counts[3] = 1",
        '"""Returns the ref-count."""',
        "offloadBlock",
    ],
)
def test_a_stray_word_is_found(line: str) -> None:
    strays = checkers.glossary(GLOSSARY)
    assert len(checkers.glossary_complaints("a.py", f"x = 1\n{line}\n", strays)) == 1


@pytest.mark.parametrize("line", ["chunk = 1", "xref_count", "refcounting = 1", "ref_count = 1  # glossary: allow"])
def test_another_word_is_no_stray(line: str) -> None:
    assert checkers.glossary_complaints("a.py", line, checkers.glossary(GLOSSARY)) == []


@pytest.mark.parametrize(
    "line", ["cd /home/someone/x", "path = '/work/tree'", "see /root/x", "https://pypi.org/simple", "http://10.1.2.3/x"]
)
def test_a_trace_of_a_machine_is_found(line: str) -> None:
    assert len(checkers.place_complaints("a.md", f"fine\n{line}")) == 1


@pytest.mark.parametrize("line", ["/var/cache/kvstrata", "docs/work/flow", "127.0.0.1", "see PyPI", "10.5 GB"])
def test_what_is_no_trace_passes(line: str) -> None:
    assert checkers.place_complaints("a.md", line) == []


def test_two_test_files_of_one_name_are_found() -> None:
    assert checkers.duplicate_names(["tests/unit/test_a.py", "tests/sim/test_a.py"]) == [
        "tests/unit/test_a.py has the name of tests/sim/test_a.py"
    ]
    assert checkers.duplicate_names(["tests/conftest.py", "tests/sim/conftest.py", "tests/sim/test_b.py"]) == []


def test_the_layers_name_only_each_other() -> None:
    for part, below in checkers.LAYERS.items():
        assert below <= set(checkers.LAYERS), part
        for other in below:  # one way: nobody below imports back
            assert part not in checkers.LAYERS[other], (part, other)
