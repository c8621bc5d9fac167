"""A process that leaves a hung Mooncake master behind ends with its own status, after Python's exit handlers."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, ctypes, sys
from kvstrata.tiers.mooncake.client import end_without_good_bye

c = ctypes.CDLL(None)
c.on_exit(ctypes.cast(c.abort, ctypes.c_void_p), None)  # the exit handler of a library that was there before
c.printf(b"from C ")
atexit.register(lambda: print("from Python", flush=True))
end_without_good_bye()
end_without_good_bye()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 3])
def test_exit_handlers_of_python_run_and_those_of_libraries_do_not(status: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(status)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == status
    assert "from Python" in ended.stdout
    assert "from C" in ended.stdout
