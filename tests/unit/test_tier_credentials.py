"""Credentials are references: what they stand for is in nothing that a tier says or holds; errors name the setting."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import obstore.exceptions as problems
import pytest
import redis.exceptions as redis_problems

from kvstrata.errors import ConfigError
from kvstrata.testing.tier_harness import TierHarness
from kvstrata.tiers.base import Tier
from kvstrata.tiers.object import ObjectTier
from kvstrata.tiers.object.places import Location, cause_of, credentials_of, explain, open_store
from kvstrata.tiers.redis import RedisTier
from kvstrata.tiers.redis.client import cause_of as redis_cause_of
from kvstrata.tiers.redis.client import explain as redis_explain
from kvstrata.types import FailCause

SECRET = "hunter2-hunter2"
PLACE = Location("s3", "team-kv", "llama")


def test_object_credentials_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("KV_SECRET_ACCESS_KEY", SECRET)
    want = {"access_key_id": "id", "secret_access_key": SECRET}
    assert credentials_of("s3", "env:KV", "o") == want
    ini = tmp_path / "credentials"
    ini.write_text(f"[default]\naws_access_key_id=id\naws_secret_access_key={SECRET}\n[other]\n")
    assert credentials_of("s3", f"file:{ini}", "o") == want
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(ini))
    assert credentials_of("s3", "profile:default", "o") == want
    table = tmp_path / "table.json"
    table.write_text(json.dumps({**want, "session_token": "t"}))
    assert credentials_of("s3", f"file:{table}", "o") == {**want, "session_token": "t"}
    assert credentials_of("s3", "", "o") == credentials_of("s3", "default", "o") == {}
    assert credentials_of("gs", f"file:{table}", "o") == {"service_account_path": str(table)}
    table.write_text(json.dumps({"account_name": "n", "account_key": SECRET}))
    assert credentials_of("az", f"file:{table}", "o") == {"account_name": "n", "account_key": SECRET}


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        (SECRET, "a secret itself has no place"),
        ("env:NOWHERE", "NOWHERE_ACCESS_KEY_ID is missing"),
        ("file:/nowhere/at/all", "/nowhere/at/all"),
        ("profile:nobody", "nobody"),
    ],
)
def test_a_reference_that_leads_nowhere_is_one_line_without_a_secret(
    reference: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ini = tmp_path / "credentials"
    ini.write_text(f"[default]\naws_secret_access_key={SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(ini))
    with pytest.raises(ConfigError, match=said) as caught:
        credentials_of("s3", reference, "tier o: credentials")
    assert str(caught.value).startswith("tier o: credentials: ")
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_file_of_secrets_that_is_not_what_it_should_be(tmp_path: Path) -> None:
    for text in (f"{{{SECRET}", f"[{SECRET}", f'["{SECRET}"]', f"[default]\nkey={SECRET}"):
        file = tmp_path / "secrets"
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            credentials_of("s3", f"file:{file}", "o")
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url", [f"s3://user:{SECRET}@bucket", f"s3://bucket?token={SECRET}", "ftp://bucket", "s3://", ""]
)
def test_urls_that_no_object_tier_takes(url: str) -> None:
    with pytest.raises(ConfigError, match="tier object: url") as caught:
        ObjectTier(url)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url", [f"redis://u:{SECRET}@host", f"unix://s?password={SECRET}", "http://host", "redis://", ""]
)
def test_urls_that_no_redis_tier_takes(url: str) -> None:
    with pytest.raises(ConfigError, match="tier redis: url") as caught:
        RedisTier(url)
    assert SECRET not in str(caught.value)


def open_refused(tier: Tier) -> str:
    """Open a tier whose server nobody runs; what it says."""
    rig = TierHarness(tier, chunk_bytes=64, slots=2)
    rig.tier.open(rig.context())
    rig.poll()
    said = [*getattr(tier, "notices", []), repr(tier), str(tier.self_test())]
    rig.close()
    return "\n".join(map(str, said))


@pytest.mark.parametrize("kind", ["object", "redis", "redis-url"])
def test_no_secret_is_in_anything_that_a_tier_says(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(0)
    monkeypatch.setenv("KV_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("KV_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("KV_URL", f"redis://:{SECRET}@127.0.0.1:1/0")
    tier: Tier
    if kind == "object":
        tier = ObjectTier(
            "s3://bucket/x", endpoint="http://127.0.0.1:1", region="r", credentials="env:KV", part="p", timeout_s=0.2
        )
    elif kind == "redis":
        tier = RedisTier("redis://127.0.0.1:1/0", password="env:KV_SECRET_ACCESS_KEY", part="p", timeout_s=0.2)
    else:
        tier = RedisTier("env:KV_URL", part="p", timeout_s=0.2)
    said = open_refused(tier)
    assert "does not answer" in said
    captured = capfd.readouterr()
    for text in (said, caplog.text, captured.out, captured.err, repr(vars(tier))):
        assert SECRET not in text
    assert SECRET not in repr(vars(getattr(tier, "_client")))  # noqa: B009
    gc.collect()


@pytest.mark.parametrize(
    ("error", "said", "cause"),
    [
        (problems.GenericError("<Code>NoSuchBucket</Code>"), "no such bucket (NoSuchBucket); check url", "refused"),
        (problems.NotFoundError("<Code>NoSuchBucket</Code>"), "no such bucket (NoSuchBucket); check url", "refused"),
        (problems.PermissionDeniedError("status code: 403"), "refused (403); check credentials", "refused"),
        (problems.UnauthenticatedError("x"), "refused; check credentials", "refused"),
        (
            problems.GenericError("<Code>InvalidAccessKeyId</Code>"),
            "(InvalidAccessKeyId); check credentials",
            "refused",
        ),
        (
            problems.GenericError("status code: 403 <Code>AuthorizationFailure</Code>"),
            "(AuthorizationFailure); check credentials",
            "refused",
        ),
        (problems.GenericError("status code: 401 Unauthorized"), "refused (401); check credentials", "refused"),
        (problems.GenericError("<Code>PermanentRedirect</Code>"), "another region (PermanentRedirect)", "refused"),
        (problems.GenericError("incorrectly configured region"), "another region; check region", "refused"),
        (problems.GenericError("GET http://169.254.169.254/latest"), "no credentials were found", "io_error"),
        (problems.GenericError("operation timed out"), "does not answer", "timeout"),
        (problems.GenericError("connection refused"), "does not answer; check endpoint", "io_error"),
        (problems.NotFoundError("x"), "does not answer", "gone"),
        (problems.GenericError("status code: 507"), "does not answer (507)", "no_space"),
        (problems.NotSupportedError("x"), "create an object only if there is none", "io_error"),
    ],
)
def test_what_an_object_store_says_is_one_line_that_names_the_setting(error: Exception, said: str, cause: str) -> None:
    line = str(explain(error, PLACE))
    assert said in line
    assert line.startswith("s3://team-kv/llama")
    assert "\n" not in line
    assert cause_of(error) is FailCause(cause)


@pytest.mark.parametrize(
    ("error", "said", "cause"),
    [
        (redis_problems.AuthenticationError(SECRET), "check username and password", "refused"),
        (redis_problems.ResponseError("NOAUTH x"), "check username and password", "refused"),
        (redis_problems.NoPermissionError(SECRET), "check username and its ACL", "refused"),
        (redis_problems.ReadOnlyError("x"), "read-only replica; check url", "refused"),
        (redis_problems.ResponseError("WRONGTYPE x"), "check prefix", "refused"),
        (redis_problems.ConnectionError(SECRET), "does not answer", "io_error"),
        (redis_problems.TimeoutError("x"), "does not answer", "timeout"),
        (redis_problems.OutOfMemoryError("x"), "does not answer", "no_space"),
        (redis_problems.RedisClusterException("x"), "is no cluster", "io_error"),
    ],
)
def test_what_redis_says_is_one_line_that_names_the_setting(error: Exception, said: str, cause: str) -> None:
    line = str(redis_explain(error, "redis://host"))
    assert said in line
    assert line.startswith("redis://host")
    assert SECRET not in line
    assert redis_cause_of(error) is FailCause(cause)


def test_stores_of_all_kinds_can_be_made(tmp_path: Path) -> None:
    account = {"account_name": "n", "account_key": "a2V5"}
    for kind, credentials, endpoint in (
        ("s3", {"access_key_id": "i", "secret_access_key": SECRET}, "http://127.0.0.1:1"),
        ("az", account, ""),
        ("memory", {}, ""),
        ("file", {}, ""),
    ):
        where = Location(kind, str(tmp_path / "x") if kind == "file" else "bucket", "")
        how: dict[str, Any] = {"credentials": credentials, "endpoint": endpoint, "region": ""}
        store = open_store(where, **how, timeout_s=1.0)
        assert SECRET not in repr(store)
