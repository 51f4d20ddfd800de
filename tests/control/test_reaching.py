"""An address at which no Ray head answers is refused soon, whatever listens there."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from elastic.on_ray.driver import submission
from elastic.on_ray.driver.submission import refuse_unreachable
from elastic.protocol.errors import WrongInput

SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """Its address. answer: to whatever is said; None: it is silent."""
    server = socket.create_server(("127.0.0.1", 0))
    there: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):
            connection, _ = server.accept()
            there.append(connection)
            if answer is not None:
                connection.recv(1000)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.getsockname()[1]}"
    server.close()
    thread.join(60)
    for connection in there:
        connection.close()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "timed out"),
        (b"", "what listens there is no Ray"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what listens there is no Ray"),
        (SETTINGS[:4], ""),
        (SETTINGS, ""),
    ],
    ids=["silent", "closes", "another server", "half", "gRPC"],
)
def test_what_is_no_head_of_ray_is_one_line(monkeypatch, answer, why):
    monkeypatch.setattr(submission, "ANSWER_S", 60.0 if answer is not None else 0.1)
    with listening(answer) as address:
        if not why:
            refuse_unreachable(address)
            return
        with pytest.raises(WrongInput) as caught:
            refuse_unreachable(f"ray://{address}")
    assert str(caught.value) == (
        f"no Ray cluster answers at address 'ray://{address}': {why}; check it with "
        "`ray status --address ...`, or leave --address out"
    )
