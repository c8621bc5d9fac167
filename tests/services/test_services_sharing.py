"""Two processes on one store: what one completes the other serves; half of a chunk is never seen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from servers import environment
from services_stack import Place, Runner

from kvstrata.testing.tier_harness import chunk_keys

CHUNKS = 1000
CHUNK = 4096


def start_child(place: Place, part: str, first: int, step: int) -> subprocess.Popen[str]:
    arguments = [place.kind, json.dumps(place.options(part)), *map(str, (first, CHUNKS, step, CHUNK))]
    script = Path(__file__).with_name("services_child.py")
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env=environment(PYTHONPATH=str(script.parent)),
    )


def test_two_processes_share_a_thousand_chunks(place: Place) -> None:
    keys = chunk_keys(CHUNKS)
    with start_child(place, "other", 1, 2) as child, Runner(place.make("mine"), CHUNKS, CHUNK) as runner:
        assert len(runner.store(keys[::2])) == CHUNKS // 2
        assert child.stdout is not None
        told = [line.strip() for line in iter(child.stdout.readline, "stored\n")]
        assert sorted(map(int, told)) == list(range(1, CHUNKS, 2))
        assert runner.present(keys) == keys
        assert set(runner.load(keys).values()) == {None}
        out, _ = child.communicate("go\n", timeout=60)
        assert out == f"loaded {CHUNKS}\n"


def test_a_writer_killed_in_the_middle_leaves_whole_chunks_and_gets_its_part_back(place: Place) -> None:
    keys = chunk_keys(CHUNKS)
    with start_child(place, "other", 0, 1) as child:
        assert child.stdout is not None
        told = [int(child.stdout.readline()) for _ in range(CHUNKS // 4)]
        child.kill()
        told += [int(line) for line in child.stdout.read().split("\n")[:-1] if line.isdigit()]
    with Runner(place.make("mine"), CHUNKS, CHUNK) as runner:
        found = runner.present(keys)
        assert {keys[number] for number in told} <= set(found)
        assert set(runner.load(found).values()) == {None}, "what is shown is whole"
    with Runner(place.make("other"), CHUNKS, CHUNK) as runner:
        assert len(runner.store(keys)) == CHUNKS, "the part of a dead process is taken back"
        assert runner.tier.usage().keys == CHUNKS, "and all that lies in it is counted"
        assert runner.present(keys) == keys
        assert set(runner.load(keys).values()) == {None}
