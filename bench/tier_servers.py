"""`kvstrata bench tier` against servers started here: `python bench/tier_servers.py KIND [...]`.

KIND is redis, object, object-local, mooncake or fs (a shared directory, which has no client library to compare with).

The servers are those of tests/services (redis-server; moto's S3, which is written in Python and so slower than the
client beside it), on loopback, in a folder that is removed at the end. `object-local` measures the same library on a
folder (file://) without any server.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "services"))

from servers import MooncakeServer, RedisServer, S3Server, environment  # noqa: E402

LEND = """
import sys
from mooncake.store import MooncakeDistributedStore as Store
store = Store()
print(store.setup("127.0.0.1", sys.argv[1], int(sys.argv[3]), 1 << 20, "tcp", "", sys.argv[2]), flush=True)
sys.stdin.read()
"""
SEGMENT = 2 << 30
"""Memory of the Mooncake store: the bare client keeps what it stored until the end of a pass."""


def main() -> int:
    """Start the server, run the bench, stop the server."""
    kind, rest = sys.argv[1], sys.argv[2:]
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        entry: dict[str, Any] = {"type": kind.partition("-")[0], "name": kind, "part": "bench", "timeout_s": 30}
        if kind == "redis":
            entry["url"] = stack.enter_context(RedisServer(place)).url
        elif kind == "object":
            server = stack.enter_context(S3Server(place))
            entry |= {"url": f"s3://{S3Server.BUCKET}/bench", "endpoint": server.endpoint, "region": "us-east-1"}
            entry["credentials"] = "env:KVS"
        elif kind == "mooncake":
            master = stack.enter_context(MooncakeServer(place))
            entry |= {"master": master.master, "metadata": master.metadata, "admin": master.admin}
            # The memory is another process's, as in a cluster: in the own process a transfer would be a plain copy.
            lender = subprocess.Popen(
                [sys.executable, "-c", LEND, master.metadata, master.master, str(SEGMENT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(lender.kill)
            assert lender.stdout is not None
            lender.stdout.readline()
        elif kind == "fs":
            entry["path"] = f"{place}/shared"
        else:
            entry["url"] = f"file://{place}/objects"
        config = place / "bench.json"
        config.write_text(json.dumps({"tiers": [entry]}))
        program = str(Path(sys.executable).with_name("kvstrata"))
        command = [program, "bench", "tier", kind, "--config", str(config), *rest]
        return subprocess.run(
            command, env=environment(KVS_ACCESS_KEY_ID="test", KVS_SECRET_ACCESS_KEY="test"), check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
