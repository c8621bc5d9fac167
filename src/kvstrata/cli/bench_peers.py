"""What `kvstrata bench disk` is checked against: fio for the raw script, vLLM's file-system tier for the disk tier.

Both are programs of their own. What is not installed is left out, and said so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstrata.errors import CapacityError
from kvstrata.primary.region import SharedRegion

FIO_AGREEMENT = 0.10
"""How far the raw figures may be from fio's."""
FIO_PAIRS = 5
_FIO_BUFFER = 4 << 20


def fio_is_there() -> bool:
    """Whether fio is installed."""
    return shutil.which("fio") is not None


def fio_gbps(file: Path, op: str, io: int, size: int, threads: int, cpus: tuple[int, ...]) -> float:
    """One pass of fio's psync engine over a file that was written before, in raw's order: its jobs take turns.

    Each job has a buffer in huge pages, as raw's threads have: over ordinary pages both are up to twice as slow, by how
    scattered the memory is that they happen to get.
    """
    part = size // threads // io * io
    skipped = (threads - 1) * io
    buffers = max(_FIO_BUFFER, io)
    with contextlib.ExitStack() as stack:
        regions = [stack.enter_context(SharedRegion(2 * buffers, name="fio-buffer")) for _ in range(threads)]
        command = ["fio", "--group_reporting", "--output-format=json"]
        for turn, region in enumerate(regions):
            command += [f"--name=raw{turn}", f"--filename={file}", "--ioengine=psync", "--direct=1", f"--bs={io}"]
            command += [f"--rw={op}:{skipped}" if skipped else f"--rw={op}", f"--offset={turn * io}"]
            command += [f"--size={size - skipped}", f"--io_size={part}", "--allow_file_create=0"]
            command += [f"--iodepth={buffers // io}", f"--iomem=mmapshared:/proc/self/fd/{region.fileno()}"]
            command += ["--scramble_buffers=0", *(["--end_fsync=1"] if op == "write" else [])]
            command += [f"--cpus_allowed={','.join(map(str, cpus))}"] if cpus else []
        handles = [region.fileno() for region in regions]
        done = subprocess.run(command, capture_output=True, text=True, check=False, pass_fds=handles)
    if done.returncode:
        raise CapacityError(f"fio failed: {done.stderr.strip().splitlines()[-1:]}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job[op]["bw_bytes"]) / 1e9


def fio_check(raw: Callable[[], float], fio: Callable[[], float]) -> dict[str, Any]:
    """Raw beside fio, alternating: medians, and the median of the pair ratios."""
    pairs = [(raw(), fio()) for _ in range(FIO_PAIRS)]
    ratio = statistics.median(mine / theirs for mine, theirs in pairs)
    return {
        "raw_gbps": round(statistics.median(mine for mine, _ in pairs), 3),
        "fio_gbps": round(statistics.median(theirs for _, theirs in pairs), 3),
        "ratio": round(ratio, 3),
        "agrees": abs(ratio - 1.0) <= FIO_AGREEMENT,
    }


def find_vllm(given: str) -> str | None:
    """The interpreter that has vLLM: the given one, or ours if it does."""
    return given or (sys.executable if importlib.util.find_spec("vllm") is not None else None)


def vllm_figures(interpreter: str, script: Path, place: Path, size: int, chunk: int) -> dict[str, Any]:
    """What `bench/vllm_fs.py` says for chunks of one size."""
    command = [interpreter, str(script), str(place), "--bytes", str(size), "--chunk", str(chunk)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    shutil.rmtree(place, ignore_errors=True)
    if done.returncode:
        raise CapacityError(f"vLLM's tier could not be measured: {done.stderr.strip().splitlines()[-1:]}")
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return told
