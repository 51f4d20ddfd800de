"""Both ends count: what was not heard is said again."""

from elastic.protocol.outbox import Outbox


def said(outbox: Outbox, count: int) -> list[bytes]:
    found = []
    for _ in range(count):
        found.append(outbox.unsent[0])
        outbox.sent()
    return found


def test_what_was_not_heard_is_said_again_over_another_connection():
    outbox = Outbox()
    outbox.unsent.extend([b"a", b"b", b"c", b"d"])
    assert said(outbox, 3) == [b"a", b"b", b"c"]
    outbox.heard(1)
    outbox.take_up(2)
    assert said(outbox, 2) == [b"c", b"d"]
    outbox.take_up(4)
    assert not outbox.unsent


def test_another_link_begins_with_what_was_not_sent():
    outbox = Outbox()
    outbox.unsent.extend([b"a", b"b"])
    said(outbox, 1)
    outbox.heard(1)
    outbox.begin(b"who I am")
    assert said(outbox, 2) == [b"who I am", b"b"]
    outbox.heard(1)
    outbox.take_up(1)
    assert said(outbox, 1) == [b"b"]
