"""Two network namespaces that stand for two hosts, with one cable between them that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

NEAR, FAR = "198.18.7.1", "198.18.7.2"
"""Addresses from the range that is set aside for such tests."""


class Hosts:
    """The near host runs the engine, the far one the server. Made and removed as a context."""

    def __init__(self) -> None:
        mark = os.urandom(3).hex()
        self.near, self.far = f"kvn{mark}", f"kvf{mark}"

    def _ip(self, *arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

    def __enter__(self) -> Hosts:
        try:
            for name in (self.near, self.far):
                self._ip("netns", "add", name)
            self._ip("link", "add", self.near, "netns", self.near, "type", "veth", "peer", self.far, "netns", self.far)
            for name, address in ((self.near, NEAR), (self.far, FAR)):
                self._ip("-n", name, "address", "add", f"{address}/24", "dev", name)
                self._ip("-n", name, "link", "set", "lo", "up")
                self._ip("-n", name, "link", "set", name, "up")
        except OSError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self.near, self.far):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)

    def cut(self) -> None:
        """From now on nothing gets through, and nothing comes back, not even a refusal."""
        self._ip("-n", self.far, "link", "set", self.far, "down")

    def mend(self) -> None:
        """The cable is whole again."""
        self._ip("-n", self.far, "link", "set", self.far, "up")

    @staticmethod
    def on(host: str) -> tuple[str, ...]:
        """What goes before a command to run it on a host."""
        return ("ip", "netns", "exec", host)


def make_hosts() -> Hosts:
    """Two hosts, not entered yet; skips the test where namespaces cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces: needs Debian's iproute2")
    try:
        with Hosts():
            return Hosts()
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
