"""What all commands share: one line for every expected trouble, and exit codes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import typer

from kvstrata import __version__
from kvstrata.cli import app as app_module
from kvstrata.cli.app import build_app, run
from kvstrata.errors import CapacityError, ConfigError

COMMANDS = [name for name in app_module.COMMANDS if importlib.util.find_spec(f"kvstrata.cli.{name}")]


def sample() -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None, add_completion=False)

    @app.command()
    def bad() -> None:
        raise ConfigError("case.json: line 3:\n  no such kind")

    @app.command()
    def full() -> None:
        raise CapacityError("no room")

    @app.command()
    def good(count: int = 1) -> None:
        typer.echo("x" * count)

    @app.command()
    def stop() -> None:
        raise KeyboardInterrupt

    @app.command()
    def partly() -> None:
        raise typer.Exit(3)

    @app.command()
    def bug() -> None:
        raise ZeroDivisionError

    return app


def test_an_error_of_kvstrata_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(sample(), ["bad"]) == 2
    assert capsys.readouterr() == ("", "kvstrata: case.json: line 3: no such kind\n")
    assert run(sample(), ["full"]) == 2
    assert capsys.readouterr().err == "kvstrata: no room\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nosuch"], "nosuch"),
        (["good", "--nosuch"], "--nosuch"),
        (["good", "--count", "many"], "'--count'"),
        (["good", "extra"], "extra"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(sample(), arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("kvstrata: ")
    assert words in err
    assert "--help" in err


def test_exit_codes_pass_through(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(sample(), ["good", "--count", "3"]) == 0
    assert capsys.readouterr().out == "xxx\n"
    assert run(sample(), ["partly"]) == 3
    assert run(sample(), ["stop"]) == 130


def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        run(sample(), ["bug"])


def test_the_main_commands_are_there() -> None:
    assert {"resolve", "replay", "bench"} <= set(COMMANDS)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_app(), ["--version"]) == 0
    assert capsys.readouterr().out == f"kvstrata {__version__}\n"
    assert run(build_app(), []) == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert command in out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_app(), [command, "--help"]) == 0
    assert command in capsys.readouterr().out


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    program = "import sys; from kvstrata.cli.app import main; sys.argv = ['kvstrata', '--help']; main()"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
