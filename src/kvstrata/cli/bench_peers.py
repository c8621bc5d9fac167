"""What `kvstrata bench disk` is checked against: fio for the raw script, vLLM's file-system tier for the disk tier.

Both are programs of their own. What is not installed is left out, and said so.
"""

from __future__ import annotations

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

FIO_AGREEMENT = 0.10
"""How far the raw figures may be from fio's."""
FIO_PAIRS = 5


def fio_is_there() -> bool:
    """Whether fio is installed."""
    return shutil.which("fio") is not None


def fio_gbps(file: Path, op: str, io: int, size: int, threads: int, cpus: tuple[int, ...]) -> float:
    """One pass of fio's psync engine over a file that was written before, in raw's order: threads take turns."""
    part = size // threads // io * io
    skipped = (threads - 1) * io
    command = ["fio", "--name=raw", f"--filename={file}", "--ioengine=psync", "--direct=1", "--thread"]
    command += [f"--rw={op}:{skipped}" if skipped else f"--rw={op}", f"--bs={io}", f"--numjobs={threads}"]
    command += [f"--size={size - skipped}", f"--io_size={part}", f"--offset_increment={io}"]
    command += [
        "--group_reporting",
        "--output-format=json",
        "--allow_file_create=0",
        "--scramble_buffers=0",
        "--iomem=thp",
    ]
    command += ["--end_fsync=1"] if op == "write" else []
    command += [f"--cpus_allowed={','.join(map(str, cpus))}"] if cpus else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
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
