"""What is said about reads that take long, never begin, or end their process."""

from elastic.data.patience import MAX_TRIES, Late, Patience
from elastic.data.stream import WindowKey

A, B = WindowKey(0, 0), WindowKey(0, 1)


def test_a_read_that_never_begins_is_told_once():
    patience = Patience()
    patience.asked(A, 100.0)
    patience.asked(B, 100.0)
    assert patience.late(105.0) == []
    assert patience.late(111.0) == [Late(A, False, 11.0, 0.0)]
    assert patience.late(200.0) == []


def test_a_slow_read_is_told_once_and_slow_means_by_the_others():
    patience = Patience()
    for end in (2.0, 4.0):
        patience.asked(A, 0.0)
        assert patience.began(A, 0.0) == 0
        patience.ended(A, end)
    patience.asked(B, 50.0)
    assert patience.began(B, 60.0) == 0
    assert patience.late(85.0) == []
    assert patience.late(91.0) == [Late(B, True, 31.0, 3.0)]
    assert patience.late(99.0) == []


def test_a_window_that_ends_every_process_is_given_up():
    patience = Patience()
    patience.asked(A, 0.0)
    assert [patience.began(A, 1.0) for _ in range(MAX_TRIES + 1)] == [*range(MAX_TRIES), None]
    patience.ended(A, 2.0)
    assert patience.began(A, 3.0) == 0, "Ray reads it again because a node was lost"
