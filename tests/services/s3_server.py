"""moto's S3 server with one bucket, as a process of its own: `python s3_server.py PORT BUCKET`.

In front of it sits a layer that counts requests by method, and delays or refuses them when told to by a POST to
/__control/behave {"delay_s": 0.02, "refuse": 0}. GET /__control/counts gives the counts. GCS's condition "only if there
is no such object" is translated into S3's, and its token, or none, into a signature: what the object tier uses of the
two protocols differs in nothing else. moto takes requests for any region; this layer refuses those for another one than
the bucket's, in the words of S3.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple

Start = Callable[..., Any]
SIGNED = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
"""What a request looks like that S3's own clients have signed; moto looks at nothing but its service."""
REGION = "us-east-1"
OTHER_REGION = f"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>AuthorizationHeaderMalformed</Code><Message>The authorization header is malformed; the region is wrong;
expecting '{REGION}'</Message><Region>{REGION}</Region><RequestId>0</RequestId></Error>""".encode()


class Front:
    """The counting layer."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.open = 0
        self.delay_s = 0.0
        self.refuse = False
        self.ready = False
        """The bucket is there."""

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path.startswith("/__control/"):
            return self.control(path, environ, start)
        method = environ["REQUEST_METHOD"]
        if method == "GET" and "list-type" in environ.get("QUERY_STRING", ""):
            method = "LIST"
        with self.lock:
            self.counts[method] += 1
            self.open += 1
            self.counts["peak"] = max(self.counts["peak"], self.open)
        try:
            if self.delay_s:
                time.sleep(self.delay_s)
            if self.refuse:
                start("503 Slow Down", [("Content-Length", "0")])
                return [b""]
            if environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", "") == "0":
                environ["HTTP_IF_NONE_MATCH"] = "*"
            if not environ.get("HTTP_AUTHORIZATION", "").startswith("AWS"):
                environ["HTTP_AUTHORIZATION"] = SIGNED
            if f"/{REGION}/s3/" not in environ["HTTP_AUTHORIZATION"]:
                start("400 Bad Request", [("Content-Type", "application/xml"), *length_of(OTHER_REGION)])
                return [OTHER_REGION]
            return list(self.inner(environ, start))
        finally:
            with self.lock:
                self.open -= 1

    def control(self, path: str, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        with self.lock:
            if path.endswith("behave"):
                size = int(environ.get("CONTENT_LENGTH") or 0)
                wanted = json.loads(environ["wsgi.input"].read(size))
                self.delay_s, self.refuse = wanted["delay_s"], bool(wanted["refuse"])
                self.counts.clear()
            body = json.dumps({**self.counts, "ready": self.ready}).encode()
        start("200 OK", [("Content-Type", "application/json"), *length_of(body)])
        return [body]


def length_of(body: bytes) -> list[tuple[str, str]]:
    return [("Content-Length", str(len(body)))]


class Quiet(WSGIRequestHandler):
    """Keeps connections open between requests, and logs nothing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log(self, *_: object) -> None:
        return


def main() -> None:
    """Serve until killed."""
    port, bucket = int(sys.argv[1]), sys.argv[2]
    front = Front(DomainDispatcherApplication(create_backend_app))

    def make_bucket() -> None:
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name=REGION,
        )
        for _ in range(200):
            try:
                client.create_bucket(Bucket=bucket)
            except Exception:
                time.sleep(0.05)
            else:
                front.ready = True
                return

    threading.Thread(target=make_bucket, daemon=True).start()
    run_simple("127.0.0.1", port, front, threaded=True, request_handler=Quiet)


if __name__ == "__main__":
    main()
