"""Another engine process over a tier that is shared: stores prompts and stays, or writes until it is killed.

    with NodeProcess({"type": "fs", "path": "/mnt/kv", "part": "two"}) as other:
        other.ask("store a 1000")          # "stored 1000"
        other.kill()

Run as a program it reads such lines: `store PROMPT CHUNKS`, `load PROMPT CHUNKS` (all bytes are compared), `forget`
(primary is emptied), `reads` (state of the breaker), `check` (idle, and nothing pinned), and `write CHUNKS`, which
stores twenty prompts `turn-0` to `turn-19` again and again. It ends with its standard input.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from kvstrata.testing.node import Node, one_group
from kvstrata.tiers.registry import make_tier

TOKENS = 16
CHUNK_BYTES = 4096
TURNS = 20
_SAYS = "node: "


class NodeProcess:
    """The other process. `tier`: a tier's options and its `type`; `command` goes before it (a wrapper like `ip`)."""

    def __init__(self, tier: Mapping[str, Any], *, command: tuple[str, ...] = ()) -> None:
        arguments = [*command, sys.executable, "-m", "kvstrata.testing.node_process", json.dumps(dict(tier))]
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )

    def ask(self, line: str) -> str:
        """Give one line and wait for the answer; empty if the process has ended."""
        if self.process.stdin is None or self.process.stdout is None:
            return ""
        self.process.stdin.write(line + "\n")
        for said in self.process.stdout:
            if said.startswith(_SAYS):
                return said.removeprefix(_SAYS).strip()
        return ""

    def end(self, within_s: float) -> int:
        """End it as an engine ends: its input is closed; returns its exit code."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        return self.process.wait(within_s)

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.kill()
        self.process.wait(10)

    def __enter__(self) -> NodeProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        with self.process:
            pass


def _serve(node: Node, lines: Iterator[str]) -> Iterator[str]:
    """The answers to the lines, one by one."""
    for line in lines:
        what, *rest = line.split()
        if what == "store":
            yield f"stored {node.store(rest[0], int(rest[1]) * TOKENS)}"
        elif what == "load":
            yield f"loaded {node.load(rest[0], int(rest[1]) * TOKENS) // TOKENS}"
        elif what == "forget":
            node.forget()
            yield "forgotten"
        elif what == "reads":
            yield node.reads_state(0)
        elif what == "check":
            node.settle(90.0)
            node.check_idle()
            yield "idle"
        elif what == "write":
            for turn in range(1_000_000):
                node.store(f"turn-{turn % TURNS}", int(rest[0]) * TOKENS, settle_s=0.0)
                if turn == TURNS // 2:
                    yield "writing"


def main() -> None:
    """Serve standard input."""
    table = json.loads(sys.argv[1])
    with Node(one_group(CHUNK_BYTES, TOKENS), [make_tier(table.pop("type"), **table)]) as node:
        for answer in _serve(node, iter(sys.stdin.readline, "")):
            print(_SAYS + answer, flush=True)


if __name__ == "__main__":
    main()
