"""`elastic serve`: the report of a run, on loopback, made anew while the run goes on.

What is on the page is elastic/observe's.
"""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated

import typer

from elastic.cli.journal import RunDir, open_run
from elastic.cli.report import command_of
from elastic.driver.resume import read_past_run
from elastic.observe.charts import draw
from elastic.observe.report_page import page
from elastic.observe.run_record import read_record
from elastic.protocol.errors import WrongInput
from elastic.store.files import Folder, first_line
from elastic.store.remote import shown_uri

HOST = "127.0.0.1"
LEAST_AGE_S = 2.0
SHARE = 0.1
"""Of a core is spent on pages at most: who is slow to draw is drawn seldom."""
REFRESH_S = 5


class Page:
    """The newest page; several browsers may ask for it at once."""

    def __init__(self, folder: Folder, place: str) -> None:
        self._folder, self._place = folder, place
        self._lock = threading.Lock()
        self._content, self._good_until = b"", 0.0
        self.is_over = False
        """The run has ended, and the page is its last."""

    def now(self) -> bytes:
        """Raises OSError and WrongInput as reading the run directory does."""
        with self._lock:
            began = time.monotonic()
            if not self.is_over and began >= self._good_until:
                past = read_past_run(self._folder)
                record = read_record(self._folder)
                drawn = page(record, draw(record), self._place, command_of(record.config))
                self._content = drawn.encode()
                self.is_over = past is not None and past.is_over
                took_s = time.monotonic() - began
                self._good_until = began + max(LEAST_AGE_S, took_s / SHARE)
            return self._content


def serve(
    run_dir: RunDir,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 0,
) -> int:
    """Show a run's report in a browser on this machine, anew while the run goes on. Ctrl-C ends
    it."""
    shown = Page(open_run(run_dir), shown_uri(run_dir))
    shown.now()  # what is wrong with the run is told here
    try:
        server = ThreadingHTTPServer((HOST, port), handler_of(shown))
    except OSError as error:
        raise WrongInput(f"--port {port} cannot be opened: {first_line(error)}") from error
    url = f"http://{HOST}:{server.server_port}/"
    try:
        print(f"{url} shows {shown_uri(run_dir)}; Ctrl-C ends it", flush=True)
        server.serve_forever()
    except KeyboardInterrupt:
        print("no longer served; the run is left alone")
    finally:
        server.server_close()
    return 0


def handler_of(shown: Page) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.headers.get("Host", "").rpartition(":")[0]
            if name not in (HOST, "localhost"):  # another site's name may lead to this machine
                self._answer(403, b"this address is for this machine only\n")
            elif self.path != "/":
                self._answer(404, b"there is only /\n")
            else:
                try:
                    content = shown.now()
                except (OSError, WrongInput) as error:
                    self._answer(503, f"{first_line(error)}\n".encode())
                else:
                    self._answer(200, content)

        def _answer(self, status: int, content: bytes) -> None:
            kind = "text/html" if status == 200 else "text/plain"
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            if not shown.is_over:
                self.send_header("Refresh", str(REFRESH_S))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads who has asked for a page."""

    return Handler
