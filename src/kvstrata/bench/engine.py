"""One real engine in a process of its own that serves prompts when it is told to, and times them.

    python -m kvstrata.bench.engine TASK COMMANDS_FD ANSWERS_FD

`TASK` is JSON; then one JSON command a line comes in and one answer a line goes out. `EngineProcess` is the other end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvstrata.errors import ConfigError
from kvstrata.runtime.clock import SystemClock
from kvstrata.runtime.executor import Signal

BLOCK_TOKENS = 128
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
BYTES_PER_TOKEN = 16 * 8 * 64 * 2 * 2
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
}
DIE_WITH_PARENT = 1
LEFT_BY_STOCK = Path("/dev/shm/vllm_offload_{}.mmap")
"""vLLM's tiering leaves its primary behind, as a file that takes memory, under the engine's id."""
SHORT_PROMPTS = 200
"""Number of the first of the prompts that share nothing with the long ones."""


class EngineProcess:
    """An engine of `system` ("kvstrata" or "stock") whose model and tiers lie in the folder `place`."""

    def __init__(self, place: Path, system: str) -> None:
        self.system = system
        read_commands, commands = os.pipe()
        answers, write_answers = os.pipe()
        self._log = place / f"{system}.log"
        self._name = f"kvstrata-bench-{os.getpid()}-{commands}"
        task = {"place": str(place), "system": system, "engine_id": self._name}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvstrata.bench.engine"),
                    *(json.dumps(task), str(read_commands), str(write_answers)),
                ],
                pass_fds=(read_commands, write_answers),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT},
            )
        os.close(read_commands)
        os.close(write_answers)
        self._commands, self._answers = os.fdopen(commands, "w"), os.fdopen(answers, "r")
        try:
            self.tell("ready")
        except BaseException:
            self.close()
            raise

    def tell(self, name: str, **arguments: Any) -> Any:
        """Have the engine's process do something. Raises `ConfigError` with what it printed if it ended instead."""
        line = ""
        try:
            self._commands.write(json.dumps({"name": name, "arguments": arguments}) + "\n")
            self._commands.flush()
            line = self._answers.readline()
        except BrokenPipeError:
            pass
        if not line:
            self.process.wait(60)
            said = self._log.read_text(errors="replace")[-2000:]
            raise ConfigError(f"bench engine: the {self.system} engine failed: {said}")
        return json.loads(line)

    def serve(self, length: int, number: int) -> tuple[float, int]:
        """Seconds to the first token of a prompt, and how many of its tokens were not computed."""
        seconds, cached = self.tell("serve", length=length, number=number)
        return float(seconds), int(cached)

    def close(self) -> None:
        """End the engine in order, or else at once. Idempotent."""
        for stream in (self._commands, self._answers):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(60)
        LEFT_BY_STOCK.with_name(LEFT_BY_STOCK.name.format(self._name)).unlink(missing_ok=True)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pause(seconds: float) -> None:
    """Let other threads and processes work."""
    clock, flag = SystemClock(), Signal()
    end = clock.monotonic() + seconds
    while (left := end - clock.monotonic()) > 0:
        flag.wait(left)


# what runs in the engine's process


class Server:
    """The engine and the commands on it."""

    def __init__(self, place: Path, system: str, engine_id: str) -> None:
        vllm: Any = importlib.import_module("vllm")
        self.place = place
        self.clock = SystemClock()
        connector, extra = _extra(place, system)
        transfer = importlib.import_module("vllm.config").KVTransferConfig(
            kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra, engine_id=engine_id
        )
        self.llm = vllm.LLM(
            str(place / "model"),
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=8192,
            max_num_batched_tokens=8192,
            dtype="bfloat16",
            kv_transfer_config=transfer,
            enable_prefix_caching=True,
            seed=0,
        )
        self.asked = vllm.TokensPrompt
        self.sampling = vllm.SamplingParams(max_tokens=1, temperature=0, detokenize=False)

    def serve(self, length: int, number: int) -> tuple[float, int]:
        """Serve one prompt; seconds to its first token, and the tokens that were not computed."""
        tokens = [(i * 7919 + i * i * 31 + number * 104_729) % 1000 + 3 for i in range(length)]
        begun = self.clock.monotonic()
        (out,) = self.llm.generate([self.asked(prompt_token_ids=tokens)], self.sampling, use_tqdm=False)
        return self.clock.monotonic() - begun, int(out.num_cached_tokens)

    def ready(self) -> None:
        """Answered once the engine serves."""

    def reset(self) -> None:
        """Empty the engine's own cache."""
        self.llm.reset_prefix_cache()

    def floor(self, size: int, repeats: int) -> dict[str, list[float]]:
        """Seconds of copying and of reading `size` bytes."""
        return {
            "copy": copy_times(size, repeats, self.clock),
            "read": read_times(self.place, size, repeats, self.clock),
        }

    def stop(self) -> None:
        """End the engine."""
        self.llm.llm_engine.engine_core.shutdown()


def _extra(place: Path, system: str) -> tuple[str, dict[str, Any]]:
    if system == "kvstrata":
        tier = {"type": "disk", "path": str(place / "kvstrata"), "limit": "4GiB"}
        return "KVStrataConnector", {"primary": {"size": "1GiB"}, "tiers": [tier]}
    return "OffloadingConnector", {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "kvstrata.integrations.vllm.host_spec",
        "cpu_bytes_to_use": 1 << 30,
        "secondary_tiers": [{"type": "fs", "root_dir": str(place / "stock")}],
    }


def copy_times(size: int, repeats: int, clock: SystemClock) -> list[float]:
    """Seconds of torch's copy of as many contiguous bytes, between memory that was written before."""
    torch: Any = importlib.import_module("torch")
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    target.copy_(source)
    times = []
    for _ in range(repeats):
        begun = clock.monotonic()
        target.copy_(source)
        times.append(clock.monotonic() - begun)
    return times


def read_times(place: Path, size: int, repeats: int, clock: SystemClock) -> list[float]:
    """Seconds of reading as many bytes from the disk below `place`, 8 MiB at a time, past the page cache."""
    path, whole, times = place / "raw", size // 4096 * 4096, []
    mmap: Any = importlib.import_module("mmap")
    with mmap.mmap(-1, whole) as memory:
        memory[:] = os.urandom(4096) * (whole // 4096)
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o600)
        view = memoryview(memory)
        try:
            for at in range(0, whole, 8 << 20):
                os.pwrite(file, view[at : at + (8 << 20)], at)
            os.fsync(file)
            for _ in range(repeats):
                begun = clock.monotonic()
                for at in range(0, whole, 8 << 20):
                    os.preadv(file, [view[at : at + (8 << 20)]], at)
                times.append(clock.monotonic() - begun)
        finally:
            view.release()
            os.close(file)
            path.unlink()
    return times


def main() -> None:
    """Serve commands until the pipe closes."""
    importlib.import_module("ctypes").CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    task = json.loads(sys.argv[1])
    with os.fdopen(int(sys.argv[2]), "r") as commands, os.fdopen(int(sys.argv[3]), "w") as answers:
        server = Server(Path(task["place"]), task["system"], task["engine_id"])
        try:
            for line in commands:
                told = json.loads(line)
                answers.write(json.dumps(getattr(server, told["name"])(**told["arguments"])) + "\n")
                answers.flush()
        finally:
            server.stop()


if __name__ == "__main__":
    main()
