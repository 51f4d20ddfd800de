"""A worker's log on its way to a bucket: what is there when, and what a killed worker has said."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pyarrow.fs as arrow_fs
import pytest

from elastic.store.files import Folder, open_folder
from elastic.store.journal import appended, grown, joined
from tests.object_store import FaultProxy, S3Server, uri
from workers import log_upload
from workers.log_upload import LogUpload
from workers.membership import link

NAME = "w3.log"
PATIENCE_S = 60.0


@pytest.fixture
def bucket(tmp_path: Path) -> Folder:
    (tmp_path / "bucket").mkdir()
    inner = arrow_fs.SubTreeFileSystem(str(tmp_path / "bucket"), arrow_fs.LocalFileSystem())
    return Folder(inner, "")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / NAME
    path.write_bytes(b"")
    return path


def add(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def test_what_is_new_is_brought_and_nothing_is_written_twice(bucket, log, monkeypatch):
    monkeypatch.setattr(log_upload, "SEGMENT_BYTES", 8)
    upload, said, shown = LogUpload(log, bucket), b"", b""
    upload.bring()
    assert bucket.names() == [], "nothing was said yet"
    for n in range(20):
        add(log, b"line %d\n" % n)
        said += b"line %d\n" % n
        upload.bring()
        shown += appended(bucket, NAME, len(shown))
        assert joined(bucket, NAME) == shown == said
    assert grown(bucket.sizes(), NAME) == len(said)
    assert len(bucket.names()) == -(-len(said) // 8)
    before = bucket.modified_times()
    upload.bring()
    assert bucket.modified_times() == before
    upload.join()
    assert (bucket.names(), bucket.read(NAME)) == ([NAME], said)
    before = bucket.modified_times()
    upload.join()
    assert bucket.modified_times() == before, "nothing new to join"
    add(log, b"the end\n")
    upload.bring()
    assert joined(bucket, NAME) == said + b"the end\n"
    upload.join()
    assert (bucket.names(), bucket.read(NAME)) == ([NAME], said + b"the end\n")


def test_the_log_of_an_earlier_launch_stays_before_it(bucket, log, monkeypatch):
    monkeypatch.setattr(log_upload, "SEGMENT_BYTES", 8)
    add(log, b"the first launch\n")
    LogUpload(log, bucket).bring()  # and it is killed
    log.write_bytes(b"the second\n")
    second = LogUpload(log, bucket)
    second.bring()
    assert joined(bucket, NAME) == b"the first launch\nthe second\n"
    second.join()
    assert (bucket.names(), bucket.read(NAME)) == ([NAME], b"the first launch\nthe second\n")


def test_a_log_that_grows_while_it_is_brought_is_brought_once(bucket, log):
    class Busy:
        writes = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(bucket, name)

        def write(self, name: str, content: bytes) -> None:
            self.writes += 1
            assert self.writes < 5
            bucket.write(name, content)
            add(log, b"and more\n")

    busy = Busy()
    add(log, b"a line\n")
    LogUpload(log, cast(Folder, busy)).bring()
    assert busy.writes == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from workers.log_upload import LogUploader
log = Path(sys.argv[1])
uploader = LogUploader(log, sys.argv[2])
log.write_text("before\\n")
assert uploader.join() == "", "the first lines are there when it says so"
with log.open("a") as file:
    file.write("its last line\\n")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("has_run", [True, False])
def test_the_last_line_of_a_killed_worker_comes_to_the_bucket(
    s3: FaultProxy, s3_server: S3Server, tmp_path: Path, *, has_run: bool
):
    """Its uploader outlives it. A run that came to nothing keeps no log."""
    place = uri(s3_server.new_bucket(), "run", s3.port)
    run = open_folder(place)
    if has_run:
        run.write("config.json", b"{}")
    log = tmp_path / NAME
    worker = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(log), place], stderr=subprocess.PIPE, env=os.environ
    )
    _, said = worker.communicate(timeout=PATIENCE_S)  # until the uploader, which has it, has ended
    assert worker.returncode == -9, said
    expected = b"before\nits last line\n" if has_run else b""
    assert joined(run.at("logs"), NAME) == expected


HANGS = "import workers.log_upload as l; l.LAST_S, l.EVERY_S = 0.2, 0.0; l.main()"


def test_it_ends_soon_after_its_worker_in_a_store_that_hangs(log):
    """Also while a child of the worker's holds the other end of its pipe, as this test does."""
    log.write_bytes(b"x\n")
    worker = subprocess.Popen(["sleep", "60"])
    with socket.create_server(("127.0.0.1", 0)) as store:
        store.settimeout(PATIENCE_S)
        place = uri("bucket", "run", store.getsockname()[1])
        told = {"path": str(log), "place": place, "worker": worker.pid}
        uploader = subprocess.Popen([sys.executable, "-c", HANGS], stdin=subprocess.PIPE)
        assert uploader.stdin is not None
        uploader.stdin.write(json.dumps(told).encode() + b"\n")
        uploader.stdin.flush()
        request, _ = store.accept()  # it is never answered
        assert uploader.poll() is None
        worker.kill()
        assert uploader.wait(PATIENCE_S / 2) == -signal.SIGALRM
        request.close()
    worker.wait()
    assert link.LAST_WORDS_S > log_upload.ENOUGH_S


def test_why_a_log_is_not_in_the_bucket_is_said(tmp_path: Path, monkeypatch):
    """By a process that is nobody's child, which a signal to all of a node leaves alone, and which
    the user's modules are not in the way of; however many files the worker has open."""
    log = tmp_path / NAME
    log.write_text("x\n")
    for module in ("select", "queue", "random", "logging", "workers"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    uploader = log_upload.LogUploader(log, "nosuch://bucket/run")
    for file in files:
        os.close(file)
    assert "nosuch://bucket/run" in uploader.join()
    assert uploader._process.returncode == 0, "that which has started it has ended"
    os.killpg(uploader._process.pid, signal.SIGTERM)
    assert "nosuch://bucket/run" in uploader.join()
    os.killpg(uploader._process.pid, signal.SIGKILL)
    assert uploader._process.stdout is not None
    assert uploader._process.stdout.read() == b""
    began = time.monotonic()
    assert uploader.join().startswith("its uploader has ended")
    assert time.monotonic() - began < log_upload.ENOUGH_S
