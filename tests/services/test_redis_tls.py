"""The redis tier over TLS: a server whose certificate the given authority signed, and no other."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import RedisServer, free_port
from services_kit import find_server
from services_stack import Runner

from kvstrata.testing.tier_harness import chunk_keys
from kvstrata.tiers.redis import RedisTier


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)


@pytest.fixture
def tls_redis(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """The port of a server that speaks TLS there, and the folder of its certificates."""
    find_server("redis")
    if shutil.which("openssl") is None:
        pytest.skip("redis: openssl is not installed here")
    for name in ("authority", "stranger"):
        subject = ("-subj", f"/CN={name}", "-keyout", f"{tmp_path}/{name}.key", "-out", f"{tmp_path}/{name}.pem")
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject)
    request = ("-subj", "/CN=kv", "-keyout", f"{tmp_path}/kv.key", "-out", f"{tmp_path}/kv.csr")
    openssl("req", "-newkey", "rsa:2048", "-nodes", *request)
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1")
    signer = ("-CA", f"{tmp_path}/authority.pem", "-CAkey", f"{tmp_path}/authority.key", "-CAcreateserial")
    files = ("-in", f"{tmp_path}/kv.csr", "-out", f"{tmp_path}/kv.pem", "-extfile", f"{tmp_path}/names")
    openssl("x509", "-req", "-days", "2", *signer, *files)
    port = free_port()
    certificate = ("--tls-cert-file", f"{tmp_path}/kv.pem", "--tls-key-file", f"{tmp_path}/kv.key")
    ask = ("--tls-ca-cert-file", f"{tmp_path}/authority.pem", "--tls-auth-clients", "no")
    with RedisServer(tmp_path, "--tls-port", str(port), *certificate, *ask):
        yield port, tmp_path


def test_chunks_go_to_redis_over_tls(tls_redis: tuple[int, Path]) -> None:
    port, place = tls_redis
    keys = chunk_keys(20)
    tier = RedisTier(f"rediss://127.0.0.1:{port}/0", ca_file=f"{place}/authority.pem", part="a", timeout_s=10.0)
    with Runner(tier, 20, 100_000) as runner:
        assert len(runner.store(keys)) == 20
        assert set(runner.load(keys).values()) == {None}


def test_a_redis_whose_certificate_another_authority_signed_is_not_used(tls_redis: tuple[int, Path]) -> None:
    port, place = tls_redis
    tier = RedisTier(f"rediss://127.0.0.1:{port}/0", ca_file=f"{place}/stranger.pem", part="a", timeout_s=10.0)
    with Runner(tier, 20, 1000) as runner:
        assert runner.store(chunk_keys(2)) == set()
        assert "does not answer" in tier.notices[0]
