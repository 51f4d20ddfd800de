"""The decision core with thousands of workers decides what it decides with three."""

from elastic.control.commands import Retire
from elastic.control.state import Forming, Running
from elastic.protocol.mesh import Mesh, Parallel
from tests.control.many_workers import NODES, ManyWorkers

SIZE = 3000


def test_thousands_form_lose_one_and_end():
    run = ManyWorkers(SIZE)
    run.gather()
    first = run.last_form().membership
    assert first.workers == tuple(range(SIZE - 10))
    run.join(4.0)
    assert isinstance(run.phase, Running | Forming) or run.decision.ledger.synced
    # the last ten come in at the next boundary
    assert len(run.decision.ledger.synced) + len(run.decision.ledger.syncing) == 10
    run.lose(0, 5.0)
    run.answer(0, 0, 5.1)
    second = run.last_form().membership
    assert (second.generation, second.world_size) == (2, SIZE - 1)
    assert second.workers == tuple(range(1, SIZE))
    run.join(6.0)
    finished = run.end(100, 7.0)
    assert (finished.outcome, finished.weights_sha256) == ("succeeded", "ab")
    retired = run.commands[-1]
    assert isinstance(retired, Retire)
    assert retired.workers == tuple(range(1, SIZE))


def test_thousands_have_their_replicas_inside_of_nodes():
    run = ManyWorkers(SIZE, Parallel("hsdp", dp_shard=4))
    run.gather()
    form = run.last_form()
    mesh = Mesh(run.parallel, form.membership.world_size, form.order)
    nodes = [form.membership.workers[rank] % NODES for rank in mesh.ranks()]
    replicas = [set(nodes[at : at + 4]) for at in range(0, mesh.num_active, 4)]
    assert sum(len(of_replica) == 1 for of_replica in replicas) == NODES - 10, "ten have only three"
    assert sorted(form.order) == list(range(SIZE - 10))
