"""`kvstrata fsck`: verify every record of a disk tier's directory, report by cause, drop what is bad.

With `--release PART` it frees a part of a directory that engines share (tier fs), and its quota; with `--config FILE`
a part of the store of the tier that is named instead of a directory.

Exit codes: 0 nothing bad (or all of it dropped), 3 something bad is there, 2 the directory cannot be looked at.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvstrata.cli.bench_tier import find_tier
from kvstrata.errors import ConfigError
from kvstrata.integrations.vllm.stack import tier_options
from kvstrata.tiers.disk.io import SystemFiles
from kvstrata.tiers.disk.survey import Survey, repair, survey
from kvstrata.tiers.fs.release import release_part
from kvstrata.tiers.registry import make_tier
from kvstrata.tiers.server.tier import ServerTier

BAD_FOUND = 3


def fsck(
    directory: Annotated[Path, typer.Argument(help="The directory of a disk tier; with --config the name of a tier.")],
    do_repair: Annotated[bool, typer.Option("--repair", help="Drop what is bad; nobody may be using it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    release: Annotated[str, typer.Option("--release", help="Free this part of a shared directory (tier fs).")] = "",
    config: Annotated[Path | None, typer.Option(help="Configuration with the tier that is named instead.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Its owner was on another host and is gone.")] = False,
) -> None:
    """Verify every record in a disk tier's directory, or free a part of a shared one."""
    if config is not None:
        _release_in_store(config, str(directory), release, force=force, as_json=as_json)
        return
    if release:
        _release(str(directory), release, force=force, as_json=as_json)
        return
    files = SystemFiles()
    found = survey(files, str(directory), verify=True)
    if do_repair:
        found.repaired = repair(files, str(directory))
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        _print(found, repaired=do_repair)
    if not do_repair and is_bad(found):
        raise typer.Exit(BAD_FOUND)


def _release(directory: str, part: str, *, force: bool, as_json: bool) -> None:
    freed = release_part(directory, part, this_host_only=not force)
    if as_json:
        typer.echo(json.dumps(asdict(freed)))
    else:
        typer.echo(f"{directory}: part {part}: {freed.files} files, {freed.bytes} bytes freed")
        for name in freed.kept:
            typer.echo(f"  not ours, or would not go, left alone: {name}; the claim stays")
    if freed.kept:
        raise typer.Exit(BAD_FOUND)


def _release_in_store(config: Path, name: str, part: str, *, force: bool, as_json: bool) -> None:
    entry = find_tier(name, config, "")
    tier = make_tier(entry.type, name=entry.name, **tier_options(entry.options, entry.name))
    if not part or not isinstance(tier, ServerTier):
        raise ConfigError("--config: is for --release PART of a tier over a server")
    freed = tier.release(part, this_host_only=not force)
    if as_json:
        typer.echo(json.dumps(asdict(freed)))
    else:
        typer.echo(f"{name}: part {part}: {freed.records} records, {freed.bytes} bytes freed")
        if freed.kept:
            typer.echo(f"  {freed.kept} records would not go; the claim stays")
    if freed.kept:
        raise typer.Exit(BAD_FOUND)


def is_bad(found: Survey) -> bool:
    """Whether anything of the directory cannot be used."""
    return bool(found.bad or found.rejected or found.leftovers or found.checkpoint not in ("ok", "none"))


def _print(found: Survey, *, repaired: bool) -> None:
    typer.echo(
        f"{found.path}: {len(found.segments)} segments, {found.records} records held, {found.verified} verified, "
        f"{found.superseded} superseded"
    )
    for cause, count in sorted(found.bad.items()):
        typer.echo(f"  records, {cause}: {count}")
    for cause, count in sorted(found.rejected.items()):
        typer.echo(f"  header blocks, {cause}: {count}")
    typer.echo(f"  checkpoint: {found.checkpoint}")
    for name in found.leftovers:
        typer.echo(f"  left over: {name}")
    for name in found.foreign_files:
        typer.echo(f"  not ours, left alone: {name}")
    if found.in_use:
        typer.echo("  in use by another process: what it is writing now may be reported as bad")
    if repaired:
        typer.echo(f"  dropped: {found.repaired} records")
