"""The worker's end of its link to the controller: reports out, commands in, and the lease.

A controller may die and have a successor: the link finds it, says where the worker stands, and
goes on. What a worker's standing is, is in standing.py.
"""

import os
import queue
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from elastic.protocol import wire
from elastic.protocol.messages.direction import pack
from elastic.protocol.messages.hello import ANSWER, Hello, Leave, Resume, Resumed, Unknown
from elastic.protocol.messages.to_controller import Heard, Introduction, Report
from elastic.protocol.messages.to_worker import TO_WORKER, Command, SaveConcluded, Word
from elastic.protocol.outbox import Outbox
from workers.health.unanswered import Unanswered

EXIT_WITHOUT_CONTROLLER = 71
RETRY_S = 0.05
WRITABLE_S = 0.5
LOOK_S = 0.25
"""Between two looks at whether the link is answered."""
DIAL_S = 0.5
"""For a connection to come about, when it is tried again and again."""
ENDED_S = 1.0
"""How long Ray has to end this process as it was asked to, before it ends itself: Ray reports an
exit that comes before its own as an unexpected error, on the driver's console."""
LAST_WORDS_S = 10.0
"""For a log on its way to a store; a process that has to leave may not take longer."""
Address = tuple[str, int]


class NoLink(ConnectionError):
    """A controller has said that it does not know this link. Nothing else says so: who refuses a
    connection, or ends it without a word, may be a firewall, or a controller with a full house."""


class Search:
    """For the controller: one question at a time, in a thread of its own. An answer may take
    minutes, and the same controller may be back soon."""

    def __init__(self, find: Callable[[], Address | None]) -> None:
        self._find = find
        self._answers: queue.SimpleQueue[Address | None] = queue.SimpleQueue()
        self._is_asking = False

    def answer(self, patience_s: float) -> Address | None:
        """None: there is no controller now. Raises queue.Empty if there is no answer yet."""
        if not self._is_asking:
            ask = threading.Thread(target=lambda: self._answers.put(self._find()), daemon=True)
            ask.start()
            self._is_asking = True
        address = self._answers.get(timeout=patience_s)
        self._is_asking = False
        return address


