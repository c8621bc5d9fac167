"""`kvstrata bench disk`: the disk tier beside a raw file in one run, alternating, as ratios.

Raw is `bench/raw_disk.py`, a script of its own: a preallocated, once-written file, direct I/O, calls of
max(1 MiB, chunk), the best of 2, 8, 16 and 64 threads. The tier stores fresh chunks into segments that were written
before, and loads count only bytes that were verified and lie in primary. Where fio is installed raw must agree with
it, and where vLLM is, its file-system tier is measured beside.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvstrata.cli.bench_peers import find_vllm, fio_check, fio_gbps, fio_is_there, vllm_figures
from kvstrata.errors import CapacityError, ConfigError
from kvstrata.primary.region import SharedRegion
from kvstrata.runtime.clock import SystemClock, thread_cpu_s
from kvstrata.runtime.executor import Signal, ThreadExecutor
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.disk import DiskTier
from kvstrata.types import FailCause, JobEnded, KeysDone, OffloadKey, TierJob, make_key

_UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_THREADS = (2, 8, 16, 64)
_THREADS_FIO = 16
"""Most threads that fio is asked for: it makes a process of each, and with more they do not begin and end together."""
_THREADS_RANDOM = (*_THREADS, 32)
"""The tier has up to 32 small loads at the disk."""
_JOB_CHUNKS = 64
_RANDOM_CALLS = 4000


def parse_bytes(text: str) -> int:
    """A size such as "256KiB" or "65536". Raises `ConfigError`."""
    lowered = text.strip().lower()
    unit = next((name for name in _UNITS if lowered.endswith(name)), "")
    try:
        value = int(lowered.removesuffix(unit)) * _UNITS.get(unit, 1)
    except ValueError:
        value = 0
    if value < 512:
        raise ConfigError(f"--sizes: {text!r} is not a size such as 32KiB, 256KiB or 4MiB")
    return value


@dataclass(frozen=True, slots=True)
class Settings:
    """One run: directory, bytes per pass, pairs, cores for the I/O side."""

    place: Path
    volume: int
    pairs: int
    cpus: tuple[int, ...]
    scripts: Path
    io_process: bool
    vllm: str | None = None


@dataclass(slots=True)
class Pass:
    """What one pass over the data took."""

    gbps: float
    cpu_s: float = 0.0
    thread_s: float = 0.0
    submit_s: float = 0.0
    poll_s: float = 0.0
    chunks: int = 0


class Raw:
    """Runs the raw script; remembers the best number of threads per kind of call."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._best: dict[tuple[str, int, bool], int] = {}
        self._best_for_fio: dict[tuple[str, int], int] = {}
        self.direct = True
        self.file = settings.place / "raw.bin"

    def measure(self, op: str, chunk: int, *, random: bool = False, fresh: bool = False) -> Pass:
        """One pass; the first one of its kind tries all numbers of threads."""
        io = chunk if random else max(1 << 20, chunk)
        known = self._best.get((op, io, random))
        if known is not None:
            return self._run(op, io, known, random, fresh)
        found = {
            threads: self._run(op, io, threads, random, fresh) for threads in (_THREADS_RANDOM if random else _THREADS)
        }
        best = max(found, key=lambda threads: found[threads].gbps)
        if not fresh:
            self._best[op, io, random] = best
            few = [threads for threads in found if threads <= _THREADS_FIO]
            if not random:
                self._best_for_fio[op, io] = max(few, key=lambda threads: found[threads].gbps)
        return found[best]

    def _run(self, op: str, io: int, threads: int, random: bool, fresh: bool, arena: int = 0) -> Pass:
        s = self._settings
        file = self.file.with_name("raw-fresh.bin") if fresh else self.file
        command = [sys.executable, str(s.scripts / "raw_disk.py"), str(file), "--bytes", str(s.volume // io * io)]
        command += ["--io", str(io), "--threads", str(threads), "--op", op]
        command += ["--random", "--calls", str(_RANDOM_CALLS)] if random else []
        command += ["--fresh"] if fresh else []
        command += ["--arena", str(arena)] if arena else []
        command += ["--cpus", ",".join(map(str, s.cpus))] if s.cpus else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if fresh:
            file.unlink(missing_ok=True)
        if done.returncode:
            raise CapacityError(f"the raw measurement failed: {done.stderr.strip().splitlines()[-1:]}")
        told = json.loads(done.stdout)
        self.direct &= bool(told["direct"])
        return Pass(told["gbps"], told["cpu_s"], chunks=told["bytes"] // io)

    def check(self, op: str, chunk: int) -> dict[str, Any]:
        """The same calls by fio, beside raw with as much memory as fio has: one buffer for each thread.

        The figures that the tier is compared with are those of `measure`: their calls go through memory as the tier's
        do, which has to bring every chunk to a place of its own.
        """
        io, s = max(1 << 20, chunk), self._settings
        threads, size = self._best_for_fio[op, io], s.volume // io * io
        told = fio_check(
            lambda: self._run(op, io, threads, False, False, threads * io).gbps,
            lambda: fio_gbps(self.file, op, io, size, threads, s.cpus),
        )
        return {"fio": op, "io": io, "threads": threads, **told}


class Bench:
    """One opened tier with chunks of one size."""

    def __init__(self, settings: Settings, chunk: int) -> None:
        self._settings = settings
        self.chunk = chunk
        self.count = settings.volume // chunk
        self._region = SharedRegion(self.count * chunk).open()
        self._view = np.frombuffer(self._region.view, np.uint8)
        self._executor = ThreadExecutor("bench", threads=16)
        self._signal = Signal()
        self._clock = SystemClock()
        self._jobs = 0
        self._folder = settings.place / f"tier-{chunk}"
        shutil.rmtree(self._folder, ignore_errors=True)
        self.tier = DiskTier(
            path=str(self._folder),
            limit=settings.volume * 2 + (settings.volume >> 1),
            # The size that a limit of some GiB comes to: small segments change too often for full speed.
            segment_bytes=max(settings.volume // 4, 4 * chunk),
            largest_chunk=chunk,
            io_process=settings.io_process,
            pin_cpus=settings.cpus,
            queue_bytes=2 * settings.volume,
        )
        self.tier.open(self._context())
        self._fill(0)

    def _context(self) -> TierContext:
        return TierContext(
            self._region.view, b"bench-namespace!", 1, self._clock, self._executor, self._signal.set,
            self._region.fileno(),
        )  # fmt: skip

    def close(self) -> None:
        """Close the tier and remove its directory."""
        self.tier.close()
        self._executor.close(5.0)
        del self._view
        self._region.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _fill(self, round_number: int) -> None:
        # Every chunk of every round has its own bytes, so that no stale one could pass for it.
        rng = np.random.default_rng(round_number)
        words = self._view[: len(self._view) // 8 * 8].view(np.uint64)
        step = 1 << 20
        pattern = rng.integers(0, 1 << 63, size=step, dtype=np.uint64)
        for number, at in enumerate(range(0, len(words), step)):
            part = words[at : at + step]
            np.add(pattern[: len(part)], np.uint64(number * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF), out=part)

    def keys(self, round_number: int) -> list[OffloadKey]:
        """The keys of a round."""
        rng = np.random.default_rng(1000 + round_number)
        raw = rng.bytes(32 * self.count)
        return [make_key(raw[at : at + 32], 0) for at in range(0, len(raw), 32)]

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Drop the chunks of a round, so that the next one finds segments that hold nothing.

        The log entries of that are written before this returns: they are no part of what the next round costs.
        """
        for at in range(0, len(keys), 1024):
            self.tier.remove(keys[at : at + 1024])
        if not self.tier.drain(30.0):
            raise CapacityError("removed chunks were not logged in 30 s")
        self.tier.poll()

    def store(self, keys: Sequence[OffloadKey]) -> Pass:
        """Store a round in jobs of 64 neighbouring chunks."""
        return self._timed(keys, list(range(self.count)), _JOB_CHUNKS, load=False)

    def load(self, keys: Sequence[OffloadKey], *, random: bool = False) -> Pass:
        """Load a round in stored order, or single chunks in random order."""
        order = list(range(self.count))
        if random:
            order = np.random.default_rng(3).permutation(self.count).tolist()[:_RANDOM_CALLS]
        return self._timed([keys[i] for i in order], order, 1 if random else _JOB_CHUNKS, load=True)

    def _timed(self, keys: Sequence[OffloadKey], slots: list[int], per_job: int, *, load: bool) -> Pass:
        chunk, jobs = self.chunk, []
        for at in range(0, len(keys), per_job):
            part = slots[at : at + per_job]
            self._jobs += 1
            jobs.append(
                TierJob(self._jobs, keys[at : at + per_job], [slot * chunk for slot in part], [chunk] * len(part))
            )
        submit = self.tier.submit_load if load else self.tier.submit_store
        gc.collect()
        gc.freeze()
        cpu, thread = self._cpu(), thread_cpu_s()
        begin = self._clock.monotonic()
        for job in jobs:
            submit(job)
        submitted = thread_cpu_s() - thread
        polled = self._wait({job.job_id for job in jobs}, len(keys))
        seconds = self._clock.monotonic() - begin
        gbps = len(keys) * chunk / seconds / 1e9
        return Pass(gbps, self._cpu() - cpu, thread_cpu_s() - thread, submitted, polled, len(keys))

    def _wait(self, jobs: set[int], expected: int) -> float:
        """Poll until all have ended; returns the CPU seconds of the thread in the polls."""
        done, polled = 0, 0.0
        while True:
            self._signal.clear()
            begin = thread_cpu_s()
            events = self.tier.poll()
            polled += thread_cpu_s() - begin
            for event in events:
                if isinstance(event, KeysDone):
                    done += len(event.done)
                elif isinstance(event, JobEnded):
                    jobs.discard(event.job_id)
            if not jobs:
                break
            self._signal.wait(10.0)
        if done != expected:
            raise CapacityError(f"only {done} of {expected} chunks of {self.chunk} bytes worked: {self._failures()}")
        return polled

    def _failures(self) -> dict[FailCause, int]:
        return self.tier.statistics().failures

    def _cpu(self) -> float:
        own = resource.getrusage(resource.RUSAGE_SELF)
        total = own.ru_utime + own.ru_stime
        process = self.tier.io_process_id
        if process is not None:
            fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total

    def bytes_are_right(self, keys: Sequence[OffloadKey], round_number: int) -> bool:
        """Load everything over zeroed slots and compare with what was stored."""
        wanted = self._view.copy()
        self._view[:] = 0
        self.load(keys)
        return bool((self._view == wanted).all())


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


def run_size(settings: Settings, chunk: int, raw: Raw) -> list[dict[str, Any]]:
    """All rows of one chunk size."""
    bench = Bench(settings, chunk)
    try:
        fresh_raw = raw.measure("write", chunk, fresh=True)
        keys = bench.keys(0)
        first = bench.store(keys)
        if not bench.bytes_are_right(keys, 0):
            raise CapacityError(f"chunks of {chunk} bytes did not come back as they were stored")
        rows: list[dict[str, Any]] = [
            _row(chunk, "first_fill", [first], [], [fresh_raw], [], raw.direct),
        ]
        for warm in range(1, 4):  # every segment is written once
            bench.remove(keys)
            keys = bench.keys(warm)
            bench.store(keys)
        stores, loads, raw_stores, raw_loads, scattered, raw_scattered = ([] for _ in range(6))
        for pair in range(settings.pairs):
            bench.remove(keys)
            keys = bench.keys(10 + pair)
            raw_stores.append(raw.measure("write", chunk))
            stores.append(bench.store(keys))
            raw_loads.append(raw.measure("read", chunk))
            loads.append(bench.load(keys))
            raw_scattered.append(raw.measure("read", chunk, random=True))
            scattered.append(bench.load(keys, random=True))
        rows.append(_row(chunk, "stored", stores, loads, raw_stores, raw_loads, raw.direct))
        _add_vllm(rows[-1], settings, chunk)
        rows.append(_row(chunk, "random", [], scattered, [], raw_scattered, raw.direct))
        return rows
    finally:
        bench.close()


def _row(
    chunk: int, order: str, stores: list[Pass], loads: list[Pass], raw_stores: list[Pass], raw_loads: list[Pass],
    direct: bool,
) -> dict[str, Any]:  # fmt: skip
    row: dict[str, Any] = {"size": chunk, "order": order}
    for name, ours, raws in (("store", stores, raw_stores), ("load", loads, raw_loads)):
        row[f"{name}_gbps"] = _median([each.gbps for each in ours]) if ours else None
        row[f"raw_{name}_gbps"] = _median([each.gbps for each in raws]) if raws else None
        pairs = [a.gbps / b.gbps for a, b in zip(ours, raws, strict=False)]
        row[f"{name}_ratio"] = _median(pairs) if pairs else None
        if ours and order == "stored":
            extra = [(a.cpu_s - b.cpu_s) / a.chunks * 1e6 for a, b in zip(ours, raws, strict=False)]
            row[f"{name}_cpu_us_per_chunk"] = _median(extra)
            row[f"{name}_engine_us_per_chunk"] = _median([each.thread_s / each.chunks * 1e6 for each in ours])
            row[f"{name}_submit_us_per_chunk"] = _median([each.submit_s / each.chunks * 1e6 for each in ours])
            row[f"{name}_poll_us_per_chunk"] = _median([each.poll_s / each.chunks * 1e6 for each in ours])
    row["buffered"] = not direct
    return row


def _add_vllm(row: dict[str, Any], settings: Settings, chunk: int) -> None:
    if settings.vllm is None:
        return
    place = settings.place / "vllm"
    told = vllm_figures(settings.vllm, settings.scripts / "vllm_fs.py", place, settings.volume, chunk)
    for name in ("store", "load"):
        row[f"vllm_{name}_gbps"] = told[f"{name}_gbps"]
        row[f"vllm_{name}_ratio"] = round(row[f"{name}_gbps"] / told[f"{name}_gbps"], 3)
    row["vllm"] = {key: told[key] for key in ("version", "direct", "native")}


def _scripts() -> Path:
    return Path(__file__).resolve().parents[3] / "bench"


def _check_raw(raw: Raw, chunks: Sequence[int]) -> list[dict[str, Any]]:
    """Raw beside fio for every kind of call that was measured; nothing where fio is not installed."""
    if not fio_is_there():
        typer.echo("fio is not installed: the raw figures were not checked", err=True)
        return []
    largest = {max(1 << 20, chunk): chunk for chunk in chunks}
    return [raw.check(op, chunk) for chunk in largest.values() for op in ("write", "read")]


def _measure(settings: Settings, chunks: Sequence[int]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows, told as they come, and the checks of raw."""
    raw = Raw(settings)
    rows: list[dict[str, Any]] = []
    for chunk in chunks:
        for row in run_size(settings, chunk, raw):
            rows.append(row)
            typer.echo(json.dumps(row))
    checks = _check_raw(raw, chunks)
    for check in checks:
        typer.echo(json.dumps(check))
    return rows, checks


def disk(
    directory: Annotated[Path, typer.Argument(help="Where to measure; files are made and removed there.")],
    sizes: Annotated[str, typer.Option(help="Chunk sizes.")] = "32KiB,256KiB,4MiB",
    volume: Annotated[str, typer.Option(help="Bytes per pass.")] = "512MiB",
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of raw and tier.")] = 5,
    pin: Annotated[str, typer.Option(help="Cores for the I/O process and for raw, such as 1 or 2,3.")] = "",
    threads: Annotated[bool, typer.Option("--threads", help="I/O in threads of this process.")] = False,
    scripts: Annotated[Path | None, typer.Option(help="Folder of raw_disk.py and vllm_fs.py.")] = None,
    vllm_python: Annotated[str, typer.Option(help="An interpreter that has vLLM, to measure its tier beside.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
) -> None:
    """Measure the disk tier beside a raw file; ends with 1 if fio is installed and raw is not within 10 % of it."""
    folder = scripts or _scripts()
    if not (folder / "raw_disk.py").is_file():
        raise ConfigError(f"--scripts: {folder} has no raw_disk.py")
    chunks = [parse_bytes(text) for text in sizes.split(",")]
    place = directory / "kvstrata-bench"
    place.mkdir(parents=True, exist_ok=True)
    cpus = tuple(int(cpu) for cpu in pin.split(",") if cpu)
    settings = Settings(place, parse_bytes(volume), pairs, cpus, folder, not threads, find_vllm(vllm_python))
    try:
        rows, checks = _measure(settings, chunks)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")
    if not all(check["agrees"] for check in checks):
        typer.echo("the raw figures differ from fio's by more than 10 %", err=True)
        raise typer.Exit(1)
