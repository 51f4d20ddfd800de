"""The worker's link to its controller when nobody reads at the other end."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic.protocol import wire
from elastic.protocol.messages.to_controller import Introduction, PartSaved
from workers.membership.link import EXIT_WITHOUT_CONTROLLER, ControllerLink

LEASE_S = 24 * 3600.0
"""A link ends its process when the lease is over, and the process is the tests' here."""
OPEN: list[socket.socket] = []


def test_reports_never_wait_and_arrive_in_order_once_somebody_reads():
    """As with a link that is cut: the socket takes some, then no more."""
    listener = socket.create_server(("127.0.0.1", 0))
    link = ControllerLink(
        listener.getsockname(),
        token="secret",
        worker=3,
        silence_s=LEASE_S,
        lease_s=LEASE_S,
        find=lambda: None,
        on_command=lambda command: None,
        introduce=lambda address: Introduction("starting", address),
    )
    controller, _ = listener.accept()
    OPEN.append(controller)
    began = time.monotonic()
    for step in range(300):
        link.send(PartSaved(1, 0, step, b"x" * 50_000))
    assert time.monotonic() - began < 30, "nobody reads yet"
    controller.settimeout(30)
    assert wire.receive(controller)[0]["type"] == "Hello"
    assert wire.receive(controller)[0]["type"] == "Introduction"
    received = [wire.receive(controller) for _ in range(300)]
    assert [header["step"] for header, _ in received] == list(range(300))
    assert {bytes(payload) for _, payload in received} == {b"x" * 50_000}
    listener.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_worker_whose_log_is_on_a_full_disk_leaves_all_the_same():
    script = (
        "import workers.membership.link as l; l.leave(7, 'the lease is over'); print('still here')"
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", script], stderr=full, timeout=60, check=False)
    assert done.returncode == 7


def test_a_worker_whose_last_words_hang_leaves_all_the_same():
    script = "import time, workers.membership.link as l; l.LAST_WORDS_S = 0.1\n"
    script += "l.leave(7, 'over', lambda: time.sleep(600))"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 7


SEARCHING = """
import threading
from workers.membership.link import ControllerLink
ControllerLink(
    ("127.0.0.1", 1), token="", worker=0, silence_s=9.0, lease_s=0.2,
    find=threading.Event().wait, on_command=print, introduce=print,
)
threading.Event().wait(60)
"""


def test_the_lease_counts_while_ray_does_not_answer_where_the_controller_is():
    done = subprocess.run(
        [sys.executable, "-c", SEARCHING], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == EXIT_WITHOUT_CONTROLLER
    assert "no word from a controller within the lease" in done.stderr
