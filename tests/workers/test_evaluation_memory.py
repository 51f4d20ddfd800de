"""Results of evaluations after a loss or a roll back: whose they are, how often they are told."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from elastic.on_ray.record.evaluations import Evaluations
from elastic.protocol.mesh import DDP, Mesh
from elastic.protocol.messages.to_controller import Evaluation
from tests.workers.session_rig import Rig, abort, obey
from workers.evaluation import _evaluate_ids
from workers.step.forwards import PlainForwards
from workers.worker import Worker

pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture
def rig():
    torch.set_num_threads(1)
    made = Rig("bitwise")
    made.form(generation=1, step=0)
    assert made.step().committed
    yield made
    made.loader.close()


def evaluate(rig, value: float) -> float:
    return rig.session.evaluate([0.0] * 3, lambda model, batch: value)


def form(rig, step: int, evaluation: Evaluation | None) -> None:
    """The next generation forms here."""
    generation = rig.member.generation + 1
    obey(rig.member, abort(generation - 1))
    rig.form(generation, step, evaluation=evaluation)
    rig.member.wait_for_generation()


def test_a_result_that_peers_have_completed_is_taken(rig):
    form(rig, 1, Evaluation(1, 0, {"value": 5.0}, 1))
    assert evaluate(rig, 7.0) == 5.0
    assert evaluate(rig, 7.0) == 7.0, "the second one at this step"


def test_a_result_of_a_later_step_that_was_undone_is_not_taken(rig):
    """Peers had evaluated step 2 when the run went back to step 1."""
    form(rig, 1, Evaluation(2, 0, {"value": 5.0}, 1))
    assert evaluate(rig, 7.0) == 7.0
    assert rig.step().committed
    assert evaluate(rig, 8.0) == 8.0, "step 2 of this attempt"


def test_a_result_of_one_s_own_is_forgotten_with_its_step(rig):
    """Else this rank would take the evaluation for the second one of step 2, a newcomer for the
    first: they would wait in different collectives."""
    start = rig.train_state.snapshot()
    state = start.header, {n: start.take(n).clone() for n in start.shapes}
    assert rig.step().committed
    assert evaluate(rig, 5.0) == 5.0
    rig.train_state.restore(*state)
    form(rig, 1, None)
    assert rig.step().committed
    assert rig.member.evaluated.next_ordinal(2) == 0
    obey(rig.member, abort(2))
    assert rig.link.of("suspended")[-1][0]["evaluation"] is None


def test_the_lowest_rank_says_the_last_result_again_with_every_generation(rig):
    assert evaluate(rig, 5.0) == 5.0
    said = {"evaluation": Evaluation(1, 0, {"value": 5.0}, 1)}
    assert rig.link.of("evaluated") == [(said, b"")]
    form(rig, 1, None)
    assert rig.link.of("evaluated") == [(said, b"")] * 2
    assert rig.step().committed
    assert evaluate(rig, 6.0) == 6.0
    assert rig.link.of("evaluated")[2][0]["evaluation"].step == 2


class Silent:
    """A saver, a notice that have nothing to repeat, and a pulse."""

    def repeat(self) -> None:
        pass

    def follow(self, controller):
        return controller


def test_the_lowest_rank_says_the_last_result_again_to_a_new_controller(rig):
    assert evaluate(rig, 5.0) == 5.0
    worker = object.__new__(Worker)  # without the process around it
    worker._built = replace(rig.built, saver=Silent())
    worker._notice, worker._pulse = Silent(), Silent()
    worker._around = SimpleNamespace(node_id="n")
    for rank in (0, 1):
        rig.sit(rank)
        worker._introduce(("127.0.0.1", 1))
    first, again = rig.link.of("evaluated")
    assert first == again


def result(step: int, ordinal: int) -> Evaluation:
    return Evaluation(step, ordinal, {"value": 0.5}, 1)


def test_the_controller_takes_each_result_once():
    taken: list[dict] = []
    evaluations = Evaluations(taken.append)
    for said in (result(5, 0), result(5, 0), result(5, 1), result(5, 0), result(10, 0)):
        evaluations.hear(said)
    assert taken == [asdict(result(5, 0)), asdict(result(5, 1)), asdict(result(10, 0))]


def test_the_controller_takes_the_results_of_steps_done_again():
    taken: list[dict] = []
    evaluations = Evaluations(taken.append)
    evaluations.hear(result(5, 0))
    evaluations.hear(result(10, 0))
    evaluations.hear_last(0, result(10, 0))
    evaluations.hear_last(1, result(5, 0))
    evaluations.go_back(7)
    assert evaluations.newest([0, 1]) == result(5, 0)
    evaluations.hear(result(5, 0))
    evaluations.hear(result(10, 0))
    assert taken == [asdict(said) for said in (result(5, 0), result(10, 0), result(10, 0))]


def test_what_an_evaluation_draws_is_its_batch_s_whoever_computes_it(rig):
    where = (rig.member, rig.workload, [0.0] * 6)
    both = PlainForwards(Mesh(DDP, 1), 0, is_collective=False)
    drawn = []
    for rank in (0, 1):
        rig.sit(rank)
        rows = _evaluate_ids(*where, lambda model, batch: float(torch.rand(())), both, 2)
        drawn.append(rows)
    assert drawn[0] == drawn[1]
    assert drawn[0][0][1] != drawn[0][1][1]


def test_what_an_evaluation_raises_once_its_generation_was_given_up_makes_it_again(rig):
    def fn(model, batch):
        if rig.session.generation == 1:
            rig.link.commands.put(abort(1))
            rig.form(generation=2, step=rig.session.step)
            rig.member.hear(abort(1))
            raise ValueError("of garbage")
        return 5.0

    assert rig.session.evaluate([0.0] * 3, fn) == 5.0


def test_who_joins_at_a_pause_is_told_what_the_others_evaluated_without_it():
    """Nobody was suspended, so that only the lowest rank's word tells of it (found by simulation:
    a member that was left out in the middle of that evaluation waited in it for ever)."""
    evaluations = Evaluations(lambda _: None)
    result = Evaluation(2, 0, {"value": 1.0}, 4)
    evaluations.hear(result)
    assert evaluations.newest([7, 8]) == result
    evaluations.go_back(1)
    assert evaluations.newest([7, 8]) is None
