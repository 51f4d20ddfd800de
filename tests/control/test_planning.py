"""Who is where in the mesh of a generation, and when too few workers make none."""

import json
from dataclasses import replace

from elastic.control.commands import Form, Sync
from elastic.control.events import (
    Adopted,
    DrainNotice,
    Joined,
    Loaded,
    Suspended,
    Synced,
    Tick,
    WorkerLost,
    WorkerStarted,
)
from elastic.control.planning import Nodes, Plan, plan, shortage
from elastic.control.replay import JOURNAL_TYPES
from elastic.control.standing import Standing
from elastic.control.state import Ledger, Limits, Running, Waiting
from elastic.control.transition import start, transition
from elastic.control.translation import copying
from elastic.protocol.encoding import decode, encode
from elastic.protocol.membership import Membership
from elastic.protocol.mesh import DDP, Mesh, Parallel
from elastic.protocol.messages import to_worker as t
from elastic.protocol.messages.to_controller import Stage
from tests.control.transitions import ABC, LEDGER, LIMITS, play, some

TWO = Parallel("hsdp", dp_shard=2)
SHARDED = replace(LIMITS, max_workers=4, is_whole=False, has_copies=True, parallel=TWO)


def on(names: str) -> Nodes:
    """Worker w on the node called names[w]."""
    return Nodes.of(enumerate(names))


def test_replicas_stay_inside_of_nodes_as_far_as_possible():
    mesh = Mesh(TWO, 7, plan(TWO, range(7), on("abcabac")).order)
    assert [mesh.replica_of(r) for r in (0, 1, 2)] == [[0, 3], [1, 4], [2, 6]]
    assert mesh.ranks_with_shard(1) == [3, 4, 6]
    assert [r for r in range(7) if mesh.is_inactive(r)] == [5]
    across = Mesh(TWO, 4, plan(TWO, range(4), on("abbb")).order)
    assert [across.replica_of(r) for r in (1, 0)] == [[1, 2], [0, 3]]
    assert plan(TWO, range(4), on("aabb")) == Plan()


def test_what_is_not_as_it_was_wanted_is_noted():
    four = Parallel.of("hsdp:4")
    assert plan(four, range(3), on("aaa")).note == "hsdp:4 over 3 workers becomes fsdp over 3"
    assert plan(four, range(5), Nodes()).note == "1 stands by, which hsdp:4 has no place for"
    assert plan(four, range(8), Nodes()).note == ""
    for words in ("ddp", "fsdp", "fsdp-grad-op"):
        assert plan(Parallel.of(words), range(5), on("abcab")) == Plan(), "nodes do not matter"


def test_ranks_that_share_a_layer_share_a_node():
    wide = Parallel("fsdp", tp=2)
    assert plan(wide, range(5), on("abaab")).order == (0, 2, 1, 4, 3)
    mesh = Mesh(wide, 5, (0, 2, 1, 4, 3))
    assert [mesh.along("tp", r) for r in (0, 1)] == [[0, 2], [1, 4]]
    assert mesh.is_inactive(3)


def test_too_few_workers_wait_and_the_reason_says_how_many_it_takes():
    assert shortage(DDP, 1) == ""
    assert shortage(DDP, 1, at_least=2) == "1 of at least 2 workers left"
    wide = Parallel.of("fsdp,tp:4")
    assert shortage(wide, 4) == ""
    assert shortage(wide, 3, 2) == "parallel='fsdp,tp:4' needs 4 workers, and 3 are there"
    limits: Limits = replace(LIMITS, min_workers=1, parallel=wide)
    ledger, phase, commands = Ledger(step=40, standbys=Ledger().standbys.add(0)), Waiting(""), []
    ledger, phase, commands = play(ledger, phase, Loaded(0, 40, 1.0), limits=limits)
    assert not any(isinstance(c, Form) for c in commands)


def test_a_loss_that_leaves_no_mesh_waits_with_the_reason():
    wide = Parallel("ddp", tp=2)
    limits: Limits = replace(LIMITS, min_workers=1, max_workers=2, parallel=wide)
    run = start(limits, 0.0)
    ledger, phase, _ = play(
        run.ledger,
        run.phase,
        *(
            WorkerStarted(0, 1.0, "a"),
            WorkerStarted(1, 1.0, "a"),
            Loaded(0, 0, 2.0),
            Synced(1, 3.0),
        ),
        *(Joined(1, 0, 0.0, 4.0), Joined(1, 1, 0.0, 4.0)),
        WorkerLost(1, "process_died", 5.0, 5.0),
        limits=limits,
    )
    said = Suspended(1, 0, 0, False, False, 5.1)
    decision = transition(ledger, phase, said, limits)
    why = "parallel='tp:2' needs 2 workers, and 1 is there, step 0"
    assert isinstance(decision.phase, Waiting)
    assert decision.phase.reason == why
    assert not any(isinstance(c, Form) for c in decision.commands)


