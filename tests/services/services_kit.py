"""Finds the servers of the services tests, or says which one is missing."""

from __future__ import annotations

import importlib.util
import os

import pytest
from servers import AzureServer, MooncakeServer, RedisServer, S3Server, Server

REQUIRED = [name for name in os.environ.get("KVSTRATA_REQUIRE", "").split(",") if name]
KNOWN = ("object", "redis", "mooncake", "azure")

VERSIONS: dict[str, str] = {}
"""Of the servers that were looked for and found."""


def find_server(name: str) -> type[Server]:
    """The class of a server that can be started here; skips or fails the test if there is none."""
    if name == "redis" and RedisServer.program() is not None:
        VERSIONS[name] = RedisServer.version()
        return RedisServer
    if name == "object" and importlib.util.find_spec("moto") and importlib.util.find_spec("boto3"):
        VERSIONS[name] = S3Server.version()
        return S3Server
    if name == "mooncake" and MooncakeServer.program() is not None and importlib.util.find_spec("mooncake"):
        VERSIONS[name] = MooncakeServer.version()
        return MooncakeServer
    if name == "azure" and AzureServer.program() is not None:
        VERSIONS[name] = AzureServer.version()
        return AzureServer
    missing = f"{name}: no server for it is installed here; make test-services installs it"
    if name in REQUIRED:
        pytest.fail(missing)
    pytest.skip(missing)
