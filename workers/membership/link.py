"""The worker's end of its link to the controller: reports out, commands in, and the lease.

A connection that breaks, or is not answered, is followed by another one, to the same controller or
to its successor. Over each the worker introduces itself, and says again what is in force.
"""

import os
import queue
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from elastic.protocol import wire
from elastic.protocol.in_force import ReportsInForce
from elastic.protocol.messages.direction import pack
from elastic.protocol.messages.hello import Hello, Leave
from elastic.protocol.messages.to_controller import Introduction, Report
from elastic.protocol.messages.to_worker import TO_WORKER, Command, SaveConcluded, Word
from elastic.protocol.step_record import AppliedRecord
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


class Search:
    """For the controller: one question at a time, in a thread of its own. An answer may take
    minutes, and the same controller may be back soon."""

    def __init__(self, find: Callable[[], Address | None]) -> None:
        self._find = find
        self._answers: queue.SimpleQueue[Address | None] = queue.SimpleQueue()
        self._is_asking = False

    def answer(self) -> Address | None:
        """None: nobody knows yet, or there is no controller now."""
        if not self._is_asking:
            ask = threading.Thread(target=lambda: self._answers.put(self._find()), daemon=True)
            ask.start()
            self._is_asking = True
        try:
            address = self._answers.get(timeout=RETRY_S)
        except queue.Empty:
            return None
        self._is_asking = False
        return address


