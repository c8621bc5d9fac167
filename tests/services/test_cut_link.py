"""A server on another host, behind a cable that is cut: bounds hold, the breaker opens, service resumes by itself.

A cut cable is worse than a dead server: nothing is refused, every packet just vanishes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import FAR, Hosts, make_hosts
from servers import MooncakeServer, RedisServer, wait_until
from services_kit import find_server

from kvstrata.testing.node_process import NodeProcess

BOUND_S = 5.0
"""The default bound of a request (2 s, and its bytes at 1 GB/s), one time-out of a tier, and slow machines."""
PING = (
    "import socket, sys\n"
    "with socket.create_connection((sys.argv[1], int(sys.argv[2])), 1) as c:\n"
    "    c.settimeout(1); c.sendall(b'PING\\r\\n'); sys.exit(c.recv(1) != b'+')"
)


class FarRedis(RedisServer):
    """Redis on the far host."""

    def __init__(self, place: Path, hosts: Hosts) -> None:
        super().__init__(place, "--bind", FAR, "--protected-mode", "no")
        self.hosts = hosts

    def command(self) -> list[str]:
        return [*Hosts.on(self.hosts.far), *super().command()]

    def answers(self) -> bool:
        ask = [*Hosts.on(self.hosts.near), sys.executable, "-c", PING, FAR, str(self.port)]
        return subprocess.run(ask, capture_output=True, timeout=10, check=False).returncode == 0


class FarMooncake(MooncakeServer):
    """A Mooncake master on the far host."""

    def __init__(self, place: Path, hosts: Hosts) -> None:
        super().__init__(place, FAR)
        self.hosts = hosts

    def command(self) -> list[str]:
        return [*Hosts.on(self.hosts.far), *super().command()]

    def answers(self) -> bool:
        look = f"import urllib.request as u; u.urlopen('{self.admin}/health', timeout=1).read()"
        ask = [*Hosts.on(self.hosts.near), sys.executable, "-c", look]
        return subprocess.run(ask, capture_output=True, timeout=10, check=False).returncode == 0


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with make_hosts() as made:
        yield made


def live_through_a_cut(hosts: Hosts, node: NodeProcess) -> None:
    def load(prompt: str) -> tuple[str, float]:
        started = time.monotonic()
        return node.ask(f"load {prompt} 64"), time.monotonic() - started

    assert node.ask("store a 64") == "stored 64"
    assert node.ask("forget") == "forgotten"
    assert load("a")[0] == "loaded 64"
    node.ask("forget")
    hosts.cut()
    opened = False
    for turn in range(6):
        answer, took = load(f"other-{turn}" if turn else "a")
        assert answer == "loaded 0"
        assert took < BOUND_S
        opened = opened or node.ask("reads") == "open"
    assert opened
    hosts.mend()
    wait_until(lambda: load("a")[0] == "loaded 64", "service after the cable was mended", 120)
    assert node.ask("check") == "idle"


@pytest.mark.slow
def test_cut_link_redis(hosts: Hosts, tmp_path: Path) -> None:
    find_server("redis")
    with FarRedis(tmp_path, hosts) as server:
        tier = {"type": "redis", "url": f"redis://{FAR}:{server.port}/0", "part": "one", "timeout_s": 1.0}
        with NodeProcess(tier, command=Hosts.on(hosts.near)) as node:
            live_through_a_cut(hosts, node)


@pytest.mark.slow
def test_cut_link_mooncake(hosts: Hosts, tmp_path: Path) -> None:
    find_server("mooncake")
    with FarMooncake(tmp_path, hosts) as server:
        tier = {"type": "mooncake", "master": server.master, "metadata": server.metadata, "part": "one"}
        # The engine brings the memory, so what it stored is still there when the master is reached again.
        more = {"admin": server.admin, "segment": 64 << 20, "hostname": "198.18.7.1", "timeout_s": 1.0}
        with NodeProcess({**tier, **more}, command=Hosts.on(hosts.near)) as node:
            live_through_a_cut(hosts, node)
