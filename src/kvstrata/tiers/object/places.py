"""From a URL and a reference to credentials to a store of obstore, and from its errors to causes and clear lines."""

from __future__ import annotations

import configparser
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore.exceptions
import obstore.store

from kvstrata.errors import ConfigError
from kvstrata.tiers.common.claims import PlaceError
from kvstrata.tiers.server.secrets import read_secret_file
from kvstrata.types import FailCause

CONNECT_S = 2.0
RETRIES = 2

_S3_FIELDS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
_FIELDS = {
    "s3": ("access_key_id", "secret_access_key", "session_token"),
    "gs": ("service_account_path",),
    "az": ("account_name", "account_key", "sas_token", "client_id", "client_secret", "tenant_id"),
}
_NEEDED = {"s3": ("access_key_id", "secret_access_key"), "gs": ("service_account_path",), "az": ("account_name",)}

MISSING = (obstore.exceptions.NotFoundError, FileNotFoundError)
EXISTING = (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError, FileExistsError)
DENIED = (obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError, PermissionError)


@dataclass(frozen=True, slots=True)
class Location:
    """Where the objects are: the kind of store, its bucket or container, and the prefix inside it."""

    kind: str
    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        """As it was configured; there are no secrets in it."""
        return f"{self.kind}://{self.bucket}/{self.prefix}".rstrip("/")


def locate(url: str, option: str) -> Location:
    """The parts of s3://BUCKET/PREFIX, gs://..., az://CONTAINER/..., file:///FOLDER or memory://. No secrets in it."""
    if not isinstance(url, str) or not url:
        raise ConfigError(f"{option}: is needed, as s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX")
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(f"{option}: must hold no user, password or token; credentials are given by reference")
    if parts.scheme not in ("s3", "gs", "az", "file", "memory"):
        raise ConfigError(f"{option}: {parts.scheme!r} is not known; there are s3, gs, az, file and memory")
    if parts.scheme in _FIELDS and not parts.netloc:
        raise ConfigError(f"{option}: {url} names no bucket")
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        raise ConfigError(f"{option}: {url} must be file:///FOLDER")
    if parts.scheme == "file":
        return Location("file", parts.path, "")
    return Location(parts.scheme, parts.netloc, parts.path.strip("/"))


def credentials_of(kind: str, reference: str, option: str) -> dict[str, str]:
    """What a reference stands for, as settings of the store. Empty: the library looks by itself.

    env:PREFIX (variables PREFIX_ACCESS_KEY_ID and so on), profile:NAME (of the AWS credentials file), file:/PATH (JSON
    with the fields, an AWS credentials file, or a GCS service account). Raises `ConfigError` without any secret in it.
    """
    how, _, what = reference.partition(":")
    if reference in ("", "default") or kind not in _FIELDS:
        found: dict[str, str] = {}
    elif how == "env" and what:
        found = {name: os.environ.get(f"{what}_{name}".upper(), "") for name in _FIELDS[kind]}
        _check_found(kind, found, option, lambda name: "the environment variable " + f"{what}_{name}".upper())
    elif how == "profile" and what and kind == "s3":
        path = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or str(Path.home() / ".aws" / "credentials")
        found = _read_profile(path, what, option)
    elif how == "file" and what and kind == "gs":
        read_secret_file(what, option)
        found = {"service_account_path": what}
    elif how == "file" and what:
        found = _read_file(kind, what, option)
    else:
        raise ConfigError(
            f"{option}: write default, env:PREFIX, profile:NAME or file:/PATH; a secret itself has no place here"
        )
    return {name: value for name, value in found.items() if value}


def _check_found(kind: str, found: Mapping[str, str], option: str, describe: Any) -> None:
    for name in _NEEDED[kind]:
        if not found.get(name):
            raise ConfigError(f"{option}: {describe(name)} is missing")


def _read_profile(path: str, profile: str, option: str) -> dict[str, str]:
    return _profile_of(read_secret_file(path, option), path, profile, option)


def _profile_of(text: str, path: str, profile: str, option: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
        section = dict(parser[profile])
    except (configparser.Error, KeyError):
        raise ConfigError(f"{option}: {path} has no profile {profile!r}") from None
    found = {ours: section.get(theirs, "") for theirs, ours in _S3_FIELDS.items()}
    _check_found("s3", found, option, lambda name: f"aws_{name} of profile {profile!r} in {path}")
    return found


def _read_file(kind: str, path: str, option: str) -> dict[str, str]:
    text = read_secret_file(path, option)
    if kind == "s3" and not text.lstrip().startswith("{"):
        return _profile_of(text, path, "default", option)
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{option}: {path} is not JSON") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{option}: {path} is not a table of fields")
    found = {name: str(table.get(name, "")) for name in _FIELDS[kind]}
    _check_found(kind, found, option, lambda name: f"{name} in {path}")
    return found


