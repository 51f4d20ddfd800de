"""Paths between two hosts that are cut while the controller hears both."""

from dataclasses import replace

from elastic.control.detection.hang import Watch
from elastic.control.detection.partition import disputed, parted
from elastic.protocol.messages.pulse import Heartbeat

BEAT = Heartbeat(0, 4, 9, "reduce", 4.0, 1.0, True, "S")
HOSTS = {0: "a", 1: "a", 2: "b", 3: "c", 4: "b"}


def member(worker: int, *unanswered: tuple[str, float], **changes) -> Heartbeat:
    return replace(BEAT, worker=worker, unanswered=unanswered, **changes)


def ends(*beats: Heartbeat, heard: dict[int, float] | None = None) -> dict[int, set[str]]:
    """At 20 s, with detect_s = 3."""
    watches = [Watch(b, (heard or {}).get(b.worker, 19.8)) for b in beats]
    return disputed(watches, HOSTS, 20.0, 3.0)


def test_a_path_is_in_dispute_where_a_waiting_member_has_not_been_answered_by_a_peers_host():
    assert ends(member(0, ("c", 3.4)), member(2), member(3)) == {4: {"a", "c"}}
    assert ends(member(0, ("c", 3.4), ("b", 9.0)), member(2), member(3)) == {4: {"a", "b", "c"}}


def test_who_is_silent_for_the_controller_too_is_judged_elsewhere():
    beats = member(0, ("c", 3.4)), member(1), member(3)
    assert not ends(*beats, heard={3: 18.0})
    assert not ends(*beats, heard={0: 18.0, 1: 18.0})


def test_nothing_is_in_dispute_for_a_short_silence_or_an_address_of_no_peer():
    assert not ends(member(0, ("c", 2.9)), member(3))
    assert not ends(member(0, ("c", 3.4), phase_s=2.9), member(3))
    assert not ends(member(0, ("c", 3.4), waits_for_peers=False), member(3))
    assert not ends(member(0, ("a", 9.0)), member(1))
    assert not ends(member(0, ("storage", 9.0)), member(3))
    assert not ends(member(0, ("c", 3.4)), member(3, generation=5))


# --- after a dial ----------------------------------------------------------------------
def gone(workers: str, newcomers: tuple[int, ...] = (), **unreached: str) -> list[int]:
    """unreached: "w0" -> the hosts, a letter each, that worker 0 cannot reach."""
    hosts = {w: HOSTS[w] for w in map(int, workers)}
    found = {int(name[1:]): set(its) for name, its in unreached.items()}
    return [worker for worker, _ in parted(hosts, found, set(newcomers))]


def test_of_two_hosts_the_one_with_fewer_members_goes():
    assert gone("0123", w0="c", w1="c", w2="", w3="a") == [3]
    hosts = {0: "a", 1: "a", 3: "c"}
    assert dict(parted(hosts, {0: {"c"}}, set())) == {
        3: "c cannot be reached from a, and both are heard: a network path is cut"
    }


def test_of_two_equal_ones_the_younger_goes_with_all_its_members():
    assert gone("23", w2="c") == [3]
    assert gone("0124", w0="b") == [2, 4]


def test_who_has_the_state_stays_and_newcomers_go():
    assert gone("034", newcomers=(0,), w0="c") == [0]
    assert gone("234", newcomers=(2, 4), w3="b") == [2, 4]
    assert gone("234", newcomers=(4,), w3="b") == [3]


def test_a_host_that_many_cannot_reach_is_the_one_that_goes():
    assert gone("023", w0="", w2="a", w3="a") == [0]
    assert gone("023", w0="bc", w2="a", w3="a") == [0]


def test_nobody_goes_if_all_can_be_reached_or_only_what_is_no_peers():
    assert gone("023", w0="", w2="", w3="") == []
    assert gone("03", w0="ab") == []
