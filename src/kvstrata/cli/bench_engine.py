"""`kvstrata bench engine`: time to the first token of a restored long prompt, in a real vLLM on this machine's CPUs.

Four engines are started one after the other, each in a process of its own: kvstrata, kvstrata again after a restart,
vLLM's own tiering under a stand-in worker, and that again. Each serves the same prompts; in the first run they are
computed, then restored from primary, and after the restart from disk. Beside them, in the same run, what a restore
cannot do without: torch's copy of as many contiguous bytes, reading them from the disk, and one engine step that
computes what is not restored. That step is the same prompt served again out of the engine's own prefix cache: it
computes the same last tokens behind the same context, and nothing else.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstrata.errors import ConfigError
from kvstrata.integrations.vllm.versions import require_supported
from kvstrata.runtime.clock import SystemClock

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
BAR = 1.25
"""A restore may take at most this many times the sum of what it cannot do without."""


def engine(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures into this file.")] = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="Folder on the disk to measure.")] = None,
    tokens: Annotated[int, typer.Option(help="Length of the prompts.")] = 4000,
    repeats: Annotated[int, typer.Option(help="How many prompts; medians of them are reported.")] = 5,
) -> None:
    """Time to first token: computed, restored from primary, restored from disk; beside vLLM's own tiering."""
    require_supported()
    if not 2 * BLOCK_TOKENS <= tokens <= 8000 or not 1 <= repeats <= 20:
        raise ConfigError("bench engine: tokens must be from 256 to 8000, repeats from 1 to 20")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"bench engine: {json_file}: there is no folder {json_file.absolute().parent}")
    with _scratch(directory) as scratch:
        place = Path(scratch)
        (place / "model").mkdir()
        (place / "model" / "config.json").write_text(json.dumps(MODEL))
        runs = {}
        for system in ("kvstrata", "stock"):
            for turn in ("first", "restarted"):
                typer.echo(f"{system}: {turn} run ...", err=True)
                runs[f"{system} {turn}"] = _child(place, system, turn, tokens, repeats)
    figures = summary(runs, tokens)
    for line in report(figures):
        typer.echo(line)
    if json_file is not None:
        json_file.write_text(json.dumps({"figures": figures, "runs": runs}, indent=1) + "\n")


def _scratch(directory: Path | None) -> tempfile.TemporaryDirectory[str]:
    """A folder of its own, in `directory`, which is made if need be."""
    try:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=directory)
    except OSError as error:
        raise ConfigError(f"bench engine: --dir {directory}: {error.strerror}") from error