class ControllerLink:
    """One TCP connection at a time, read by a thread.

    After a cut TCP tries again later and later. So where a connection is unanswered for `silence_s`
    another thread dials the same controller again, and the link goes on over the second connection
    once the controller has answered there: with no frame lost or repeated, both ends count them.
    A connection that ends, as all do that a firewall resets, is followed by another one likewise.

    `on_command` is called in that thread with each command, at once; the main thread finds all of
    them in `commands`, among them None for each `wake`. Without a word from any controller for
    `lease_s`, or when it is told to leave, the process ends itself: it would only compute what
    nobody counts.
    """

    def __init__(
        self,
        address: Address,
        *,
        token: str,
        worker: int,
        silence_s: float,
        lease_s: float,
        find: Callable[[], Address | None],
        on_command: Callable[[Command], None],
        on_found: Callable[[Address], Introduction],
    ) -> None:
        """find: asks for the controller's address; it waits for Ray's head, if that is away.
        on_found: called with the address of a new controller; gives what to introduce us with."""
        self.commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self.recorded_step = 0
        """Steps that the controller has put on record."""
        self._went_back = 0  # the generation that last did
        self.concluded_saves: dict[int, bool] = {}
        """Step -> whether its newest save was published."""
        self.num_controllers = 1
        """So many this worker has met."""
        self._token, self._worker = token, worker
        self._silence_s, self._lease_s = silence_s, lease_s
        self._find, self._on_command, self._on_found = find, on_command, on_found
        self._lock = threading.Lock()
        self._outbox = Outbox()
        self._session, self._address = "", address
        self._num_heard, self._heard_at = 0, time.monotonic()
        self._seconds: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        """On which the controller will take this link up; None: there may be another controller."""
        self._is_leaving, self._left_at = False, 0.0
        """The reading thread is to leave its connection for one of them."""
        self._trying: socket.socket | None = None
        """The one that it tries."""
        self._num_sent = 0  # bytes of the first of them, on this connection
        self._is_full = threading.Event()
        self._connection: socket.socket | None = None
        try:
            self._connect(address)
        except OSError:
            self._reconnect()
        threading.Thread(target=self._read, name="link", daemon=True).start()
        threading.Thread(target=self._redial, name="link-dialler", daemon=True).start()
        threading.Thread(target=self._send_late, name="link-sender", daemon=True).start()

    def send(self, report: Report | Heard) -> None:
        """To the controller, or to the next one if there is none now. Never waits: a link that is
        cut takes nothing more after a few dozen reports."""
        frame = pack(report)
        with self._lock:
            self._outbox.unsent.append(frame)
            self._flush()

    def wake(self) -> None:
        """Any thread: whoever waits for commands is to look around."""
        self.commands.put(None)

    def go_back(self, generation: int, step: int) -> None:
        """This generation begins behind what is on record; its Joined says so."""
        if step < self.recorded_step:
            self._went_back, self.recorded_step = generation, step

    def _flush(self) -> None:
        unsent = self._outbox.unsent
        while unsent and self._connection is not None:
            try:
                if not is_writable(self._connection, 0):
                    self._is_full.set()
                    return
                rest = memoryview(unsent[0])[self._num_sent :]
                num_sent = self._connection.send(rest)
            except (OSError, ValueError):
                self._connection = None  # the reading thread finds another
                return
            self._num_sent += num_sent
            if num_sent == len(rest):
                self._outbox.sent()
                self._num_sent = 0

    def _send_late(self) -> None:
        """What the socket had no room for."""
        while True:
            self._is_full.wait()
            self._is_full.clear()
            connection = self._connection
            if connection is None:
                continue  # the next connection takes it
            try:
                if not is_writable(connection, WRITABLE_S):
                    self._is_full.set()
            except (OSError, ValueError):
                continue
            with self._lock:
                self._flush()

    def _connect(self, address: Address, introduction: Introduction | None = None) -> None:
        """Raises OSError."""
        connection = socket.create_connection(address, timeout=self._lease_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        session = secrets.token_hex(8)
        connection.sendall(self._hello(session, resumes=False))
        first = () if introduction is None else (pack(introduction),)
        with self._lock:
            self._session, self._address = session, address
            self._num_heard, self._heard_at = 0, time.monotonic()
            self._is_leaving, self._trying = False, None
            while not self._seconds.empty():
                if (second := self._seconds.get()) is not None:
                    second.close()
            self._outbox.begin(*first)
            self._go_on_over(connection)

    def _hello(self, session: str, *, resumes: bool) -> bytes:
        return pack(Hello(self._token, self._worker, "worker", session, resumes))

    def _go_on_over(self, connection: socket.socket) -> None:
        self._connection, self._num_sent = connection, 0
        self._flush()

    def _read(self) -> None:
        while True:
            connection = self._connection
            try:
                assert connection is not None
                self._listen(connection)
            except TimeoutError:
                self._leave("no word from the controller within the lease")
            except (OSError, AssertionError):
                pass
            if not self._take_up(connection):
                with self._lock:
                    self._connection, self._is_leaving = None, False
                self._reconnect()

    def _listen(self, connection: socket.socket) -> None:
        while True:
            message = TO_WORKER.read(*wire.receive(connection))
            self._heard_at = time.monotonic()
            if isinstance(message, Word):
                with self._lock:
                    self._outbox.heard(message.num_heard)
                if message.formed >= self._went_back:  # else said before the controller heard of it
                    self.recorded_step = message.recorded_step
                continue
            self._num_heard += 1
            self.send(Heard(self._num_heard))
            match message:
                case SaveConcluded(step, is_published):
                    self.concluded_saves[step] = is_published
                case Leave(reason):
                    time.sleep(0.0 if reason else ENDED_S)
                    self._leave(reason or "the controller ended this worker")
                case command:
                    self._on_command(command)
                    self.commands.put(command)

    def _take_up(self, former: socket.socket | None) -> bool:
        """Go on over a second connection, if the first was left for one; if that breaks, too, over
        the next. None is closed before the controller has left it: it would take its end for ours.
        False if there may be another controller."""
        left = [former] if former is not None else []
        while self._is_leaving and (second := self._next_second()) is not None:
            if not self._resumes_over(second, self._lease_s):
                left.append(second)
                continue
            for connection in left:
                connection.close()
            return True
        for connection in left:
            connection.close()
        return False

    def _resumes_over(self, second: socket.socket, patience_s: float) -> bool:
        """False if it breaks, too, or has just been left."""
        try:
            second.settimeout(patience_s)
            second.sendall(pack(Resume(self._num_heard)))
            resumed = ANSWER.read(*wire.receive(second))
            second.settimeout(self._lease_s)
        except OSError:
            return False
        if not isinstance(resumed, Resumed):
            return False
        with self._lock:
            if self._trying is not second:
                return False
            self._is_leaving, self._trying = False, None
            self._heard_at = time.monotonic()
            self._outbox.take_up(resumed.num_heard)
            self._go_on_over(second)
        return True

    def _next_second(self) -> socket.socket | None:
        try:
            second = self._seconds.get(timeout=self._lease_s)
        except queue.Empty:
            self._leave("no word from the controller within the lease")
        with self._lock:
            self._trying = second
        return second

    def _redial(self) -> None:
        unanswered, search = Unanswered(), Search(self._find)
        look_s = min(LOOK_S, self._silence_s / 4)
        while True:
            time.sleep(look_s)
            connection, session, now = self._connection, self._session, time.monotonic()
            if connection is None and not self._is_leaving:
                continue
            try:
                silent_s = now - max(self._heard_at, self._left_at)
                if connection is not None and not self._is_leaving:
                    silent_s = max(silent_s, unanswered.look(connection, now))
                if silent_s <= self._silence_s:
                    continue
                second = self._dialled(session)
            except NoLink:
                second = None  # so nobody is at the first one's end
            except (wire.ConnectionClosed, ConnectionRefusedError):
                if not self._has_successor(search, look_s):
                    continue  # the first one's end may only be slow
                second = None
            except OSError:
                continue  # out of reach, slow, or just being replaced
            self._hand_over(connection, session, second)

    def _has_successor(self, search: Search, patience_s: float) -> bool:
        """Whether the controller is known to be somewhere else now."""
        try:
            address = search.answer(patience_s)
        except queue.Empty:
            return False
        return address is not None and address != self._address

    def _hand_over(
        self,
        connection: socket.socket | None,
        session: str,
        second: socket.socket | None,
    ) -> None:
        """Have the reading thread leave the connection for the second one, if any."""
        with self._lock:
            is_late = self._session != session or self._connection is not connection
            if not is_late:
                self._is_leaving, self._left_at = True, time.monotonic()
                leaves, self._trying = self._trying or connection, None
                self._seconds.put(second)
        if is_late and second is not None:
            second.close()
        elif not is_late and leaves is not None:
            with suppress(OSError):
                leaves.shutdown(socket.SHUT_RD)  # which tells the other end nothing

    def _dialled(self, session: str) -> socket.socket:
        """A second connection to a controller that knows this link. Raises OSError, or NoLink."""
        second = socket.create_connection(self._address, timeout=DIAL_S)
        try:
            second.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            second.settimeout(self._silence_s)
            second.sendall(self._hello(session, resumes=True))
            answer = ANSWER.read(*wire.receive(second))
            if isinstance(answer, Leave):
                self._leave(answer.reason or "the controller has ended this worker")
            if isinstance(answer, Unknown):
                raise NoLink
        except OSError:
            second.close()
            raise
        return second

    def _reconnect(self) -> None:
        """To the same controller, unless it says that it does not know this link; or to its
        successor."""
        why = "no controller within the lease"
        end = threading.Timer(self._lease_s, self._leave, (why,))
        end.daemon = True
        end.start()
        search, is_known = Search(self._find), self._session != ""
        while True:
            try:
                if is_known and self._dials_again():
                    break
            except NoLink:
                is_known = False
            with suppress(queue.Empty):
                address = search.answer(RETRY_S)
                is_another = not is_known or address != self._address
                if address is not None and is_another and self._reaches(address):
                    break
                time.sleep(RETRY_S)
        end.cancel()

    def _dials_again(self) -> bool:
        """Raises NoLink."""
        try:
            second = self._dialled(self._session)
        except NoLink:
            raise
        except OSError:
            return False  # refused or ended, which a firewall does as well, out of reach, or slow
        with self._lock:
            self._trying = second
        is_taken_up = self._resumes_over(second, self._silence_s)
        if not is_taken_up:
            second.close()
        return is_taken_up

    def _reaches(self, address: Address) -> bool:
        try:
            self.num_controllers += 1
            self._went_back = 0
            self._connect(address, self._on_found(address))
            return True
        except OSError:
            self.num_controllers -= 1
            return False

    def _leave(self, reason: str) -> None:
        leave(EXIT_WITHOUT_CONTROLLER, reason)


def leave(status: int, reason: str, last: Callable[[], None] = lambda: None) -> NoReturn:
    """End this process, whatever becomes of its last words: its log may be on a full disk, or on a
    file system that hangs. last: what to do before, within LAST_WORDS_S."""
    try:
        end = threading.Timer(LAST_WORDS_S, os._exit, (status,))
        end.daemon = True
        end.start()
        print(f'leaving reason="{reason}"', file=sys.stderr, flush=True)
        last()
    finally:
        os._exit(status)


def is_writable(connection: socket.socket, patience_s: float) -> bool:
    """Raises ValueError for a socket that is closed."""
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(1000 * patience_s))
