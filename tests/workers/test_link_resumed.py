"""A worker's link that is unanswered, or whose connection has ended, goes on over a second one to
the same controller."""

import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from elastic.on_ray import links
from elastic.protocol import wire
from elastic.protocol.messages.direction import pack
from elastic.protocol.messages.hello import ANSWER, VERSION, Hello, Leave, Unknown
from elastic.protocol.messages.to_controller import Introduction, LastWords, PartSaved
from elastic.protocol.messages.to_worker import Word
from tests.workers.links_rig import (
    MADE,
    SILENCE_S,
    Clock,
    Controller,
    Link,
    Relay,
    asked,
    link_to,
    saved,
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


def heard(controller: Controller) -> list:
    return [said.step for said in controller.heard if isinstance(said, PartSaved)]


def told(link: ControllerLink) -> list:
    found = []
    while not link.commands.empty():
        found.append(link.commands.get().step)
    return found


def test_what_was_said_during_a_cut_arrives_once_and_in_order_after_it(ends):
    controller, relay, link = ends
    link.send(saved(0))
    until(lambda: heard(controller) == [0])
    controller.send(asked(0))
    until(lambda: not link.commands.empty())
    relay.cut()
    for step in range(1, 4):
        link.send(saved(step, b"x" * 100_000))
        controller.send(asked(step))
    until(lambda: relay.num_dialled > 1)
    assert heard(controller) == [0]
    relay.mend()
    until(lambda: len(heard(controller)) == 4)
    until(lambda: link.commands.qsize() == 4)
    link.send(saved(4))
    controller.send(asked(4))
    until(lambda: len(heard(controller)) == 5)
    until(lambda: link.commands.qsize() == 5)
    assert (heard(controller), told(link)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    assert controller.closed == [], "nobody is lost by it"


def test_a_controller_that_is_slow_loses_nobody_and_hears_everything_once(ends):
    controller, relay, link = ends
    link.send(saved(0))
    until(lambda: heard(controller) == [0])
    resting = threading.Event()
    controller.loop.call_soon_threadsafe(resting.wait, 60)
    for step in range(1, 4):
        link.send(saved(step))
    until(lambda: relay.num_dialled > 3)  # it gives some connections up
    resting.set()
    until(lambda: heard(controller) == [0, 1, 2, 3])
    num_dialled = relay.num_dialled
    until(lambda: relay.num_dialled > num_dialled)  # no word ever comes here
    link.send(saved(4))
    until(lambda: heard(controller) == [0, 1, 2, 3, 4])
    assert controller.closed == []


def test_a_controller_that_is_slow_again_while_a_link_is_taken_up_loses_nobody(ends):
    """It has said that it knows the link, and says nothing more for a while."""
    controller, _, link = ends
    link.send(saved(0))
    until(lambda: heard(controller) == [0])
    resting, original = [threading.Event() for _ in range(2)], controller.links._resumed

    async def resumed(*connection):
        rest = resting.pop() if resting else None
        if rest is not None:
            controller.loop.call_later(0.01, rest.wait, 3 * SILENCE_S)  # after "known"
        return await original(*connection)

    controller.links._resumed = resumed
    until(lambda: not resting)
    link.send(saved(1))
    until(lambda: heard(controller) == [0, 1])
    assert controller.closed == []


def test_a_reader_that_is_kept_up_while_a_link_is_taken_up_loses_nobody(ends, monkeypatch):
    """The controller gives the second connection up, and a third is taken."""
    monkeypatch.setattr(links, "HELLO_S", 0.2)
    controller, _, link = ends
    link.send(saved(0))
    until(lambda: heard(controller) == [0])
    original, kept_up = link._next_second, []

    def next_second():
        second = original()
        if not kept_up:
            kept_up.append(True)
            time.sleep(1.0)  # the fault
        return second

    link._next_second = next_second
    until(lambda: bool(kept_up))
    link.send(saved(1))
    until(lambda: heard(controller) == [0, 1])
    assert controller.closed == []


def test_words_are_no_silence_and_tell_what_was_heard(clock, ends):
    controller, relay, link = ends
    for step in range(1, 21):
        clock.pass_(SILENCE_S / 3)
        link.send(saved(step))
        controller.send(Word(step, formed=0))
        until(lambda n=step: link.recorded_step == n)
    assert relay.num_dialled == 1
    until(lambda: len(heard(controller)) == 20)
    controller.send(Word(21, formed=0))
    until(lambda: link.recorded_step == 21)
    assert not link._outbox._sent


def test_the_end_of_the_newest_connection_is_told_and_of_one_that_was_left_is_not(ends):
    controller, relay, link = ends
    link.send(saved(0))
    until(lambda: heard(controller) == [0])
    relay.cut()
    until(lambda: relay.num_dialled > 1)
    relay.mend()
    link.send(saved(1))
    until(lambda: heard(controller) == [0, 1])
    assert controller.closed == [], "the first one's end was none"

    def end_newest() -> bool:  # no word ever comes here, so there is a new one ever and again
        connection = link._connection
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        return controller.closed[:1] == [(3, False)]

    until(end_newest)
    link.send(saved(2))
    until(lambda: heard(controller) == [0, 1, 2])


def test_what_was_said_over_connections_that_are_reset_arrives_once_and_in_order(ends):
    controller, relay, link = ends
    link.send(saved(0))
    until(lambda: heard(controller) == [0])  # there is a link
    controller.send(asked(0))
    told_steps: list[int] = []
    for step in range(1, 40):
        link.send(saved(step, b"x" * 100_000))
        controller.send(asked(step))
        if step % 8 == 7:
            relay.reset()
            until(lambda: link._connection is not None)
    until(lambda: len(heard(controller)) >= 40)
    until(lambda: told_steps.extend(told(link)) or len(told_steps) >= 40)
    assert (heard(controller), told_steps) == ([*range(40)], [*range(40)])
    assert link.num_controllers == 1, "it is the same one"
    assert (3, True) in controller.closed


def test_new_connections_that_end_without_a_word_are_no_news_of_the_link(ends):
    """As at a full house. The controller is the same, and what it has not heard is kept for it."""
    controller, relay, link = ends
    link.send(saved(0))
    until(lambda: heard(controller) == [0])
    for step, silence in enumerate((relay.cut, relay.reset), start=1):
        relay.turn_away(True)
        silence()
        num_dialled = relay.num_dialled
        link.send(saved(step))
        controller.send(asked(step))
        until(lambda n=num_dialled: relay.num_dialled > n + 1)
        relay.turn_away(False)
        relay.mend()
        until(lambda n=step: heard(controller) == [*range(n + 1)])
        until(lambda n=step: link.commands.qsize() == n)
    assert told(link) == [1, 2]
    assert link.num_controllers == 1


def test_a_path_that_is_silent_and_refuses_new_connections_for_a_while_loses_nothing(ends):
    controller, relay, link = ends
    link.send(saved(0))
    until(lambda: heard(controller) == [0])  # there is a link
    controller.send(asked(0))
    until(lambda: link.commands.qsize() == 1)
    relay.cut()
    relay.refuse()
    link.send(saved(1))
    controller.send(asked(1))
    threading.Event().wait(4 * SILENCE_S)
    relay.listen()
    relay.mend()
    until(lambda: heard(controller) == [0, 1] and link.commands.qsize() == 2)
    assert (told(link), link.num_controllers) == ([0, 1], 1)
    assert controller.closed == []


def test_a_controller_that_is_slow_is_not_left_while_new_connections_are_refused(clock, ends):
    controller, relay, link = ends
    link.send(saved(0))
    until(lambda: heard(controller) == [0])
    relay.refuse()
    for _ in range(8):
        clock.pass_(SILENCE_S / 2)
    link.send(saved(1))
    controller.send(asked(1))
    until(lambda: heard(controller) == [0, 1] and told(link) == [1])
    assert (relay.num_dialled, controller.closed) == (1, [])


def test_a_link_that_is_silent_and_refused_follows_a_successor_elsewhere(clock):
    """Its controller has died, and no word of that came through. Once the successor is known, it
    takes no time of the link's."""
    controller, successor = Controller(), Controller()
    relay, found = Relay(controller.address), []
    link = link_to(relay.address, lambda: successor.address if found else None)
    link.send(saved(0))
    until(lambda: heard(controller) == [0])
    relay.cut()
    relay.refuse()
    for _ in range(4):
        clock.pass_(SILENCE_S / 2)
    found.append(True)
    until(lambda: [type(said) for said in successor.heard] == [Introduction])
    link.send(saved(1))
    until(lambda: heard(successor) == [1])


def test_a_controller_that_says_it_does_not_know_the_link_is_introduced_to(ends):
    """As a successor that listens where its predecessor did."""
    controller, relay, link = ends
    link.send(saved(0))
    until(lambda: heard(controller) == [0])
    controller.loop.call_soon_threadsafe(controller.links._links.clear)
    relay.reset()
    until(lambda: Introduction in map(type, controller.heard))
    link.send(saved(1))
    until(lambda: heard(controller) == [0, 1])
    assert link.num_controllers == 2


def test_a_link_whose_controller_has_gone_without_a_word_looks_for_another():
    """The first one's host was cut off when its process died, and another listens there."""
    deaf = socket.create_server(("127.0.0.1", 0))
    found = []

    def find():
        found.append(True)

    link = link_to(deaf.getsockname(), find)
    first, _ = deaf.accept()
    assert wire.receive(first)[0]["resumes"] is False
    deaf.settimeout(60)
    second, _ = deaf.accept()
    assert wire.receive(second)[0]["resumes"] is True
    assert not found
    second.close()
    until(lambda: bool(found))
    assert link.commands.empty()


def test_a_worker_that_was_lost_during_a_cut_is_told_so_when_it_dials():
    controller = Controller()
    hello = Hello("secret", 3, "worker", session="a")
    with socket.create_connection(controller.address, timeout=60) as first:
        first.sendall(pack(hello))
        first.sendall(pack(saved(0)))
        until(lambda: heard(controller) == [0])
        controller.loop.call_soon_threadsafe(controller.links.drop, 3)
        with socket.create_connection(controller.address, timeout=60) as second:
            second.sendall(pack(replace(hello, resumes=True)))
            assert ANSWER.read(*wire.receive(second)) == Leave()
        with socket.create_connection(controller.address, timeout=60) as stranger:
            stranger.sendall(pack(replace(hello, worker=4, resumes=True)))
            assert ANSWER.read(*wire.receive(stranger)) == Unknown()
        with socket.create_connection(controller.address, timeout=60) as stranger:
            stranger.sendall(pack(replace(hello, token="guess", worker=4, resumes=True)))
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
        answer = ANSWER.read(*wire.receive(stranger))
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
        "link.Hello = lambda *given, **named: replace(Hello(*given, **named), version=99)\n"
        f"link.ControllerLink({controller.address!r}, token='secret', worker=3, silence_s=60,"
        " lease_s=60, find=lambda: print('searched'), on_command=print, on_found=print)\n"
        "time.sleep(600)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    (reason,) = (said.why for said in controller.heard)
    assert (done.returncode, done.stdout) == (EXIT_WITHOUT_CONTROLLER, "")
    assert done.stderr == f'leaving reason="{reason}"\n'
    assert "it speaks version 99 of the protocol" in reason
