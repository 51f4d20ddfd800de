"""A node that cannot write to the run's storage says so before its first step."""

import http.server
import multiprocessing
import os
import resource
import signal
import threading

import pytest

from elastic.protocol.errors import UnfitNode, WrongInput
from elastic.store.files import refuse_unwritable
from tests.object_store import CREDENTIALS, uri
from workers.health import storage

HOST = "10.0.0.7"


@pytest.fixture
def place(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_node_that_can_write_leaves_nothing(place):
    storage.check(str(place), HOST, is_newcomer=False)
    assert os.listdir(place) == ["config.json"]


def test_a_folder_that_this_node_has_not_is_one_line_with_node_and_path(tmp_path):
    with pytest.raises(UnfitNode) as refusal:
        storage.check(str(tmp_path / "run"), HOST, is_newcomer=False, seen_s=0.0)
    assert str(refusal.value) == (
        f"storage: node {HOST} does not see {tmp_path}/run, which the controller has made; choose "
        "a folder that every node sees, or a URI"
    )
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_comes_late_is_waited_for(tmp_path):
    timer = threading.Timer(0.3, (tmp_path / "config.json").touch)
    timer.start()
    storage.check(str(tmp_path), HOST, is_newcomer=False)
    timer.join()


def refused_where_no_file_may_grow(place, answers):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        storage.check(place, HOST, is_newcomer=True)
    except UnfitNode as error:
        answers.send(str(error))


def test_a_folder_that_this_node_may_not_write_is_one_line_with_node_path_and_error(place):
    answer, answers = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=refused_where_no_file_may_grow, args=(str(place), answers)
    )
    process.start()
    assert answer.poll(30)
    told = answer.recv()
    process.join(30)
    assert told.startswith(f"storage: node {HOST} cannot write to {place}: ")
    assert "File too large" in told
    assert "\n" not in told
    assert os.listdir(place) == ["config.json"]


class Refusing(http.server.BaseHTTPRequestHandler):
    """A bucket that may be read by this node, and not written."""

    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b"<Error><Code>AccessDenied</Code><Message>not from here</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET = answer

    def log_message(self, *_):
        pass


@pytest.fixture
def refusing(monkeypatch):
    """The URI of a run in such a bucket."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield uri("bucket", "runs/a", server.server_port)
    server.shutdown()
    server.server_close()


def test_a_bucket_that_refuses_a_driver_whose_workers_are_here_is_one_line(refusing):
    with pytest.raises(WrongInput) as refusal:
        refuse_unwritable(refusing)
    told = str(refusal.value)
    assert told.startswith("storage 's3://bucket/runs/a")
    assert " cannot be written: " in told
    assert "ACCESS_DENIED" in told
    assert told.endswith("; choose another one, or give this machine the right to write there")
    assert "\n" not in told


@pytest.mark.parametrize("is_newcomer", [False, True])
def test_a_bucket_that_refuses_this_node_is_one_line(is_newcomer, refusing):
    with pytest.raises(UnfitNode) as refusal:
        storage.check(refusing, HOST, is_newcomer=is_newcomer)
    told = str(refusal.value)
    assert told.startswith(f"storage: node {HOST} cannot write to s3://bucket/runs/a")
    assert "ACCESS_DENIED" in told
    assert "\n" not in told


def test_a_newcomer_joins_while_the_store_is_away(monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("elastic.store.remote.ATTEMPTS", 1)
    storage.check(uri("bucket", "runs/a", 9), HOST, is_newcomer=True)