def _child(place: Path, system: str, turn: str, tokens: int, repeats: int) -> dict[str, Any]:
    out = place / f"{system}-{turn}.json"
    task = {"place": str(place), "system": system, "turn": turn, "tokens": tokens, "repeats": repeats}
    done = subprocess.run(
        [sys.executable, "-m", "kvstrata.cli.bench_engine", json.dumps(task), str(out)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    if done.returncode or not out.exists():
        raise ConfigError(f"bench engine: the {system} engine failed: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def summary(runs: dict[str, dict[str, Any]], tokens: int) -> dict[str, float]:
    """Medians in seconds, and the ratios that matter."""
    ours, again = runs["kvstrata first"], runs["kvstrata restarted"]
    stock, stock_again = runs["stock first"], runs["stock restarted"]
    middle: Callable[[list[float]], float] = statistics.median
    found = {
        "recompute_s": middle(ours["cold"]),
        "primary_s": middle(ours["warm"]),
        "disk_s": middle(again["cold"]),
        "stock_primary_s": middle(stock["warm"]),
        "stock_disk_s": middle(stock_again["cold"]),
        "copy_s": middle(ours["copy"]),
        "read_s": middle(again["read"]),
        "step_s": middle(ours["step"] + again["step"]),
        "short_prompt_s": middle(ours["short"] + again["short"]),
        "restored_tokens": float(min(ours["restored"] + again["restored"])),
        "stock_restored_tokens": float(min(stock["restored"] + stock_again["restored"])),
        "bytes": float(tokens * BYTES_PER_TOKEN),
    }
    found["primary_floor_s"] = found["copy_s"] + found["step_s"]
    found["disk_floor_s"] = found["primary_floor_s"] + found["read_s"]
    for name in ("primary", "disk"):
        found[f"{name}_ratio"] = found[f"{name}_s"] / found[f"{name}_floor_s"]
        found[f"{name}_speedup"] = found["recompute_s"] / found[f"{name}_s"]
        found[f"{name}_of_stock"] = found[f"{name}_s"] / found[f"stock_{name}_s"]
    return found


def report(figures: dict[str, float]) -> list[str]:
    """The figures as lines."""
    lines = [f"computed                 {figures['recompute_s']:7.3f} s"]
    for name in ("primary", "disk"):
        good = figures[f"{name}_ratio"] <= BAR and figures[f"{name}_of_stock"] <= 1.0
        lines.append(
            f"restored from {name:<10} {figures[f'{name}_s']:7.3f} s   {figures[f'{name}_speedup']:6.1f} x faster; "
            f"{figures[f'{name}_ratio']:.2f} of the floor (bar {BAR}); {figures[f'{name}_of_stock']:.2f} of vLLM's own "
            f"tiering ({figures[f'stock_{name}_s']:.3f} s)  {'ok' if good else 'ABOVE THE BAR'}"
        )
    lines.append(
        f"floor: copy {figures['copy_s']:.3f} s, read {figures['read_s']:.3f} s, one step that computes the rest "
        f"{figures['step_s']:.3f} s (as many tokens without a context: {figures['short_prompt_s']:.3f} s); "
        f"{figures['bytes'] / 1e6:.0f} MB, {figures['restored_tokens']:.0f} tokens restored"
    )
    return lines


# what runs in the child


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


def _run(task: dict[str, Any]) -> dict[str, Any]:
    """Serve the prompts in one engine and time it."""
    importlib.import_module("ctypes").CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    vllm: Any = importlib.import_module("vllm")
    place, tokens = Path(task["place"]), task["tokens"]
    connector, extra = _extra(place, task["system"])
    transfer = importlib.import_module("vllm.config").KVTransferConfig(
        kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra
    )
    llm = vllm.LLM(
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
    sampling = vllm.SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    clock = SystemClock()

    def serve(asked: list[int]) -> tuple[float, int]:
        begun = clock.monotonic()
        (out,) = llm.generate([vllm.TokensPrompt(prompt_token_ids=asked)], sampling, use_tqdm=False)
        return clock.monotonic() - begun, out.num_cached_tokens

    def prompt(length: int, number: int) -> list[int]:
        return [(i * 7919 + i * i * 31 + number * 104_729) % 1000 + 3 for i in range(length)]

    serve(prompt(2 * BLOCK_TOKENS + 9, 99))  # what is made at first use
    prompts = [prompt(tokens, number) for number in range(task["repeats"])]
    cold = [serve(asked) for asked in prompts]
    pause(clock, 3.0)  # stores and cascades end
    llm.reset_prefix_cache()
    warm, own = [], []
    for asked in prompts:
        warm.append(serve(asked))
        own.append(serve(asked))
    rest = tokens % BLOCK_TOKENS or 1
    short = [serve(prompt(rest, 200 + number))[0] for number in range(task["repeats"])]
    restored = [count for _, count in (warm if task["turn"] == "first" else [*cold, *warm])]
    if {count for _, count in own} != set(restored):
        raise ConfigError(f"not the same tokens: {restored} restored, {own} of the engine's own")
    result = {
        "cold": [seconds for seconds, _ in cold],
        "warm": [seconds for seconds, _ in warm],
        "step": [seconds for seconds, _ in own],
        "short": short,
        "restored": restored,
        **_floor(place, tokens * BYTES_PER_TOKEN, task["repeats"], clock),
    }
    llm.llm_engine.engine_core.shutdown()
    return result


def pause(clock: SystemClock, seconds: float) -> None:
    """Let other threads work."""
    flag = importlib.import_module("kvstrata.runtime.executor").Signal()
    end = clock.monotonic() + seconds
    while (left := end - clock.monotonic()) > 0:
        flag.wait(left)


def _floor(place: Path, size: int, repeats: int, clock: SystemClock) -> dict[str, list[float]]:
    """Copying and reading as many bytes."""
    torch: Any = importlib.import_module("torch")
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    copies, reads = [], []
    for _ in range(repeats):
        begun = clock.monotonic()
        target.copy_(source)
        copies.append(clock.monotonic() - begun)
    path = place / "raw"
    whole = size // 4096 * 4096
    mmap: Any = importlib.import_module("mmap")
    with mmap.mmap(-1, whole) as memory:
        memory[:] = os.urandom(4096) * (whole // 4096)
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o600)
        try:
            view = memoryview(memory)
            for at in range(0, whole, 8 << 20):
                os.pwrite(file, view[at : at + (8 << 20)], at)
            os.fsync(file)
            for _ in range(repeats):
                begun = clock.monotonic()
                for at in range(0, whole, 8 << 20):
                    os.preadv(file, [view[at : at + (8 << 20)]], at)
                reads.append(clock.monotonic() - begun)
            view.release()
        finally:
            os.close(file)
            path.unlink()
    return {"copy": copies, "read": reads}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(_run(json.loads(sys.argv[1]))))
