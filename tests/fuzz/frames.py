"""What servers of a run read of a connection: of strangers, and of whoever has shown the token.

The servers are the real ones; what they would do with a message is not asked.
"""

import asyncio
import contextlib
import json
import random
import socket
from pathlib import Path
from typing import Any, cast

from elastic.on_ray.links import LinkServer
from elastic.protocol import wire
from elastic.protocol.messages import to_controller
from elastic.protocol.messages.direction import header_of, pack
from elastic.protocol.messages.hello import VERSION, Hello, Leave
from tests.control.test_messages import DIRECTIONS, examples
from tests.fuzz.mutations import damaged_bytes, damaged_value
from tests.fuzz.target import Target
from workers.distributed.admission import Admission

TOKEN = "0123456789abcdef"
HELLO = header_of(Hello(TOKEN, worker=3, role="worker", number=7))
REPORTS = tuple(examples(kind)[-1] for kind in to_controller.TO_CONTROLLER.kinds)


def is_known(content: bytes) -> bool:
    """Whether its first frame shows the token in our version."""
    try:
        header_bytes, _ = wire.lengths_of(content[: wire.LENGTHS.size], is_hello=True)
        header = json.loads(content[wire.LENGTHS.size :][:header_bytes])
        return header["token"] == TOKEN and header["version"] == VERSION
    except Exception:
        return False


def hello(_: Path) -> Target:
    """What a worker, a holder or a rendezvous reads of a stranger."""
    admitted: list[Hello] = []

    def serve(connection: socket.socket, said: Hello) -> None:
        admitted.append(said)
        connection.close()

    listener = socket.create_server(("127.0.0.1", 0))
    admission = Admission(listener, TOKEN, serve, "fuzzed server")

    def attempt(content: bytes) -> None:
        admitted.clear()
        ours, theirs = socket.socketpair()
        with theirs:
            with contextlib.suppress(OSError):
                theirs.sendall(content)
                theirs.shutdown(socket.SHUT_WR)
            admission._strangers[ours] = None
            admission._greet(ours)
        assert ours.fileno() == -1, "a connection stays open"
        assert is_known(content) or not admitted, "a stranger was let in"
        assert all(type(said) is Hello and said.token == TOKEN for said in admitted)

    return Target(wire.pack(HELLO), damaged_hello, attempt)


class Writer:
    """The controller's end of a connection: asyncio's, as far as it is used."""

    def __init__(self) -> None:
        self.sent = b""
        self.is_closed = False
        self.transport = self

    def write(self, content: bytes) -> None:
        self.sent += content

    def close(self) -> None:
        self.is_closed = True

    abort = close


def controllers_hello(_: Path) -> Target:
    """What the controller reads of a stranger, and of a worker."""
    loop = asyncio.new_event_loop()
    heard: list[Any] = []

    def hear(*said: Any) -> None:
        heard.append(said)

    async def serve(content: bytes) -> Writer:
        server = LinkServer(TOKEN, hear, hear, lambda *_: None)
        reader, writer = asyncio.StreamReader(), Writer()
        reader.feed_data(content)
        reader.feed_eof()
        await server._serve(reader, cast(Any, writer))
        return writer

    def attempt(content: bytes) -> None:
        heard.clear()
        writer = loop.run_until_complete(serve(content))
        assert writer.is_closed, "a connection stays open"
        refused = f'"type":"{Leave.__name__}"'.encode() in writer.sent  # another version's
        assert is_known(content) or refused or not (heard or writer.sent), "a stranger was heard"

    def damage(dice: random.Random, content: bytes) -> bytes:
        first = damaged_hello(dice, content) if dice.random() < 0.7 else content
        frames = [pack(report) for report in dice.choices(REPORTS, k=3)]
        frames[2] = damaged_frame(dice, frames[2])
        return first + b"".join(frames)

    return Target(wire.pack(HELLO), damage, attempt)


def damaged_hello(dice: random.Random, content: bytes) -> bytes:
    """In half of all cases the token is shown: what is damaged is read then."""
    if dice.random() < 0.5:
        return damaged_frame(dice, content)
    header = damaged_value(dice, json.loads(content[wire.LENGTHS.size :]))
    if isinstance(header, dict):
        header |= {"token": TOKEN}
        header |= {"version": VERSION} if dice.random() < 0.9 else {}
    return framed(json.dumps(header).encode())


def damaged_frame(dice: random.Random, content: bytes) -> bytes:
    kind = dice.randrange(3)
    if kind == 0:
        return damaged_bytes(dice, content)
    header_bytes, _ = wire.lengths_of(content[: wire.LENGTHS.size])
    rest = content[wire.LENGTHS.size :]
    value = damaged_value(dice, json.loads(rest[:header_bytes]))
    header, payload = json.dumps(value).encode(), rest[header_bytes:]
    if kind == 1:
        return framed(header, payload)
    lengths = (dice.choice((0, 5, 2**20, 2**32 - 1)), dice.choice((0, 2**20, 2**62, 2**64 - 1)))
    return wire.LENGTHS.pack(*lengths) + header + payload


def framed(header: bytes, payload: bytes = b"") -> bytes:
    return wire.LENGTHS.pack(len(header), len(payload)) + header + payload


def messages(_: Path) -> Target:
    """Every message of a run, as its receiver reads it: it is none, or it is of its union."""
    whole = [
        (d, header_of(said)) for d in DIRECTIONS for kind in d.kinds for said in examples(kind)
    ]
    content = json.dumps([header for _, header in whole]).encode()

    def damage(dice: random.Random, content: bytes) -> bytes:
        number = dice.randrange(len(whole))
        header = damaged_value(dice, json.loads(content)[number])
        return json.dumps([number, header]).encode()

    def attempt(content: bytes) -> None:
        number, header = json.loads(content)
        direction = whole[number][0]
        try:
            said = direction.read(wire.parse(json.dumps(header).encode()))
        except wire.BadFrame:
            return
        assert type(said) in direction.kinds

    return Target(content, damage, attempt)
