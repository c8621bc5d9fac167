"""The script that makes the environment: which interpreter it takes, and what it says when none will do.

No test here installs anything: every stand-in ends where an installation would begin.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import checkers
import pytest

SCRIPT = checkers.ROOT / "tools/environment.sh"

TOO_OLD = "exit 1"
SHIM = "echo 'command not found' >&2; exit 127"
# Debian without python3-venv: runs, but makes no environment and has no pip.
NO_ENSUREPIP = f"""
if [[ "$1 $2" == "-m venv" ]]; then mkdir -p "$3/bin"; echo "$(basename "$0")" >> "$LOG"; exit 1; fi
if [[ "$1 $2" == "-m pip" ]]; then exit 1; fi
exec {sys.executable} "$@"
"""
# uv that makes an environment and "installs"; it logs what it was asked.
UV = """
echo "uv $*" >> "$LOG"
if [[ "$1" == venv ]]; then
    mkdir -p "${!#}/bin"
    printf '#!/bin/sh\\n' > "${!#}/bin/python"
    chmod +x "${!#}/bin/python"
fi
"""
UV_BROKEN = 'if [[ "$1" != --version ]]; then exit 2; fi'


def run(
    folder: Path, programs: dict[str, str], setting: str | None = None
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the script with only `programs` on the path; returns how it ended, and what the stand-ins logged."""
    tools = folder / "tools"
    tools.mkdir()
    for name in ("bash", "basename", "mkdir", "rm", "ls", "env", "printf", "chmod"):
        (tools / name).symlink_to(f"/bin/{name}" if Path(f"/bin/{name}").exists() else f"/usr/bin/{name}")
    for name, body in programs.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    environment = {"PATH": str(tools), "HOME": str(folder), "LOG": str(folder / "log")}
    if setting is not None:
        environment["PYTHON"] = setting
    done = subprocess.run(
        ["/bin/bash", str(SCRIPT), str(folder / "venv"), "."],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    log = folder / "log"
    return done, log.read_text() if log.exists() else ""


pytestmark = pytest.mark.skipif(not os.path.exists("/bin/bash"), reason="needs bash at /bin/bash")


def test_without_ensurepip_it_names_the_one_package(tmp_path: Path) -> None:
    done, _ = run(tmp_path, {"python3": NO_ENSUREPIP})
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert done.returncode == 1
    assert f"apt-get install python{version}-venv (or install uv)" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_with_uv_nothing_else_is_needed(tmp_path: Path) -> None:
    done, log = run(tmp_path, {"python3": NO_ENSUREPIP, "uv": UV})
    assert done.returncode == 0, done.stderr
    assert "uv pip install --quiet --python" in log
    assert "python3\n" not in log


def test_a_uv_that_fails_is_done_without(tmp_path: Path) -> None:
    done, log = run(tmp_path, {"python3": NO_ENSUREPIP, "uv": UV_BROKEN})
    assert done.returncode == 1
    assert "uv failed; trying without it" in done.stderr
    assert log.startswith("python3\n")


def test_an_old_python3_and_dead_shims_are_passed_over(tmp_path: Path) -> None:
    programs = {"python3": TOO_OLD, "python3.14": SHIM, "python3.13": NO_ENSUREPIP, "python3.12": NO_ENSUREPIP}
    _, log = run(tmp_path, programs)
    assert set(log.split()) == {"python3.13"}


def test_python3_goes_first_if_it_is_new_enough(tmp_path: Path) -> None:
    _, log = run(tmp_path, {"python3": NO_ENSUREPIP, "python3.14": NO_ENSUREPIP})
    assert set(log.split()) == {"python3"}


def test_the_setting_goes_before_all(tmp_path: Path) -> None:
    _, log = run(tmp_path, {"python3": NO_ENSUREPIP, "mine": NO_ENSUREPIP}, setting="mine")
    assert set(log.split()) == {"mine"}


def test_a_setting_that_does_not_run_is_an_error(tmp_path: Path) -> None:
    done, _ = run(tmp_path, {"python3": NO_ENSUREPIP}, setting="python9")
    assert done.returncode == 1
    assert "PYTHON=python9 does not run, or is older than 3.11" in done.stderr


def test_no_python_at_all_says_what_to_do(tmp_path: Path) -> None:
    done, _ = run(tmp_path, {"python3": TOO_OLD})
    assert done.returncode == 1
    assert "no Python 3.11 or newer found" in done.stderr


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/letter.txt").write_text("dear")
    done, _ = run(tmp_path, {"python3": NO_ENSUREPIP})
    assert done.returncode == 1
    assert "is no virtual environment" in done.stderr
    assert (tmp_path / "venv/letter.txt").exists()
