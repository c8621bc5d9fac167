"""What a real server says of a wrong setting is one line that names the setting; right references work."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers import RedisServer, S3Server
from services_stack import Place, Runner

from kvstrata.errors import ConfigError
from kvstrata.testing.tier_harness import chunk_keys
from kvstrata.tiers.object import ObjectTier
from kvstrata.tiers.redis import RedisTier

PASSWORD = "a-long-password"


def check(tier: object) -> None:
    """The tier stores and loads."""
    with Runner(tier, 4, 1000) as runner:  # type: ignore[arg-type]
        assert len(runner.store(chunk_keys(4))) == 4
        assert set(runner.load(chunk_keys(4)).values()) == {None}


def test_a_bucket_that_is_missing_is_named_by_object(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("KVS_SECRET_ACCESS_KEY", PASSWORD)
    place = Place("object", s3_server)
    with pytest.raises(ConfigError, match=r"s3://nobody/kv: there is no such bucket \(NoSuchBucket\); check url"):
        check(place.make("mine", url="s3://nobody/kv"))


def test_another_region_is_named_by_object(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("KVS_SECRET_ACCESS_KEY", PASSWORD)
    place = Place("object", s3_server)
    said = r"s3://kvbucket/kv: the bucket is in another region \(AuthorizationHeaderMalformed\); check region"
    with pytest.raises(ConfigError, match=said) as caught:
        check(place.make("mine", region="eu-central-1"))
    assert PASSWORD not in str(caught.value)
    check(place.make("mine"))


def test_credentials_of_object_by_profile_and_file(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    file.write_text(f"[kv]\naws_access_key_id = test\naws_secret_access_key = {PASSWORD}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    where = {"endpoint": s3_server.endpoint, "region": "us-east-1", "timeout_s": 10.0}
    url = f"s3://{S3Server.BUCKET}/kv"
    check(ObjectTier(url, part="one", credentials="profile:kv", **where))  # type: ignore[arg-type]
    file.write_text(f'{{"access_key_id": "test", "secret_access_key": "{PASSWORD}"}}')
    check(ObjectTier(url, part="two", credentials=f"file:{file}", **where))  # type: ignore[arg-type]


def test_a_large_object_goes_in_pieces(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("KVS_SECRET_ACCESS_KEY", PASSWORD)
    place, keys, size = Place("object", s3_server), chunk_keys(2), 20 << 20
    with Runner(place.make("mine", multipart_bytes=16 << 20), 2, size) as runner:
        s3_server.behave()
        assert len(runner.store(keys)) == 2
        assert s3_server.counts()["POST"] >= 4, "each begins and completes"
        assert set(runner.load(keys).values()) == {None}


def test_passwords_and_rights_of_redis(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_PASSWORD", PASSWORD)
    host = f"127.0.0.1:{redis_server.port}"
    rights = ("~kvstrata:*", "+@read", "+@write", "+@connection", "+eval", "+info")
    redis_server.say("ACL", "SETUSER", "kv", "on", f">{PASSWORD}", *rights)
    redis_server.say("ACL", "SETUSER", "reader", "on", f">{PASSWORD}", "~*", "+ping", "+hkeys", "+hget", "+client")
    redis_server.say("CONFIG", "SET", "requirepass", "another")
    url = f"redis://{host}/0"
    check(RedisTier(url, username="kv", password="env:KV_PASSWORD", part="one"))
    monkeypatch.setenv("KV_URL", f"redis://kv:{PASSWORD}@{host}/0")
    check(RedisTier("env:KV_URL", part="two"))
    for said, tier in (
        ("check username and password", RedisTier(url, part="three")),
        ("check username and password", RedisTier(url, username="other", password="env:KV_PASSWORD", part="three")),
        ("check username and its ACL", RedisTier(url, username="reader", password="env:KV_PASSWORD", part="three")),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            check(tier)
        assert PASSWORD not in str(caught.value)
