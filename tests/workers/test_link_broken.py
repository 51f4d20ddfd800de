"""A worker's link that is unanswered, or whose connection has ended, goes on over another one: both
ends say again what is in force."""

import socket
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from elastic.protocol import wire
from elastic.protocol.messages.direction import pack
from elastic.protocol.messages.hello import VERSION, Hello, Leave
from elastic.protocol.messages.to_controller import Committed, Introduction, LastWords
from elastic.protocol.messages.to_worker import TO_WORKER, SaveConcluded, Word
from tests.workers.links_rig import (
    MADE,
    SILENCE_S,
    Clock,
    Controller,
    Link,
    Relay,
    asked,
    committed,
    link_to,
    until,
)
from workers.membership import link as links_end
from workers.membership.link import EXIT_WITHOUT_CONTROLLER, ControllerLink


@pytest.fixture
def clock(monkeypatch):
    """Asked for before the ends, whose link is then as late as the test has it."""
    made = Clock()
    monkeypatch.setattr(links_end, "time", made)
    monkeypatch.setattr(links_end, "Unanswered", made.unanswered)
    return made


@pytest.fixture
def ends():
    controller = Controller()
    relay = Relay(controller.address)
    return controller, relay, link_to(relay.address, lambda: relay.address)


@pytest.fixture(autouse=True)
def ended():
    """A link would dial for ever, and take files and time from the tests that follow."""
    yield
    made = MADE[::-1]  # links first
    MADE.clear()
    for each in made:
        each.close()
    until(lambda: all(each.has_ended() for each in made if isinstance(each, Link)))


def heard(controller: Controller) -> list[int]:
    """Steps, once each, as they were heard first."""
    said = [s.steps[-1].step for s in controller.heard if isinstance(s, Committed)]
    return list(dict.fromkeys(said))


def newest_told(link: ControllerLink) -> int:
    """The step of the newest command."""
    newest = -1
    while not link.commands.empty():
        newest = link.commands.get().step
    return newest


def is_connected(controller: Controller) -> bool:
    return Introduction in map(type, controller.heard)


def test_what_was_said_during_a_cut_is_said_after_it(ends):
    controller, relay, link = ends
    link.send(committed(0))
    until(lambda: heard(controller) == [0])
    relay.cut()
    for step in range(1, 4):
        link.send(committed(step, b"x" * 100_000))
        controller.send(asked(step))
    until(lambda: relay.num_dialled > 1)
    assert heard(controller) == [0]
    relay.mend()
    until(lambda: heard(controller) == [0, 1, 2, 3])
    until(lambda: newest_told(link) == 3)
    assert controller.closed == [], "nobody is lost by it"


def test_a_controller_that_is_slow_loses_nobody_and_hears_everything(ends):
    controller, relay, link = ends
    link.send(committed(0))
    until(lambda: heard(controller) == [0])
    resting = threading.Event()
    controller.loop.call_soon_threadsafe(resting.wait, 60)
    for step in range(1, 4):
        link.send(committed(step))
    until(lambda: relay.num_dialled > 3)  # it gives some connections up
    resting.set()
    until(lambda: heard(controller) == [0, 1, 2, 3])
    num_dialled = relay.num_dialled
    until(lambda: relay.num_dialled > num_dialled)  # no word ever comes here
    link.send(committed(4))
    until(lambda: heard(controller) == [0, 1, 2, 3, 4])
    until(lambda: controller.links.is_connected(3))


def test_what_was_said_before_a_return_was_heard_takes_no_step_off_the_log(ends):
    """The Form is the first to tell of the record that the generation begins behind."""
    controller, _, link = ends
    until(lambda: is_connected(controller))
    link.hear_recorded(7)
    link.go_back(generation=3, step=4, recorded_step=7)
    controller.send(Word(7, formed=2))
    controller.send(SaveConcluded(3, True))
    until(lambda: 3 in link.concluded_saves)
    assert link.recorded_step == 0
    controller.send(Word(4, formed=3))
    until(lambda: link.recorded_step == 4)


