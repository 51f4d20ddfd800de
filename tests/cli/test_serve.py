"""`elastic serve`: the report over HTTP, on this machine only, anew while the run goes on."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import ThreadingHTTPServer

import pytest

from elastic.cli.app import main
from elastic.cli.serve import HOST, Page, handler_of
from elastic.store.files import open_folder
from tests.cli.test_report import CONFIG

PATIENCE_S = 60.0


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def ask(run_dir):
    """ask(path, host) -> status, headers, text."""
    server = ThreadingHTTPServer((HOST, 0), handler_of(Page(open_folder(str(run_dir)), "RUN")))
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def get(path: str = "/", host: str = "localhost"):
        connection = http.client.HTTPConnection(HOST, server.server_port, timeout=60)
        connection.request("GET", path, headers={"Host": f"{host}:{server.server_port}"})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()

    yield get
    server.shutdown()
    server.server_close()


def test_the_report_is_served_and_comes_again_until_the_run_has_ended(ask, run_dir):
    status, head, text = ask()
    assert (status, head["Refresh"]) == (200, "5")
    assert "job.py:Job" in text
    result = {"outcome": "stopped", "steps": 0, "loss": None, "weights_sha256": ""}
    more = {"generations": 0, "lost_steps": 0, "goodput": 0.0, "badput": {}, "recoveries": []}
    (run_dir / "result.json").write_text(json.dumps(result | more))
    deadline = time.monotonic() + PATIENCE_S
    while "Refresh" in head:  # the page may be some seconds old
        assert time.monotonic() < deadline
        time.sleep(0.2)  # polling, bounded by the deadline
        status, head, text = ask()
    assert (status, "stopped" in text) == (200, True)


def test_only_this_machine_and_only_the_page(ask, run_dir):
    assert ask(host="evil.example")[0] == 403
    assert ask("/../config.json")[0] == 404
    (run_dir / "config.json").write_text("{")
    status, _, text = ask()
    assert (status, text.count("\n")) == (503, 1)


def test_what_cannot_be_served_is_one_line(run_dir, tmp_path, capsys):
    with socket.create_server((HOST, 0)) as taken:
        assert main(["serve", str(run_dir), "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot be opened: " in capsys.readouterr().err
    assert main(["serve", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err


def test_the_command_says_where_and_ends_with_an_interrupt(run_dir):
    process = subprocess.Popen(
        [sys.executable, "-m", "elastic", "serve", str(run_dir)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
    )
    line = process.stdout.readline()
    assert line.startswith("http://127.0.0.1:"), process.communicate()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (
        0,
        "no longer served; the run is left alone\n",
        "",
    )
