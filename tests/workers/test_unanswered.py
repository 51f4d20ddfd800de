"""Hosts that do not answer, as the kernel's tables tell."""

import os
import socket

import pytest

from workers.health import unanswered as module
from workers.health.unanswered import Silences, unanswered

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt uid\n"


def line(remote: str, state: str = "01", timer: str = "01", retransmits: int = 2, inode: int = 7):
    return (
        f"   0: 0100007F:1F90 {remote}:01BB {state} 00000010:00000000 {timer}:00000014 "
        f"{retransmits:08X}     0        0 {inode} 2 0000000000000000 20 4 30 10 -1\n"
    )


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """write(tcp, tcp6): what process 1 sees; its sockets are 7 and 8."""
    (tmp_path / "1" / "net").mkdir(parents=True)
    (tmp_path / "1" / "fd").mkdir()
    for fd, target in enumerate(["socket:[7]", "/dev/null", "socket:[8]"]):
        (tmp_path / "1" / "fd" / str(fd)).symlink_to(target)
    there = lambda path: tmp_path / str(path).removeprefix("/proc/")  # noqa: E731
    monkeypatch.setattr(module, "Path", there)
    monkeypatch.setattr(module.os, "scandir", lambda path, scan=os.scandir: scan(there(path)))

    def write(tcp: str, tcp6: str = "") -> None:
        (tmp_path / "1" / "net" / "tcp").write_text(HEADER + tcp)
        (tmp_path / "1" / "net" / "tcp6").write_text(HEADER + tcp6)

    return write


def test_whoever_is_sent_the_same_again_and_again_does_not_answer(tables):
    mapped = "0000000000000000FFFF00000A00D50A"
    tables(
        line("0100D50A")
        + line("0200D50A", state="02", inode=8)  # a connection that does not come about
        + line("0300D50A", retransmits=1)  # one packet was lost
        + line("0400D50A", timer="02")  # idle
        + line("0500D50A", state="06")  # closed
        + line("0600D50A", inode=9),  # another process's
        line(mapped) + line("B80D0120000000000000000001000000"),
    )
    assert unanswered(1) == {"10.213.0.1", "10.213.0.2", "10.213.0.10", "2001:db8::1"}


def test_a_silence_lasts_until_a_look_finds_an_answer(tables):
    silences = Silences()
    tables(line("0100D50A"))
    assert silences.look(1, 10.0) == {"10.213.0.1": 0.0}
    tables(line("0100D50A") + line("0200D50A"))
    assert silences.look(1, 11.5) == {"10.213.0.1": 1.5, "10.213.0.2": 0.0}
    tables(line("0200D50A"))
    assert silences.look(1, 12.0) == {"10.213.0.2": 0.5}
    silences.forget()
    assert silences.look(1, 13.0) == {"10.213.0.2": 0.0}


def test_a_process_that_is_gone_waits_for_nobody():
    assert unanswered(2**22 + 1) == set()


def test_a_living_connection_answers():
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as connection:
        connection.sendall(b"unread")
        assert unanswered(os.getpid()) == set()
