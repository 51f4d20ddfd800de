"""One direction of a conversation: which messages may come, and how a frame becomes one."""

from dataclasses import fields
from typing import Any, Generic, TypeVar, cast

from elastic.protocol import wire
from elastic.protocol.encoding import UndecodableValue, decode, encode, registry

Message = TypeVar("Message")
PAYLOAD = "payload"
"""The field of a message, bytes, that travels beside its header as it is."""


class Direction(Generic[Message]):
    """The messages of one union."""

    def __init__(self, *kinds: type, parts: tuple[type, ...] = ()) -> None:
        """parts: classes that are in the fields of messages, and none themselves."""
        self.kinds, self._types = kinds, registry(*kinds, *parts)

    def read(self, header: wire.Header, payload: bytes | bytearray = b"") -> Message:
        """Raises BadFrame for what is none of its messages."""
        said = {**header, PAYLOAD: bytes(payload)} if payload else header
        try:
            message = decode(said, self._types)
        except UndecodableValue as error:
            raise wire.BadFrame(str(error)) from error
        if type(message) not in self.kinds:
            raise wire.BadFrame(f"{type(message).__name__} is no message of its own")
        return cast(Message, message)


def header_of(message: object) -> wire.Header:
    """All of it but its payload."""
    header: wire.Header = {"type": type(message).__name__}
    for field in fields(cast(Any, message)):
        if field.name != PAYLOAD:
            header[field.name] = encode(getattr(message, field.name))
    return header


def pack(message: object) -> bytes:
    """One frame."""
    return wire.pack(header_of(message), getattr(message, PAYLOAD, b""))
