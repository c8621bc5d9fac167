"""Real servers for the services tests: started on loopback with an own folder, stopped, frozen, and always ended."""

from __future__ import annotations

import base64
import hmac
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from email.utils import formatdate
from pathlib import Path
from typing import Any

from obstore.store import AzureStore

START_S = 30.0
PAUSE_S = 0.02


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(found: Any, what: str, limit_s: float = START_S) -> Any:
    """Call `found` until it gives something true; at most `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while True:
        result = found()
        if result:
            return result
        assert time.monotonic() < end, f"{what}: not within {limit_s} s"
        time.sleep(PAUSE_S)


class Server:
    """One process on one port; `start` again after `kill` gives a new, empty one on the same port."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """How it is started."""
        raise NotImplementedError

    def answers(self) -> bool:
        """Whether it serves requests."""
        raise NotImplementedError

    def choose_ports(self) -> None:
        """Take other ports: nobody promises that a free one stays free until the server has it."""
        self.port = free_port()

    def start(self) -> None:
        """Start, and wait until it answers. A port that was taken meanwhile is replaced, but for a restart."""
        first = self.process is None
        for attempt in range(3):
            if attempt and first:
                self.choose_ports()
            with (self.place / "log.txt").open("ab") as log:
                self.process = subprocess.Popen(
                    self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.place
                )
            wait_until(lambda: self.answers() or self.process.poll() is not None, f"start of {self.command()[0]}")
            if self.process.poll() is None:
                return
        raise AssertionError(f"{self.command()[0]} ended at once: {(self.place / 'log.txt').read_text()[-500:]}")

    def kill(self) -> None:
        """End it as a power cut would."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()
        self.kill()