def open_store(
    location: Location, *, credentials: Mapping[str, str], endpoint: str, region: str, timeout_s: float
) -> obstore.store.ObjectStore:
    """A store that is ready for requests; none was made yet. Raises `PlaceError`."""
    client: Any = {
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=min(CONNECT_S, timeout_s)),
        "allow_http": endpoint.startswith("http://"),
    }
    retry: Any = {
        "max_retries": RETRIES,
        "retry_timeout": timedelta(seconds=timeout_s),
        "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(milliseconds=500), "base": 2},
    }
    settings: dict[str, Any] = dict(credentials)
    try:
        match location.kind:
            case "memory":
                return obstore.store.MemoryStore()
            case "file":
                return obstore.store.LocalStore(location.bucket, mkdir=True)
            case "s3":
                settings |= {"endpoint": endpoint} if endpoint else {}
                settings |= {"region": region} if region else {}
                return obstore.store.S3Store(location.bucket, client_options=client, retry_config=retry, **settings)
            case "gs":
                return obstore.store.GCSStore(location.bucket, client_options=client, retry_config=retry, **settings)
            case _:
                settings |= {"endpoint": endpoint} if endpoint else {}
                return obstore.store.AzureStore(location.bucket, client_options=client, retry_config=retry, **settings)
    except Exception as error:  # the library's own, and what it raises of Python's
        raise PlaceError(
            f"{location.url} cannot be used ({type(error).__name__}); check credentials", permanent=True
        ) from None


_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_OTHER_REGION = (
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraint",
    "incorrectly configured region",
    "TemporaryRedirect",
)
_REFUSED = (
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "ExpiredToken", "InvalidToken"),
    *("AuthenticationFailed", "AuthorizationFailure", "status code: 401", "status code: 403"),
)
"""Lists are refused without an exception of their own, whoever keeps the store."""
_NO_CREDENTIALS = ("169.254.169.254", "metadata.google.internal", "InstanceCredentials", "load_credentials")
_SLOW = ("timed out", "TimedOut", "timeout", "operation timed", "deadline")
_FULL = ("QuotaExceeded", "InsufficientStorage", "EntityTooLarge", "status code: 507")


def cause_of(error: BaseException) -> FailCause:
    """What an error of the library means for one object. Whatever is not known may pass."""
    text = str(error)
    if any(word in text for word in _NO_BUCKET):
        return FailCause.REFUSED
    if isinstance(error, MISSING):
        return FailCause.GONE
    if isinstance(error, DENIED) or any(word in text for word in (*_REFUSED, *_OTHER_REGION)):
        return FailCause.REFUSED
    if any(word in text for word in _FULL):
        return FailCause.NO_SPACE
    if isinstance(error, TimeoutError) or any(word in text for word in _SLOW):
        return FailCause.TIMEOUT
    return FailCause.IO_ERROR


def explain(error: BaseException, location: Location) -> PlaceError:
    """One line that names the setting to look at. Nothing of the request is repeated: it may hold a token."""
    text = str(error)
    code = _CODE.search(text) or _STATUS.search(text)
    said = f" ({code[1]})" if code else ""
    if any(word in text for word in _NO_BUCKET):
        return PlaceError(f"{location.url}: there is no such bucket{said}; check url", permanent=True)
    if any(word in text for word in _OTHER_REGION):
        return PlaceError(f"{location.url}: the bucket is in another region{said}; check region", permanent=True)
    if isinstance(error, DENIED) or any(word in text for word in _REFUSED):
        return PlaceError(f"{location.url}: the credentials are refused{said}; check credentials", permanent=True)
    if any(word in text for word in _NO_CREDENTIALS):
        return PlaceError(f"{location.url}: no credentials were found; check credentials", permanent=True)
    if isinstance(error, obstore.exceptions.NotSupportedError | NotImplementedError):
        return PlaceError(f"{location.url}: the store cannot create an object only if there is none", permanent=True)
    return PlaceError(f"{location.url} does not answer{said}; check endpoint, or wait")
