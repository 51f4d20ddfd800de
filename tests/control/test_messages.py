"""Every message arrives as it was said, and nothing else arrives as one."""

import dataclasses
import types
import typing
from typing import Any

import pytest

from elastic.protocol import wire
from elastic.protocol.layout import TensorLayout
from elastic.protocol.messages import backup, hello, peer, pulse, store, to_controller, to_worker
from elastic.protocol.messages.direction import Direction, header_of, pack

DIRECTIONS: tuple[Direction[Any], ...] = (
    hello.GREETING,
    backup.TO_BACKUP,
    backup.FROM_BACKUP,
    peer.TO_FOLLOWER,
    peer.FROM_FOLLOWER,
    store.TO_STORE,
    store.FROM_STORE,
    pulse.TO_PULSE,
    pulse.FROM_PULSE,
    to_worker.TO_WORKER,
    to_controller.TO_CONTROLLER,
)
PLAIN = {
    int: 3, float: 2.5, str: "w\u00e4rme \ud800", bool: True, bytes: b"\x00\xff", type(None): None,
}  # fmt: skip
CHECKED = {
    TensorLayout: [
        TensorLayout("scalar", "int8", ()),
        TensorLayout("w", "float32", (4, 6), (("dp_shard", 0), ("tp", 1))),
    ],
}
"""Classes that any values of their fields' types will not do for."""


def values_of(kind: Any) -> list[Any]:
    """Some of each shape that a field of this type may have."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in PLAIN:
        return [PLAIN[kind]]
    if origin is dict or kind is dict:
        return [{}, {"type": "of the user", "list": [1, [2, None]], "deep": {"a": {"b": 0.5}}}]
    if origin is tuple and arguments[-1] is ...:
        return [(), (values_of(arguments[0])[-1],) * 2]
    if origin is tuple:
        return [tuple(values_of(a)[-1] for a in arguments)]
    if origin in (typing.Union, types.UnionType):
        return [value for a in arguments for value in values_of(a)]
    return CHECKED[kind] if kind in CHECKED else examples(kind)


def examples(kind: Any) -> list[Any]:
    hints = typing.get_type_hints(kind)
    choices = {f.name: values_of(hints[f.name]) for f in dataclasses.fields(kind)}
    most = max(map(len, choices.values()), default=1)
    return [kind(**{n: some[i % len(some)] for n, some in choices.items()}) for i in range(most)]


@pytest.mark.parametrize(
    ("direction", "kind"),
    [(d, kind) for d in DIRECTIONS for kind in d.kinds],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_message_arrives_as_it_was_said(direction: Direction[Any], kind: type):
    for said in examples(kind):
        frame = pack(said)
        header_bytes, payload_bytes = wire.LENGTHS.unpack(frame[: wire.LENGTHS.size])
        header = frame[wire.LENGTHS.size :][:header_bytes]
        payload = frame[wire.LENGTHS.size + header_bytes :]
        assert len(payload) == payload_bytes
        assert direction.read(wire.parse(header), payload) == said


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        ({}, b""),
        ({"type": "Nonsense"}, b""),
        ({"type": ["Synced"]}, b""),
        ({"type": "Synced"}, b""),
        ({"type": "Synced", "step": 3, "more": 1}, b""),
        ({"type": "Synced", "step": 3}, b"a payload that it does not have"),
        ({"type": "Form", "step": 3}, b""),
        ({"type": "dict", "of": {}}, b""),
        (header_of(to_controller.Process("n", "h", 1, "cpu", ("h", 1))), b""),
    ],
)
def test_what_is_no_message_of_this_direction_is_a_bad_frame(header: Any, payload: bytes):
    with pytest.raises(wire.BadFrame):
        to_controller.TO_CONTROLLER.read(header, payload)
