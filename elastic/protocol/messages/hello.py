"""The first frame on every connection, and how a link is taken up again over another one."""

from dataclasses import dataclass
from typing import TypeAlias, get_args

from elastic.protocol.messages.direction import Direction
from elastic.protocol.wire import Header

VERSION = 1
"""Of all messages. Who hears another one in a hello says so and has nothing else to say."""


@dataclass(frozen=True, slots=True)
class Hello:
    token: str
    """The run's secret."""
    worker: int = -1
    """Who dials; -1: no worker."""
    role: str = ""
    """To the controller: "worker" or "pulse"."""
    session: str = ""
    """The dialling worker's word for its link: another one is another link."""
    resumes: bool = False
    """It is a second connection for that link, if the controller knows it."""
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Known:
    """The controller has this link; it goes on here once the worker says `Resume`."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The controller has no such link."""


@dataclass(frozen=True, slots=True)
class Resume:
    num_heard: int
    """Frames of the other end, over all connections of the link."""


@dataclass(frozen=True, slots=True)
class Resumed:
    num_heard: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The worker is no part of the run: its process ends itself."""

    reason: str = ""
    """If it is not that the controller has ended it."""


Greeting: TypeAlias = Hello | Resume
"""From who dials, before a link is there."""
Answer: TypeAlias = Known | Unknown | Resumed | Leave
"""From the controller."""

GREETING: Direction[Greeting] = Direction(*get_args(Greeting))
ANSWER: Direction[Answer] = Direction(*get_args(Answer))


def other_version(header: Header) -> str:
    """Why one of another version cannot be talked to; empty if it can. Asked before anything else
    is read: another version's hello may have other fields."""
    said = header.get("version")
    if said == VERSION:
        return ""
    return (
        f"it speaks version {said} of the protocol and this process version {VERSION}: "
        "install the same elastic-ray-trainer on every node"
    )
