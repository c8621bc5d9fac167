"""The command line: `kvstrata COMMAND`. Each command lives in its own module; here is what they share.

Exit codes: 0 done; 1 the reader of the output went away; 2 bad input or usage, told in one line on stderr; 130
interrupted. A traceback means a bug of kvstrata.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence

import typer

from kvstrata import __version__
from kvstrata.errors import KVStrataError

COMMANDS = ("resolve", "replay", "bench", "fsck", "inspect", "doctor")
"""Modules of `kvstrata.cli`; each has a typer `app`, or a function of the same name."""

BAD_INPUT = 2
INTERRUPTED = 130
READER_GONE = 1

# typer brought its own copy of click at some version; both have this base of all errors of usage.
_UsageTrouble: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException" and issubclass(kind, Exception)
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvstrata {__version__}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Keep the KV cache of LLM inference on a ladder of tiers, and bring back exactly what a request consumes."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def build_app() -> typer.Typer:
    """The application with all commands."""
    app = typer.Typer(
        name="kvstrata", callback=_root, invoke_without_command=True, add_completion=False, rich_markup_mode=None
    )
    for name in COMMANDS:
        if importlib.util.find_spec(f"kvstrata.cli.{name}") is None:
            continue
        module = importlib.import_module(f"kvstrata.cli.{name}")
        group = getattr(module, "app", None)
        if isinstance(group, typer.Typer):
            app.add_typer(group, name=name)
        else:
            app.command(name=name)(getattr(module, name))
    return app


def run(app: typer.Typer, arguments: Sequence[str] | None = None) -> int:
    """Run `app` and return its exit code; every expected trouble becomes one line on stderr."""
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="kvstrata", standalone_mode=False)
        sys.stdout.flush()
    except KVStrataError as error:
        return _complain(str(error))
    except _UsageTrouble as error:
        return _complain(_usage_message(error))
    except typer.Exit as error:
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except SystemExit as error:  # typer's own answer to a reader that went away
        return error.code if isinstance(error.code, int) else READER_GONE
    except BrokenPipeError:
        # What is still buffered would raise again when the interpreter flushes at exit.
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return READER_GONE
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of the `kvstrata` script."""
    # Commands say what the operator has to read; the library's log would only say it twice.
    logging.getLogger("kvstrata").addHandler(logging.NullHandler())
    sys.exit(run(build_app()))


def _complain(message: str) -> int:
    print(f"kvstrata: {' '.join(message.split())}", file=sys.stderr)
    return BAD_INPUT


def _usage_message(error: BaseException) -> str:
    """The message of a usage error, and where to find help."""
    text = getattr(error, "format_message", lambda: str(error))()
    context = getattr(error, "ctx", None)
    return text if context is None else f"{text.rstrip('.')}. Try '{context.command_path} --help'."
