"""`kvstrata doctor`: can this machine run this configuration? One line per check, and what to do where it cannot."""

from __future__ import annotations

import contextlib
import enum
import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvstrata.config import Config, TierConfig, config_from_dict, load_config
from kvstrata.errors import ConfigError, KVStrataError
from kvstrata.integrations.vllm.identity import hash_seed
from kvstrata.integrations.vllm.settings import default_tier
from kvstrata.integrations.vllm.stack import ladder_doubts, tier_options
from kvstrata.integrations.vllm.versions import TESTED, installed_version, is_tested
from kvstrata.primary.limits import read_memory_rooms, tightest
from kvstrata.primary.region import SharedRegion
from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.executor import ThreadExecutor
from kvstrata.runtime.guard import GuardedTier
from kvstrata.tiers.base import Clock, TierContext
from kvstrata.tiers.registry import is_shared, make_tier
from kvstrata.tiers.server.tier import ServerTier

SPEED_BYTES = 64 << 20
PIECE = 4 << 20
SLOW_BYTES_PER_S = 200e6
TRIAL_REGION = 8 << 20


class Verdict(enum.StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, what to do."""

    verdict: Verdict
    what: str
    text: str
    advice: str = ""

    def line(self) -> str:
        """The line."""
        advice = f"  -> {self.advice}" if self.advice else ""
        return f"{self.verdict:<4}  {self.what}: {self.text}{advice}"


def doctor(
    config: Annotated[Path | None, typer.Option(help="Configuration file (.json, .toml, .yaml).")] = None,
    size: Annotated[str, typer.Option(help="Size of primary, as 8GiB, where there is no file.")] = "",
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Folder of the disk tier; the plug-in's usual one by default.")
    ] = None,
    limit: Annotated[str, typer.Option(help="Limit of the disk tier, as 200GB; the plug-in's rule by default.")] = "",
) -> None:
    """Check the machine and a configuration: memory, folder, direct I/O, space, speed, vLLM, hash seed, tiers."""
    if config is not None and (size or directory is not None or limit):
        raise ConfigError("doctor: --config says all; leave out --size, --dir and --limit")
    settings = load_config(config) if config is not None else _given(size, directory, limit)
    worst = Verdict.OK
    for finding in examine(settings):
        typer.echo(finding.line())
        worst = max(worst, finding.verdict, key=list(Verdict).index)
    if worst is Verdict.FAIL:
        raise typer.Exit(1)


def _given(size: str, directory: Path | None, limit: str) -> Config:
    """What the vLLM plug-in makes of the same options: one disk tier, in its usual folder if none is named."""
    config = config_from_dict({"primary": {"size": size}} if size else {})
    tier = default_tier(config.primary.size, directory, limit, "--limit")
    return Config(primary=config.primary, core=config.core, tiers=(tier,))


def examine(config: Config, clock: Clock | None = None) -> Iterator[Finding]:
    """All findings for a configuration, in order."""
    clock = SystemClock() if clock is None else clock
    yield from _memory(config)
    yield _engine()
    yield _seed()
    for doubt in ladder_doubts(config):
        yield Finding(Verdict.WARN, "sizes", doubt, "a larger limit, or no such tier")
    for tier in config.tiers:
        options = tier_options(tier.options, tier.name)
        path = options.get("path")
        if isinstance(path, str):
            yield from _folder(tier.name, Path(path), options.get("limit"), clock)
        if is_shared(tier.type, options) and not options.get("secret"):
            text = "who can write there can change what the engine computes: records are checked, not signed"
            yield Finding(Verdict.WARN, tier.name, text, "secret, or only parties that trust each other")
        if not isinstance(path, str):
            yield from _store(tier)
        yield _self_test(tier, clock)


def _store(entry: TierConfig) -> Iterator[Finding]:
    """What can be said of a tier over a server without asking it."""
    try:
        tier = make_tier(entry.type, name=entry.name, **tier_options(entry.options, entry.name))
    except KVStrataError:
        return  # the self-test says it
    if not isinstance(tier, ServerTier):
        return
    if entry.options.get("limit") is None:
        yield Finding(Verdict.WARN, entry.name, "no limit is set; nothing of the part is ever evicted", "set limit")
    if not entry.options.get("part"):
        said = f"its part is this host's name, {tier.part}"
        advice = "set part, if the name changes over restarts or two engines run here"
        yield Finding(Verdict.WARN, entry.name, said, advice)


def _memory(config: Config) -> Iterator[Finding]:
    size = config.primary.size
    room = tightest(read_memory_rooms())
    if room is not None and room.available < size:
        yield Finding(Verdict.FAIL, "memory", f"primary of {size} bytes, but {room.describe()}", "a smaller primary")
    elif room is not None and room.available < 2 * size:
        yield Finding(
            Verdict.WARN,
            "memory",
            f"primary of {size} bytes takes more than half of what is left: {room.describe()}",
            "a smaller primary, or more memory for the container",
        )
    else:
        left = "no limit is known here" if room is None else room.describe()
        yield Finding(Verdict.OK, "memory", f"primary of {size} bytes; {left}")
    try:
        with SharedRegion(min(size, TRIAL_REGION)):
            yield Finding(Verdict.OK, "shared memory", f"a trial of {min(size, TRIAL_REGION)} bytes could be backed")
    except (KVStrataError, OSError) as error:
        yield Finding(Verdict.FAIL, "shared memory", str(error), "allow the container memory files (memfd)")


def _engine() -> Finding:
    version = installed_version()
    known = ", ".join(f"{series}.x" for series in TESTED)
    if version is None:
        return Finding(Verdict.WARN, "vLLM", "is not installed here", f"install one of {known} to use the connector")
    if not is_tested(version):
        return Finding(Verdict.FAIL, "vLLM", f"{version} is not supported", f"use one of {known}")
    return Finding(Verdict.OK, "vLLM", f"{version} is supported")


def _seed() -> Finding:
    seed = os.environ.get("PYTHONHASHSEED")
    if seed == "random":
        return Finding(
            Verdict.FAIL, "hash seed", "PYTHONHASHSEED is random: no chunk is found again", "unset it, or a number"
        )
    if hash_seed("sha256") is None:
        return Finding(Verdict.FAIL, "hash seed", "the engine draws a random one", "PYTHONHASHSEED=0")
    words = "is vLLM's fixed one (for sha256)" if seed is None else f"is {seed}; it must stay the same over restarts"
    return Finding(Verdict.OK, "hash seed", words)


def _folder(name: str, path: Path, limit: int | None, clock: Clock) -> Iterator[Finding]:
    place = next((parent for parent in (path, *path.parents) if parent.exists()), Path("/"))
    if not place.is_dir() or not os.access(place, os.W_OK):
        yield Finding(Verdict.FAIL, name, f"{place} is no folder that can be written", "another dir, or its owner")
        return
    if path.exists() and path.stat().st_mode & 0o002:
        yield Finding(Verdict.FAIL, name, f"{path} may be written by everybody", f"chmod o-w {path}")
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    if limit is None:
        yield Finding(Verdict.WARN, name, f"no limit is set; {free} bytes are free", "set limit")
    elif limit > free:
        yield Finding(Verdict.WARN, name, f"limit {limit} is above the {free} bytes that are free", "a lower limit")
    else:
        yield Finding(Verdict.OK, name, f"{path}: limit {limit}, {free} bytes free")
    yield from _speed(name, place, clock)


def _speed(name: str, place: Path, clock: Clock) -> Iterator[Finding]:
    """Write and read a file of some pieces, past the cache of the system if that works."""
    path = place / f".kvstrata-doctor-{os.getpid()}"
    direct = True
    try:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        except OSError:
            direct = False
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            written, read = _rates(file, clock)
        finally:
            os.close(file)
    except OSError as error:
        advice = "another dir, or free space" if error.errno == errno.ENOSPC else "another dir, or its owner"
        yield Finding(Verdict.FAIL, name, f"{place} cannot be written: {error.strerror}", advice)
        return
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    if direct:
        yield Finding(Verdict.OK, name, "direct I/O works")
    else:
        yield Finding(Verdict.WARN, name, "no direct I/O here; buffered I/O costs memory and a copy", "a local disk")
    slow = min(written, read) < SLOW_BYTES_PER_S
    advice = "restores may be slower than computing" if slow else ""
    text = f"writes {written / 1e6:.0f} MB/s, reads {read / 1e6:.0f} MB/s"
    yield Finding(Verdict.WARN if slow else Verdict.OK, name, text, advice)


def _rates(file: int, clock: Clock) -> tuple[float, float]:
    with mmap.mmap(-1, PIECE) as piece:  # aligned, as direct I/O needs it
        piece[:] = os.urandom(4096) * (PIECE // 4096)
        rates = []
        for transfer in (_write, _read):
            begun = clock.monotonic()
            for at in range(0, SPEED_BYTES, PIECE):
                transfer(file, piece, at)
            if transfer is _write:
                os.fsync(file)
            rates.append(SPEED_BYTES / max(clock.monotonic() - begun, 1e-9))
        return rates[0], rates[1]


def _write(file: int, piece: mmap.mmap, at: int) -> None:
    if os.pwrite(file, piece, at) != PIECE:
        raise OSError(errno.ENOSPC, "the device is full")


def _read(file: int, piece: mmap.mmap, at: int) -> None:
    with memoryview(piece) as view:
        os.preadv(file, [view], at)


def _self_test(entry: TierConfig, clock: Clock) -> Finding:
    """Open the tier as it is configured, store and read back one chunk, close it."""
    executor = ThreadExecutor(f"doctor-{entry.name}", 2)
    try:
        with SharedRegion(TRIAL_REGION) as region:
            tier = GuardedTier(make_tier(entry.type, name=entry.name, **tier_options(entry.options, entry.name)))
            tier.open(TierContext(region.view, bytes(16), 0, clock, executor, region_fd=region.fileno()))
            trouble = tier.self_test()
            tier.close()
    except Exception as error:  # a tier of an outside author may raise anything
        trouble = str(error) or type(error).__name__
    finally:
        executor.close(1.0)
    if trouble is None:
        return Finding(Verdict.OK, entry.name, "self-test: what was written was read back")
    return Finding(
        Verdict.FAIL,
        entry.name,
        f"self-test: {trouble}",
        "mend it, or leave the tier out: the engine would run without it",
    )