def test_what_peers_know_to_be_on_record_is_not_forgotten_by_an_older_word(ends):
    """A newcomer that alone survives its first generation heard of it there only."""
    controller, _, link = ends
    until(lambda: is_connected(controller))
    link.hear_of_peers(7)
    controller.send(Word(6, formed=2))
    controller.send(SaveConcluded(3, True))
    until(lambda: 3 in link.concluded_saves)
    assert link.recorded_step == 7
    controller.send(Word(9, formed=2))
    until(lambda: link.recorded_step == 9)
    link.hear_recorded(5)  # rolled back
    controller.send(Word(5, formed=2))
    controller.send(SaveConcluded(4, True))
    until(lambda: 4 in link.concluded_saves)
    assert link.recorded_step == 5


def test_words_are_no_silence_and_end_what_is_in_force(clock, ends):
    controller, relay, link = ends
    until(lambda: is_connected(controller))
    for step in range(1, 21):
        clock.pass_(SILENCE_S / 3)
        link.send(committed(step))
        controller.send(Word(step, formed=0))
        until(lambda n=step: link.recorded_step == n)
    assert relay.num_dialled == 1
    until(lambda: len(heard(controller)) == 20)
    controller.heard.clear()
    link.send(committed(21))
    relay.reset()
    until(lambda: heard(controller) == [21])


def test_the_end_of_the_newest_connection_is_told_and_of_one_that_was_left_is_not(ends):
    controller, relay, link = ends
    link.send(committed(0))
    until(lambda: heard(controller) == [0])
    relay.cut()
    until(lambda: relay.num_dialled > 1)
    relay.mend()
    link.send(committed(1))
    until(lambda: heard(controller) == [0, 1])
    assert controller.closed == [], "the first one's end was none"

    def end_newest() -> bool:  # no word ever comes here, so there is a new one ever and again
        connection = link.connection
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        return controller.closed[:1] == [(3, False)]

    until(end_newest)
    link.send(committed(2))
    until(lambda: heard(controller) == [0, 1, 2])


def test_a_connection_that_was_given_up_before_it_was_heard_of_is_not_the_link():
    controller = Controller()
    with (
        socket.create_connection(controller.address, timeout=60) as late,
        socket.create_connection(controller.address, timeout=60) as newest,
    ):
        newest.sendall(pack(Hello("secret", 3, "worker", 2)) + pack(committed(1)))
        until(lambda: heard(controller) == [1])
        late.sendall(pack(Hello("secret", 3, "worker", 1)) + pack(committed(0)))
        with suppress(ConnectionResetError):
            assert late.recv(1) == b"", "it is closed"
        newest.sendall(pack(committed(2)))
        until(lambda: heard(controller) == [1, 2])
    assert (3, True) not in controller.closed


def test_what_was_said_over_connections_that_are_reset_is_said_again_and_in_order(ends):
    controller, relay, link = ends
    link.send(committed(0))
    until(lambda: heard(controller) == [0])  # there is a link
    newest = -1
    for step in range(1, 40):
        link.send(committed(step, b"x" * 100_000))
        controller.send(asked(step))
        if step % 8 == 7:
            relay.reset()
            until(lambda: link.connection is not None)
    until(lambda: len(heard(controller)) >= 40)
    while newest < 39:
        newest = max(newest, newest_told(link))
    assert heard(controller) == [*range(40)]
    assert (3, True) in controller.closed


def test_new_connections_that_end_without_a_word_are_no_news_of_the_link(ends):
    """As at a full house. What the controller has not heard is kept for it."""
    controller, relay, link = ends
    link.send(committed(0))
    until(lambda: heard(controller) == [0])
    for step, silence in enumerate((relay.cut, relay.reset), start=1):
        relay.turn_away(True)
        silence()
        num_dialled = relay.num_dialled
        link.send(committed(step))
        controller.send(asked(step))
        until(lambda n=num_dialled: relay.num_dialled > n + 1)
        relay.turn_away(False)
        relay.mend()
        until(lambda n=step: heard(controller) == [*range(n + 1)])
        until(lambda n=step: newest_told(link) == n)


def test_a_path_that_is_silent_and_refuses_new_connections_for_a_while_loses_nothing(ends):
    controller, relay, link = ends
    link.send(committed(0))
    until(lambda: heard(controller) == [0])  # there is a link
    relay.cut()
    relay.refuse()
    link.send(committed(1))
    controller.send(asked(1))
    threading.Event().wait(4 * SILENCE_S)
    relay.listen()
    relay.mend()
    until(lambda: heard(controller) == [0, 1] and newest_told(link) == 1)
    assert controller.closed == []


