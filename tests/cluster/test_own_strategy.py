"""Strategies that the project does not know, by name: jobs/grid.py crosses two axes of ranks,
jobs/tiles.py cuts each tensor along both."""

import signal

import pytest

from tests.cluster.live import assert_same_bits

pytestmark = pytest.mark.cluster

STRATEGIES, STEPS = ("grid:build_grid", "fsdp-grad-op,tp:2,tiles:build_tiled"), 40


def is_saved_of_four(status) -> bool:
    return status["step"] > 7 and status["world_size"] == 4 and status["committed_checkpoint"]


@pytest.mark.parametrize(
    "parallel", [STRATEGIES[0], pytest.param(STRATEGIES[1], marks=pytest.mark.slow)]
)
def test_it_loses_a_worker_resumes_at_another_size_and_has_the_bits_of_ddp(
    start, reference, parallel
):
    options = {"parallel": parallel, "steps": STEPS, "checkpoint_every": 5}
    with start("Toy", workers="2..4", set=["sleep=0.1"], **options) as run:
        generation = run.wait_for_step(is_saved_of_four)["generation"]
        run.kill(rank=3)
        run.wait_for_step(lambda s: s["generation"] > generation and s["phase"] == "running")
        run.process.send_signal(signal.SIGINT)
        stopped = run.finish(asleep=True)
    assert stopped["result"]["outcome"] == "stopped"
    assert stopped["result"]["lost_steps"] == 0
    with start("Toy", workers=2, set=["sleep=0.1"], **options) as run:
        end = run.finish()
    assert_same_bits(run, end, reference(STEPS), STEPS)


def test_a_name_of_no_strategy_is_told_before_anything_starts(start):
    with start("Toy", parallel="grid:no_such") as run:
        end = run.finish()
    assert end["status"] == 2
    assert end["err"].count("\n") == 1
    assert "parallel='grid:no_such' names no strategy: " in end["err"]
    assert not run.directory.exists()
