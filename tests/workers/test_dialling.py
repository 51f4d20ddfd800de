"""Which addresses can be reached from here."""

import os
import resource
import socket
import time

from workers.health.dialling import reached


def test_listeners_are_reached_and_closed_ports_are_not():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        addresses = {"up": server.getsockname(), "down": closed.getsockname()}
        assert reached(addresses, 10.0) == {"up"}
        assert reached({}, 5.0) == set()


def test_an_answer_is_waited_for_no_longer_than_it_takes_or_than_there_is_time():
    with socket.create_server(("127.0.0.1", 0)) as server:
        began = time.monotonic()
        assert reached({"up": server.getsockname()}, 30.0) == {"up"}
        assert time.monotonic() - began < 25
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        others = [socket.socket() for _ in range(3)]
        for other in others:  # nobody accepts: what comes next gets no answer
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        began = time.monotonic()
        assert reached({"full": full.getsockname()}, 0.3) == set()
        assert 0.25 < time.monotonic() - began < 25
        for other in others:
            other.close()


def test_a_process_may_have_thousands_of_files_open():
    had = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(had[0], 4096), had[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            assert reached({"a": listener.getsockname()}, 30) == {"a"}
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, had)
