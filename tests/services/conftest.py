"""Fixtures of the services tests, and the rule about servers that are missing.

A test whose server is not installed is skipped by its name. `KVSTRATA_REQUIRE=object,redis` turns such a skip into a
failure, and fails the run if no test of one of these passed. At the end every server's version and number of tests are
printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import MooncakeServer, RedisServer, S3Server
from services_kit import KNOWN, REQUIRED, VERSIONS, find_server
from services_stack import SERVERS, Place

_passed: dict[str, int] = {}


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A fresh Redis."""
    find_server("redis")
    with RedisServer(_folder(tmp_path, "redis")) as server:
        yield server


@pytest.fixture
def s3_server(tmp_path: Path) -> Iterator[S3Server]:
    """A fresh S3 with one bucket."""
    find_server("object")
    with S3Server(_folder(tmp_path, "s3")) as server:
        yield server


@pytest.fixture(scope="module")
def shared_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One server for all contract tests of a module; each has a prefix of its own."""
    find_server("object")
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def mooncake_server(tmp_path: Path) -> Iterator[MooncakeServer]:
    """A fresh Mooncake master."""
    find_server("mooncake")
    with MooncakeServer(_folder(tmp_path, "mooncake")) as server:
        yield server


@pytest.fixture(params=sorted(SERVERS))
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A fresh server of each kind."""
    kind: str = request.param
    find_server(kind)
    monkeypatch.setenv("KVS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("KVS_SECRET_ACCESS_KEY", "test")
    with SERVERS[kind](_folder(tmp_path, kind)) as server:
        yield Place(kind, server)


def _folder(tmp_path: Path, name: str) -> Path:
    place = tmp_path / name
    place.mkdir()
    return place


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.services)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        for name in KNOWN:
            if re.search(rf"(_|\[|-){name}(_|\]|-|\.|$)", report.nodeid):
                _passed[name] = _passed.get(name, 0) + 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if VERSIONS or REQUIRED:
        for name in sorted({*VERSIONS, *REQUIRED}):
            version = VERSIONS.get(name, "not installed")
            terminalreporter.write_line(f"services: {name}: {version}: {_passed.get(name, 0)} tests passed")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if any(not _passed.get(name) for name in REQUIRED) and exitstatus == 0 and not session.config.option.collectonly:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
