"""The first frame on every connection."""

from dataclasses import dataclass

from elastic.protocol.messages.direction import Direction
from elastic.protocol.wire import BadFrame, Header

VERSION = 5
"""Of all messages. Who hears another one in a hello says so and has nothing else to say."""


@dataclass(frozen=True, slots=True)
class Hello:
    token: str
    """The run's secret."""
    worker: int = -1
    """Who dials; -1: no worker."""
    role: str = ""
    """To the controller: "worker" or "pulse". To a member: "" wants all of its state, "part" says
    in a second frame what (peer.py)."""
    number: int = 0
    """So many connections the worker has tried: the one with the highest number is its link."""
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Leave:
    """The worker is no part of the run: its process ends itself."""

    reason: str = ""
    """If it is not that the controller has ended it."""


GREETING: Direction[Hello] = Direction(Hello)


def hello_in(header: Header) -> Hello:
    """Of our own version. Raises BadFrame."""
    kinds = {"token": str, "worker": int, "role": str, "number": int}
    if wrong := [name for name, kind in kinds.items() if not isinstance(header.get(name), kind)]:
        raise BadFrame(f"a hello without a sound {wrong[0]!r}")
    return GREETING.read(header)


def other_version(header: Header) -> str:
    """Why one of another version cannot be talked to; empty if it can. Asked before anything else
    is read: another version's hello may have other fields."""
    said = header.get("version")
    if said == VERSION:
        return ""
    return (
        f"it speaks version {said!r:.40} of the protocol and this process version {VERSION}: "
        "install the same elastic-ray-trainer on every node"
    )
