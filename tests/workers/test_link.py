"""The worker's link to its controller when nobody reads at the other end."""

import socket
import time

from elastic.protocol import wire
from workers.link import ControllerLink

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
        lease_s=LEASE_S,
        find=lambda: None,
        on_command=lambda header: None,
        on_found=lambda address: {},
    )
    controller, _ = listener.accept()
    OPEN.append(controller)
    began = time.monotonic()
    for step in range(300):
        link.send("committed", b"x" * 50_000, step=step)
    assert time.monotonic() - began < 5
    controller.settimeout(30)
    assert wire.receive(controller)[0]["type"] == "hello"
    received = [wire.receive(controller) for _ in range(300)]
    assert [header["step"] for header, _ in received] == list(range(300))
    assert {bytes(payload) for _, payload in received} == {b"x" * 50_000}
    listener.close()