class SlowLink:
    """A way to a server that holds every piece of an answer back for `delay_s` seconds."""

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._to), 5)
            except OSError:
                near.close()
                continue
            self._sockets += (near, far)
            threading.Thread(target=self._carry, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._carry, args=(far, near, True), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        try:
            while piece := source.recv(1 << 16):
                if slow and self.delay_s:
                    time.sleep(self.delay_s)
                target.sendall(piece)
        except OSError:
            pass
        finally:
            for side in (source, target):
                side.close()

    def close(self) -> None:
        """Close the way and all that goes over it."""
        for one in (self._listener, *self._sockets):
            one.close()


class RedisServer(Server):
    """redis-server or valkey-server, keeping nothing on disk."""

    PROGRAMS = ("redis-server", "valkey-server")

    def __init__(self, place: Path, *options: str) -> None:
        super().__init__(place)
        self.options = options
        self._held: socket.socket | None = None
        self._link: SlowLink | None = None

    @classmethod
    def program(cls) -> str | None:
        """The first of the programs that is installed."""
        return next((found for name in cls.PROGRAMS if (found := shutil.which(name))), None)

    @classmethod
    def version(cls) -> str:
        """What it says of itself."""
        program = cls.program()
        assert program is not None
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
        return f"{Path(program).name} {said.split('v=')[1].split()[0]}"

    def command(self) -> list[str]:
        program = self.program()
        assert program is not None
        fixed = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self.place)]
        return [program, "--port", str(self.port), *fixed, *self.options]

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 0.2) as connection:
                connection.settimeout(1.0)
                connection.sendall(b"PING\r\n")
                return connection.recv(16)[:1] in (b"+", b"-")
        except OSError:
            return False

    @property
    def url(self) -> str:
        """Where it is."""
        return f"redis://127.0.0.1:{self.port if self._link is None else self._link.port}/0"

    def behave(self, *, delay_s: float = 0.0) -> None:
        """How fast answers come from now on, for those who asked for `url` after the first call."""
        if self._link is None:
            self._link = SlowLink(self.port)
        self._link.delay_s = delay_s

    def __exit__(self, *_: object) -> None:
        if self._link is not None:
            self._link.close()
        super().__exit__()

    def say(self, *words: str) -> str:
        """Send one command as an operator would; the answer as text."""
        with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
            return self._talk(connection, words)

    @staticmethod
    def _talk(connection: socket.socket, words: tuple[str, ...]) -> str:
        connection.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w.encode()) for w in words))
        connection.settimeout(5)
        return connection.recv(1 << 16).decode()

    def refuse(self, refusing: bool) -> None:
        """Close every connection but one of ours, and take no other; or be as before."""
        if refusing:
            self._held = socket.create_connection(("127.0.0.1", self.port), 5)
            self._talk(self._held, ("CONFIG", "SET", "maxclients", "1"))
            self._talk(self._held, ("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))
        elif self._held is not None:
            self._talk(self._held, ("CONFIG", "SET", "maxclients", "1000"))
            self._held.close()
            self._held = None


class S3Server(Server):
    """moto's S3 server behind `s3_server.py`, which counts requests and can be slow or refuse."""

    BUCKET = "kvbucket"

    def command(self) -> list[str]:
        return [sys.executable, str(Path(__file__).with_name("s3_server.py")), str(self.port), self.BUCKET]

    def answers(self) -> bool:
        try:
            return bool(self._ask("counts")["ready"])
        except OSError:
            return False

    @staticmethod
    def version() -> str:
        """The version of moto."""
        from importlib.metadata import version

        return f"moto {version('moto')}"

    @property
    def endpoint(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    def gcs_account(self, place: Path) -> Path:
        """A file that stands for a GCS service account, by which `gs://` leads here."""
        fields = {"gcs_base_url": self.endpoint, "disable_oauth": True}
        names = ("client_email", "private_key", "private_key_id")
        path = place / "account.json"
        path.touch(0o600)
        path.write_text(json.dumps({**fields, **dict.fromkeys(names, "")}))
        return path

    def _ask(self, what: str, **fields: float) -> Any:
        data = json.dumps(fields).encode() if fields else None
        with urllib.request.urlopen(f"{self.endpoint}/__control/{what}", data, timeout=5) as answer:
            return json.load(answer)

    def counts(self) -> dict[str, int]:
        """Requests so far by method (LIST apart), `begun` and `peak` (most at once)."""
        return dict(self._ask("counts"))

    def refuse(self, refusing: bool) -> None:
        """Answer every request by 503; or be as before."""
        self.behave(refuse=refusing)

    def behave(self, *, delay_s: float = 0.0, refuse: bool = False) -> None:
        """How requests are answered from now on; counts start anew."""
        self._ask("behave", delay_s=delay_s, refuse=float(refuse))


class AzureServer(Server):
    """Azurite, Microsoft's own stand-in for its Blob service, with one container; from npm."""

    CONTAINER = "kv-container"
    ACCOUNT = "devstoreaccount1"
    KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    """Of the account that every Azurite has; no secret."""

    @classmethod
    def program(cls) -> str | None:
        """Where tools/services.sh puts it, or on the path."""
        beside = Path(sys.prefix) / "azurite" / "node_modules" / ".bin" / "azurite-blob"
        return str(beside) if beside.exists() and shutil.which("node") else shutil.which("azurite-blob")

    @classmethod
    def version(cls) -> str:
        """What it says of itself."""
        program = cls.program()
        assert program is not None
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
        return f"azurite {said.strip()}"

    def command(self) -> list[str]:
        program = self.program()
        assert program is not None
        fixed = ["--blobHost", "127.0.0.1", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
        return [program, "--blobPort", str(self.port), "--silent", *fixed]

    def answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 0.2).close()
        except OSError:
            return False
        return True

    def start(self) -> None:
        """With the container, which only a signed request makes."""
        super().start()
        path, date = f"{self.ACCOUNT}/{self.CONTAINER}", formatdate(usegmt=True)
        said = f"PUT{12 * chr(10)}x-ms-date:{date}\nx-ms-version:2021-12-02\n/{self.ACCOUNT}/{path}\nrestype:container"
        mark = base64.b64encode(hmac.digest(base64.b64decode(self.KEY), said.encode(), "sha256")).decode()
        headers = {"x-ms-date": date, "x-ms-version": "2021-12-02"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}?restype=container",
            method="PUT",
            headers={**headers, "Authorization": f"SharedKey {self.ACCOUNT}:{mark}"},
        )
        urllib.request.urlopen(request, timeout=START_S).close()

    @property
    def endpoint(self) -> str:
        """Where the account is."""
        return f"http://127.0.0.1:{self.port}/{self.ACCOUNT}"

    def credentials(self, prefix: str) -> dict[str, str]:
        """Environment variables for `env:PREFIX`."""
        return {f"{prefix}_ACCOUNT_NAME": self.ACCOUNT, f"{prefix}_ACCOUNT_KEY": self.KEY}

    def store(self) -> AzureStore:
        """A way to the container beside the tier."""
        return AzureStore(
            self.CONTAINER,
            endpoint=self.endpoint,
            account_name=self.ACCOUNT,
            account_key=self.KEY,
            client_options={"allow_http": True},
        )


class MooncakeServer(Server):
    """mooncake_master with its HTTP metadata server; `segment` bytes of memory come from the tiers that connect."""

    def __init__(self, place: Path, address: str = "127.0.0.1") -> None:
        super().__init__(place)
        self.address = address
        self.choose_ports()

    def choose_ports(self) -> None:
        self.port, self.metadata_port, self.admin_port = free_port(), free_port(), free_port()

    @classmethod
    def program(cls) -> str | None:
        """Where the wheel has put it."""
        beside = Path(sys.executable).with_name("mooncake_master")
        return str(beside) if beside.exists() else shutil.which("mooncake_master")

    @classmethod
    def version(cls) -> str:
        """What it says of itself."""
        program = cls.program()
        assert program is not None
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
        return f"mooncake_master {said.split('version')[1].split()[0]}"

    def command(self) -> list[str]:
        program = self.program()
        assert program is not None
        return [
            program,
            f"-rpc_port={self.port}",
            f"-rpc_address={self.address}",
            "-enable_http_metadata_server=true",
            f"-http_metadata_server_host={self.address}",
            f"-http_metadata_server_port={self.metadata_port}",
            f"-metrics_port={self.admin_port}",
        ]

    def answers(self) -> bool:
        """All three of its ports do: it opens them one after the other."""
        try:
            socket.create_connection((self.address, self.port), 0.5).close()
            urllib.request.urlopen(f"{self.metadata}?key=none", timeout=0.5).close()
        except urllib.error.HTTPError as answer:
            answer.close()  # there is no such key
        except OSError:
            return False
        try:
            with urllib.request.urlopen(f"{self.admin}/health", timeout=0.5) as answer:
                return b"ok" in answer.read()
        except OSError:
            return False

    @property
    def master(self) -> str:
        """Where requests go."""
        return f"{self.address}:{self.port}"

    @property
    def metadata(self) -> str:
        """Where processes find each other."""
        return f"http://{self.address}:{self.metadata_port}/metadata"

    @property
    def admin(self) -> str:
        """Where the master tells about itself."""
        return f"http://{self.address}:{self.admin_port}"


def environment(**more: str) -> dict[str, str]:
    """This process's environment, for a child."""
    return {**os.environ, **more}
