"""The decision core with thousands of workers decides what it decides with three."""

from elastic.control.commands import Retire
from elastic.control.state import Forming, Running
from tests.control.many_workers import ManyWorkers

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
