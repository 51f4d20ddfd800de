"""A Tuner's trial ends whenever its callbacks have reported: with Ray's own session and its queues,
and without a cluster."""

import queue
import threading
import time
from types import SimpleNamespace

import pytest
from ray.train._internal.session import _TrainSession
from ray.tune.result import RESULT_DUPLICATE
from ray.util.queue import Empty

from elastic.on_ray import trials
from elastic.on_ray.trials import TakenInTurn, itself, report_in_turn

PATIENCE_S = 20.0


class OnePlace(queue.Queue):
    """As Ray's queue, without its actor."""

    def __init__(self) -> None:
        super().__init__(1)

    def get(self, block=True, timeout=None):
        try:
            return super().get(block, timeout)
        except queue.Empty:
            raise Empty from None


class Session(_TrainSession):
    def _get_or_create_inter_actor_queue(self):
        self._inter_actor_queue = OnePlace()
        return self._inter_actor_queue


@pytest.fixture
def session_of(tmp_path, monkeypatch):
    """A trial's session, whose function is called with it."""
    monkeypatch.chdir(tmp_path)  # Ray changes to the trial's folder

    def made(function) -> Session:
        storage = SimpleNamespace(
            trial_working_directory=str(tmp_path), persist_artifacts=lambda force: None
        )
        session = Session(
            training_func=lambda: whole(session, function),
            trial_info=None,
            storage=storage,
            synchronous_result_reporting=True,
            world_rank=None,
            local_rank=None,
            node_rank=None,
            local_world_size=None,
            world_size=None,
        )
        report_in_turn(session)
        return session

    def whole(session, function) -> None:
        function(session)
        session.report({RESULT_DUPLICATE: True})

    return made


def results_of(session) -> list[dict]:
    """What Tune gets of the trial, to its end."""
    found = []

    def take() -> None:
        session.start()
        session.training_thread.join(0.3)  # a function that may end has ended before Tune looks
        while RESULT_DUPLICATE not in (metrics := session.get_next().metrics):
            found.append(metrics)

    reader = threading.Thread(target=take, daemon=True)
    reader.start()
    reader.join(PATIENCE_S)
    assert not reader.is_alive(), f"Tune waits for ever, with {found}"
    return found


def called_back(session, *scores: int) -> None:
    """As callbacks of a `fit()` in this process report."""
    reported = session._get_or_create_inter_actor_queue()
    for score in scores:
        reported.put({"score": score})


def test_a_trial_may_end_as_soon_as_its_callbacks_have_reported(session_of):
    session = session_of(lambda session: called_back(session, 1, 2, 3))
    assert [metrics["score"] for metrics in results_of(session)] == [1, 2, 3]


def test_a_trial_may_report_itself_once_its_callbacks_have(session_of):
    def function(session) -> None:
        called_back(session, 1, 2)
        session.report({"score": 3})
        session.report({"score": 4})

    assert [metrics["score"] for metrics in results_of(session_of(function))] == [1, 2, 3, 4]


def test_a_trial_without_callbacks_is_as_rays_own(session_of):
    session = session_of(lambda session: session.report({"score": 1}))
    assert [metrics["score"] for metrics in results_of(session)] == [1]
    assert session._inter_actor_queue is None


def test_a_trial_that_tune_ends_waits_for_nobody(session_of):
    session = session_of(lambda session: called_back(session, 1))
    session.start()
    session.training_thread.join(0.3)
    assert session.training_thread.is_alive()
    session.finish(timeout=PATIENCE_S)
    assert not session.training_thread.is_alive()


def test_a_report_that_tune_does_not_take_fails_the_trial(monkeypatch):
    monkeypatch.setattr(trials, "TAKEN_S", 0.0)
    reported = TakenInTurn(OnePlace())
    reported.put({"score": 1})
    with pytest.raises(TimeoutError, match="has not taken in 0 s"):
        reported.await_handled(lambda: False)


def test_nothing_more_is_an_answer_only_to_a_question_that_came_after(session_of):
    reported = TakenInTurn(OnePlace())
    with pytest.raises(Empty):
        reported.get(timeout=0)
    waiting = threading.Thread(target=reported.await_handled, args=[lambda: False], daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    deadline = time.monotonic() + PATIENCE_S
    while waiting.is_alive() and time.monotonic() < deadline:
        with pytest.raises(Empty):
            reported.get(timeout=0.01)
    assert not waiting.is_alive()


def test_another_process_is_given_rays_own_queue():
    function, arguments = TakenInTurn("the queue").__reduce__()
    assert function is itself
    assert function(*arguments) == "the queue"