def test_the_members_places_travel_with_the_command_that_forms_them():
    run = start(SHARDED, 0.0)
    ledger, phase, commands = play(
        run.ledger,
        run.phase,
        *(WorkerStarted(w, 1.0, node) for w, node in enumerate("abba")),
        *(Loaded(0, 0, 2.0), Synced(1, 3.0)),
        limits=SHARDED,
    )
    forms = [c for c in commands if isinstance(c, Form)]
    assert forms == [Form(Membership(1, (0, 1)), 0)], "a replica of both, though of two nodes"
    ledger, phase, commands = play(
        ledger,
        phase,
        *(Joined(1, 0, 0.0, 4.0), Synced(2, 4.0), Synced(3, 4.0), Joined(1, 1, 0.0, 4.0)),
        limits=SHARDED,
    )
    assert ledger.nodes == on("abba")
    assert decode(json.loads(json.dumps(encode(ledger))), JOURNAL_TYPES) == ledger


def test_a_newcomer_to_stages_is_told_who_trains_and_what_is_likely_to_come_next():
    """Of two that come and one that goes; a standby of those who are stopped is told nothing."""
    limits = replace(LIMITS, max_workers=4, is_whole=False, parallel=Parallel.of("pp:2"))
    ledger = replace(LEDGER, spawned=some(3, 4), next_worker=5, nodes=on("aba"))
    events = (DrainNotice(0, "drain", 40.0, 10.0), WorkerStarted(3, 13.0, "a"))
    ledger, phase, commands = play(ledger, Running(ABC), *events, limits=limits)
    (first,) = [c for c in commands if isinstance(c, Sync)]
    assert first == Sync(3, first.source, (0, 1, 2), next_order=(2, 0, 1), next_members=(1, 2, 3))
    ledger, phase, commands = play(ledger, phase, WorkerStarted(4, 13.5, "b"), limits=limits)
    (second,) = [c for c in commands if isinstance(c, Sync)]
    assert second == Sync(
        4, second.source, (0, 1, 2), next_order=(0, 2, 3, 1), next_members=(1, 2, 3, 4)
    )
    waiting = replace(ledger, with_state=some(0, 1, 2), syncing=some(), standbys=some(3))
    commands = play(waiting, Waiting("few"), Tick(14.0), limits=replace(limits, min_workers=4))[2]
    assert [c.members for c in commands if isinstance(c, Sync)] == [()]


def test_a_newcomer_learns_what_the_members_have_and_which_of_them_stay():
    stages, there = (Stage(0, 0, (0, 3)), Stage(0, 1, (3, 6))), {4: ("h", 4), 7: ("h", 7)}
    nodes = {4: "a", 7: "b", 8: "c"}
    command = Sync(8, 7, (4, 7), next_order=(1, 0), next_members=(7, 8))
    told = copying(command, there, nodes, stages)
    assert told == t.Sync(
        *(7, ("h", 7), (("h", 4), ("h", 7)), stages),
        rank=1,
        next_ranks=(1, -1),
        next_nodes=("b", "c"),
        next_order=(1, 0),
    )
    assert copying(Sync(8, 7), there, nodes, stages) == t.Sync(7, ("h", 7)), "nobody trains"


def test_a_new_controller_learns_the_nodes_from_those_who_introduce_themselves():
    standings = tuple(Standing(w, "stopped", 3, w, 4, 40, node) for w, node in enumerate("abab"))
    ledger, phase, _ = play(
        Ledger(generation=3, step=40, next_worker=4),
        Waiting(""),
        Adopted(standings, 9.0),
        limits=SHARDED,
    )
    answers = [Suspended(ledger.generation, r, 40, False, False, 9.1) for r in range(4)]
    *_, commands = play(ledger, phase, *answers, limits=SHARDED)
    assert [c.order for c in commands if isinstance(c, Form)] == [(0, 2, 1, 3)]


def test_nodes_of_many_workers_are_found_again():
    nodes = Nodes()
    for worker in (0, 1, 255, 256, 1000):
        nodes = nodes.add(worker, f"node{worker}")
    assert [nodes.node(w) for w in (0, 255, 256, 257, 1000, 5000)] == [
        "node0", "node255", "node256", "", "node1000", "",
    ]  # fmt: skip
    assert nodes.only((1, 1000)) == Nodes.of([(1, "node1"), (1000, "node1000")])
    assert nodes.only(()) == Nodes()


def test_stages_are_neighbours_inside_of_nodes_and_fewer_ranks_than_stages_go_on():
    staged = Parallel.of("pp:2")
    assert shortage(staged, 1) == "", "one pipeline of one stage"
    assert plan(staged, range(4), on("abab")) == Plan((0, 2, 1, 3))
    five = plan(staged, range(5), on("abaab"))
    assert five == Plan((0, 2, 1, 4, 3)), "workers know who is inactive"