def test_a_link_that_is_silent_and_refused_follows_a_successor_elsewhere(clock):
    """Its controller has died, and no word of that came through. Once the successor is known, it
    takes no time of the link's."""
    controller, successor = Controller(), Controller()
    relay, found = Relay(controller.address), []
    link = link_to(relay.address, lambda: successor.address if found else None)
    link.send(committed(0))
    until(lambda: heard(controller) == [0])
    relay.cut()
    relay.refuse()
    for _ in range(4):
        clock.now += SILENCE_S / 2
    found.append(True)
    until(lambda: heard(successor) == [0])
    assert type(successor.heard[0]) is Introduction
    link.send(committed(1))
    until(lambda: heard(successor) == [0, 1])


def test_a_link_whose_controller_has_gone_without_a_word_looks_for_another():
    """The first one's host was cut off when its process died, and another listens there."""
    deaf = socket.create_server(("127.0.0.1", 0))
    found = []

    def find():
        found.append(True)

    link = link_to(deaf.getsockname(), find)
    deaf.settimeout(60)
    for number in (1, 2):
        connection, _ = deaf.accept()
        assert wire.receive(connection)[0]["number"] == number
        assert wire.receive(connection)[0]["type"] == "Introduction"
        connection.close()
    until(lambda: bool(found))
    assert link.commands.empty()


def test_a_worker_that_was_lost_during_a_cut_is_told_so_when_it_dials():
    controller = Controller()
    with socket.create_connection(controller.address, timeout=60) as first:
        first.sendall(pack(Hello("secret", 3, "worker", 1)) + pack(committed(0)))
        until(lambda: heard(controller) == [0])
        controller.loop.call_soon_threadsafe(controller.links.drop, 3)
        with socket.create_connection(controller.address, timeout=60) as second:
            second.sendall(pack(Hello("secret", 3, "worker", 2)))
            assert TO_WORKER.read(*wire.receive(second)) == Leave()
        with socket.create_connection(controller.address, timeout=60) as stranger:
            stranger.sendall(pack(Hello("guess", 4, "worker", 1)))
            with pytest.raises(wire.ConnectionClosed):
                wire.receive(stranger)
    assert controller.closed == []


@pytest.mark.parametrize(
    "hello",
    [
        {"type": "Hello", "version": VERSION + 1, "later": "a field of its own"},
        {"type": "hello", "role": "worker"},  # of before there were versions
    ],
)
def test_a_worker_of_another_version_is_told_so_in_one_line(hello):
    controller = Controller()
    with socket.create_connection(controller.address, timeout=60) as stranger:
        wire.send(stranger, {"token": "secret", "worker": 3, **hello})
        answer = TO_WORKER.read(*wire.receive(stranger))
    assert isinstance(answer, Leave)
    assert f"it speaks version {hello.get('version')} " in answer.reason
    assert f"version {VERSION}" in answer.reason
    assert not controller.links.is_connected(3)
    until(lambda: controller.heard == [LastWords(answer.reason)])  # for the run's reason


def test_a_worker_of_another_version_leaves_with_the_controllers_line():
    """Its own end, in a process of its own: it never looks for another controller."""
    controller = Controller()
    script = (
        "import time\n"
        "from dataclasses import replace\n"
        "from workers.membership import link\n"
        "from elastic.protocol.messages.hello import Hello\n"
        "from elastic.protocol.messages.to_controller import Introduction\n"
        "introduce = lambda address: Introduction('starting', address)\n"
        "link.Hello = lambda *given, **named: replace(Hello(*given, **named), version=99)\n"
        f"link.ControllerLink({controller.address!r}, token='secret', worker=3, silence_s=60,"
        " lease_s=60, find=lambda: print('searched'), on_command=print, introduce=introduce)\n"
        "time.sleep(600)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    (reason,) = (said.why for said in controller.heard)
    assert (done.returncode, done.stdout) == (EXIT_WITHOUT_CONTROLLER, "")
    assert done.stderr == f'leaving reason="{reason}"\n'
    assert "it speaks version 99 of the protocol" in reason