class Outgoing:
    """Reports on their way: sent as the connection takes them, and kept while there is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_force = ReportsInForce()
        self._unsent: deque[Report] = deque()
        self._rest = b""
        """Of a report that was sent in part, over this connection."""
        self._is_full = threading.Event()
        self._connection: socket.socket | None = None

    def send(self, report: Report) -> None:
        """Never waits."""
        with self._lock:
            self._in_force.say(report)
            self._unsent.append(report)
            self._flush()

    def begin(self, connection: socket.socket) -> None:
        """What is in force is said again there."""
        with self._lock:
            self._unsent = self._in_force.again_after(self._unsent)
            self._connection, self._rest = connection, b""
            self._flush()

    def end(self) -> None:
        """The connection is of no use any more."""
        with self._lock:
            self._connection = None

    def forget(self, recorded_step: int) -> None:
        with self._lock:
            self._in_force.forget(recorded_step)

    def forget_applied(self, recorded: AppliedRecord) -> None:
        with self._lock:
            self._in_force.forget_applied(recorded)

    def _flush(self) -> None:
        while self._connection is not None and (self._rest or self._unsent):
            try:
                if not is_ready(self._connection, select.POLLOUT, 0):
                    self._is_full.set()
                    return
                self._rest = self._rest or pack(self._unsent.popleft())
                self._rest = self._rest[self._connection.send(self._rest) :]
            except (OSError, ValueError):
                self._connection = None  # the reading thread finds another

    def send_late(self) -> None:
        """What the socket had no room for, for ever."""
        while True:
            self._is_full.wait()
            self._is_full.clear()
            connection = self._connection
            if connection is None:
                continue  # the next connection takes it
            try:
                if not is_ready(connection, select.POLLOUT, WRITABLE_S):
                    self._is_full.set()
            except (OSError, ValueError):
                continue
            with self._lock:
                self._flush()


class Recorded:
    """Up to which step a worker knows the run to be on record."""

    def __init__(self) -> None:
        self.step = 0
        self._of_peers = 0
        """As the controller has said to a peer: its words to us may be older."""
        self._went_back = 0
        """The generation that last did."""

    def hear_word(self, step: int, formed: int) -> bool:
        """False if it was said before the controller heard of a step back."""
        is_news = formed >= self._went_back
        if is_news:
            self.step = max(step, self._of_peers)
        return is_news

    def hear_form(self, step: int) -> None:
        """Lower than before after a roll back. What goes beyond what was said before may die with
        the controller, before its storage hears of it."""
        self.step, self._of_peers = min(self.step, step), min(self._of_peers, step)

    def hear_of_peers(self, step: int) -> None:
        """The newest that the controller has said to any member."""
        self.step, self._of_peers = max(self.step, step), step

    def go_back(self, generation: int, step: int, recorded_step: int) -> None:
        """This generation begins at `step`: behind what is on record, if so its Joined tells.
        recorded_step: of its Form, which no word need have said yet."""
        if step < max(self.step, recorded_step):
            self._went_back = generation
            self.hear_form(step)


class ControllerLink:
    """One TCP connection at a time, dialled and read by a thread.

    After a cut TCP tries again later and later. So a connection that is unanswered for `silence_s`
    is given up like one that has ended, and the controller is dialled again. What was on its way is
    lost then: both ends say again what is in force (elastic/protocol/in_force.py).

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
        introduce: Callable[[Address], Introduction],
    ) -> None:
        """find: asks for the controller's address; it waits for Ray's head, if that is away.
        introduce: called with the address of a controller; gives what to say first."""
        self.commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._recorded = Recorded()
        self.applied = AppliedRecord()
        """Steps of a script's that the controller has put on record."""
        self.concluded_saves: dict[int, bool] = {}
        """Step -> whether its newest save was published."""
        self._token, self._worker, self._address = token, worker, address
        self._silence_s, self._lease_s = silence_s, lease_s
        self._find, self._on_command, self._introduce = find, on_command, introduce
        self._heard_at, self._num_dials = time.monotonic(), 0
        self._outgoing = Outgoing()
        threading.Thread(target=self._keep, name="link", daemon=True).start()
        threading.Thread(target=self._send_late, name="link-sender", daemon=True).start()

    def send(self, report: Report) -> None:
        """To the controller, or to the next one if there is none now. Never waits: a link that is
        cut takes nothing more after a few dozen reports."""
        self._outgoing.send(report)

    def wake(self) -> None:
        """Any thread: whoever waits for commands is to look around."""
        self.commands.put(None)

    @property
    def recorded_step(self) -> int:
        """Steps that the controller has put on record."""
        return self._recorded.step

    def hear_recorded(self, step: int) -> None:
        self._recorded.hear_form(step)

    def hear_of_peers(self, recorded_step: int) -> None:
        self._recorded.hear_of_peers(recorded_step)

    def go_back(self, generation: int, step: int, recorded_step: int) -> None:
        self._recorded.go_back(generation, step, recorded_step)

    # --- in the link's own threads ----------------------------------------------------------
    def _send_late(self) -> None:
        self._outgoing.send_late()

    def _keep(self) -> None:
        search = Search(self._find)
        while True:
            connection = self._dial()
            if connection is not None:
                with connection, suppress(OSError):
                    self._listen(connection)
                self._outgoing.end()
            self._mind_lease()
            time.sleep(RETRY_S)
            self._address = search.answer() or self._address

    def _dial(self) -> socket.socket | None:
        """None: refused, which a firewall does as well, or out of reach."""
        self._num_dials += 1
        try:
            connection = socket.create_connection(self._address, timeout=DIAL_S)
        except OSError:
            return None
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(self._silence_s)
            hello = Hello(self._token, self._worker, "worker", self._num_dials)
            connection.sendall(pack(hello) + pack(self._introduce(self._address)))
        except OSError:
            connection.close()
            return None
        self._outgoing.begin(connection)
        return connection

    def _listen(self, connection: socket.socket) -> None:
        """Until it breaks, or is unanswered for too long: OSError."""
        unanswered, begun_at = Unanswered(), time.monotonic()
        limit_s = min(self._silence_s, self._lease_s)
        while True:
            if is_ready(connection, select.POLLIN, min(LOOK_S, limit_s / 4)):
                self._hear(TO_WORKER.read(*wire.receive(connection)))
                self._heard_at = time.monotonic()
            now = time.monotonic()
            silent_s = now - max(self._heard_at, begun_at)
            if max(silent_s, unanswered.look(connection, now)) > limit_s:
                raise TimeoutError

    def _hear(self, message: Command | SaveConcluded | Word | Leave) -> None:
        match message:
            case Word() as word:
                self._hear_word(word)
            case SaveConcluded(step, is_published):
                self.concluded_saves[step] = is_published
            case Leave(reason):
                time.sleep(0.0 if reason else ENDED_S)
                self._leave(reason or "the controller ended this worker")
            case command:
                self._on_command(command)
                self.commands.put(command)

    def _hear_word(self, word: Word) -> None:
        self.applied = word.applied
        self._outgoing.forget_applied(word.applied)
        if self._recorded.hear_word(word.recorded_step, word.formed):
            self._outgoing.forget(word.recorded_step)

    def _mind_lease(self) -> None:
        if time.monotonic() - self._heard_at > self._lease_s:
            self._leave("no word from a controller within the lease")

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


def is_ready(connection: socket.socket, for_what: int, patience_s: float) -> bool:
    """for_what: select.POLLIN or POLLOUT. Raises ValueError for a socket that is closed."""
    poll = select.poll()
    poll.register(connection, for_what)
    return bool(poll.poll(1000 * patience_s))
