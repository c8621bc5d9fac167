"""Real engines for tests: each in a process of its own, told what to do line by line (engine_host.py)."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SLOW_TYPES = {"qwen3next": "bfloat16"}  # its kernels exist in one type only
PATIENCE_S = float(os.environ.get("KVSTRATA_ENGINE_PATIENCE_S", "270"))
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Small models gain nothing by more threads, and those spin for each other whenever another process runs."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}


def data_type(model: str) -> str:
    """The type in which a test model runs."""
    return SLOW_TYPES.get(model, "float32")


def prompt(length: int, seed: int = 1) -> list[int]:
    """A fixed prompt; another seed gives another one from the first token on."""
    return [(i * 7919 + i * i * 31 + seed * 104729) % 1000 + 3 for i in range(length)]


def storage(folder: Path, tier: str = "disk", **options: Any) -> dict[str, Any]:
    """A configuration with one tier below `folder`."""
    entry = {"type": tier, "name": "disk", "path": str(folder), "limit": "512MiB"}
    return {"primary": {"size": "128MiB"}, "tiers": [entry], **options}


class EngineError(AssertionError):
    """The host raised; the text is its trace."""


class Engine:
    """A host process. Methods of the host are called as methods of this."""

    def __init__(
        self, model: Path, extra: dict[str, Any] | None, environment: dict[str, str] | None = None, **options: Any
    ) -> None:
        read_commands, self._commands_fd = os.pipe()
        self._answers_fd, write_answers = os.pipe()
        settings = {
            **ONE_THREAD,
            **os.environ,
            "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
            **(environment or {}),
        }
        self.log = model.parent / f"{model.name}-{os.getpid()}-{self._commands_fd}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "engine_host.py"), str(read_commands), str(write_answers)],
                pass_fds=(read_commands, write_answers),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=settings,
                cwd=HERE,
            )
        os.close(read_commands)
        os.close(write_answers)
        self._commands = os.fdopen(self._commands_fd, "w")
        self._answers = os.fdopen(self._answers_fd, "r")
        options.setdefault("dtype", data_type(model.name))
        self.engine_id = f"kvstrata-test-{os.getpid()}-{self._commands_fd}"
        if extra is not None:
            options["engine_id"] = self.engine_id
        try:
            self.started = self.tell("start", model=str(model), extra=extra, options=options)
        except BaseException:
            self.kill()
            raise

    def tell(self, name: str, **arguments: Any) -> Any:
        """Have the host run a command. One that hangs is killed after `PATIENCE_S`, with its stack in the error."""
        self._commands.write(json.dumps({"name": name, "arguments": arguments}) + "\n")
        self._commands.flush()
        if not select.select([self._answers], [], [], PATIENCE_S)[0]:
            self.process.send_signal(signal.SIGUSR1)
            select.select([self._answers], [], [], 2)
            self.process.kill()
            raise EngineError(f"{name} took more than {PATIENCE_S} s\n{self.tail(6000)}")
        line = self._answers.readline()
        if not line:
            raise EngineError(f"the host died\n{self.tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"] + self.tail(1500))
        return answer["result"]

    def __getattr__(self, name: str) -> Any:
        return lambda **arguments: self.tell(name, **arguments)

    def tail(self, characters: int = 4000) -> str:
        """The end of what the host printed."""
        return self.log.read_text(errors="replace")[-characters:]

    def kill(self) -> None:
        """End the process at this instant."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        self._close()

    def close(self) -> None:
        """End in order."""
        if self.process.poll() is None:
            self.tell("stop")
            self._commands.close()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(30)
                raise
        self._close()

    def _close(self) -> None:
        # vLLM's own tiering leaves its primary behind when its process is killed.
        Path("/dev/shm", f"vllm_offload_{self.engine_id}.mmap").unlink(missing_ok=True)
        for stream in (self._commands, self._answers):
            try:
                stream.close()
            except OSError:
                continue

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def one(engine: Engine, asked: list[int], **options: Any) -> dict[str, Any]:
    """Serve one prompt alone."""
    (answer,) = engine.generate(prompts=[asked], **options)
    return dict(answer)


def difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    """The largest difference of log-probabilities; infinite if the tokens differ."""
    if first["tokens"] != second["tokens"]:
        return float("inf")
    return max(abs(a - b) for a, b in zip(first["logprobs"], second["logprobs"], strict=True))
