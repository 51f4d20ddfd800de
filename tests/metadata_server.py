"""A metadata server as a cloud's machines see it.

`python -m tests.metadata_server CLOUD ADDRESS PORT FILE` is one by itself, which gives notice once
there is FILE, with the seconds that are left.
"""

import json
import sys
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class MetadataServer:
    """Use as a context manager. cloud: aws, gcp, azure, or any other word for none of them."""

    name = "machine-3"

    def __init__(self, cloud: str, address: str = "127.0.0.1", port: int = 0) -> None:
        self.cloud = cloud
        self.notice_file: Path | None = None
        self.token, self.says = "good", ""
        self.is_away, self.is_garbled, self.num_asked = False, False, 0
        self._server = ThreadingHTTPServer((address, port), handler_of(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "MetadataServer":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    def give_notice(self, left_s: float) -> None:
        at = datetime.now(UTC) + timedelta(seconds=left_s)
        event = {"EventType": "Preempt", "Resources": [self.name, "another"]}
        self.says = {
            "aws": json.dumps({"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")}),
            "gcp": "TRUE",
            "azure": json.dumps(
                {"Events": [{**event, "NotBefore": format_datetime(at, usegmt=True)}]}
            ),
        }[self.cloud]

    def answer(self, method: str, path: str, head: dict[str, str]) -> tuple[int, str]:
        self.num_asked += 1
        if self.notice_file is not None and not self.says and self.notice_file.exists():
            self.give_notice(float(self.notice_file.read_text()))
        if self.is_away:
            return 503, ""
        if self.cloud == "aws":
            return self._aws(method, path, head)
        if self.cloud == "gcp" and path == "/computeMetadata/v1/instance/preempted":
            return (200, self.says or "FALSE") if head.get("metadata-flavor") else (403, "")
        if self.cloud == "azure" and head.get("metadata") == "true":
            if path == "/metadata/instance/compute/name?api-version=2021-02-01&format=text":
                return 200, self.name
            if (
                path
                == "/metadata/instance/compute/azEnvironment?api-version=2021-02-01&format=text"
            ):
                return 200, "AzurePublicCloud"
            if path == "/metadata/scheduledevents?api-version=2020-07-01":
                return 200, self.says or json.dumps({"DocumentIncarnation": 1, "Events": []})
        return 404, ""

    def _aws(self, method: str, path: str, head: dict[str, str]) -> tuple[int, str]:
        if (method, path) == ("PUT", "/latest/api/token"):
            has_ttl = "x-aws-ec2-metadata-token-ttl-seconds" in head
            return (200, self.token) if has_ttl else (400, "")
        if head.get("x-aws-ec2-metadata-token") != self.token:
            return 401, ""
        is_known = path == "/latest/meta-data/spot/instance-action" and self.says
        return (200, self.says) if is_known else (404, "")


def handler_of(server: MetadataServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            head = {name.lower(): value for name, value in self.headers.items()}
            status, text = server.answer(self.command, self.path, head)
            if server.is_garbled:
                self.wfile.write(b"no HTTP\r\n\r\n")
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET

        def log_message(self, *_) -> None:
            pass

    return Handler


if __name__ == "__main__":
    kind, where, number, file = sys.argv[1:]
    with MetadataServer(kind, where, int(number)) as lone:
        lone.notice_file = Path(file)
        print("ready", flush=True)
        sys.stdin.read()
