"""Scripts of Accelerate and of Fabric, with the libraries themselves: a rank is killed, and they go
on in place, each sample used once in each pass; without rank 0 they are called again."""

import time
from pathlib import Path

import pytest

from tests.scripts.local_run import LocalRun
from tests.scripts.test_in_place import metrics
from workers.script_loop import ScriptLoop
from workers.scripts.torchrun import Torchrun, started_by_torchrun

pytestmark = pytest.mark.slow
EPOCHS, SAMPLES, BATCH, ACCUMULATED, WORKERS = 6, 96, 4, 2, 3
STEPS = SAMPLES // BATCH // WORKERS // ACCUMULATED * EPOCHS


@pytest.fixture(params=["accelerate_job.py", "fabric_job.py"])
def begun(tmp_path, request):
    """Past its first epoch, and its place."""
    place = tmp_path / "run"
    loop = ScriptLoop(
        function=Torchrun(str(Path(__file__).with_name(request.param)), ("0.05",), str(place)),
        place=str(place),
        name="run",
        installed=started_by_torchrun,
        goes_in_place=True,
    )
    run = LocalRun(loop, place, WORKERS, least=1)
    run.can_replace = False
    run.start()
    deadline = time.monotonic() + 120
    while not (place / "epochs").exists():
        assert time.monotonic() < deadline, (run.decisions, run.failure)
        time.sleep(0.01)  # polling, bounded by the deadline
    return run, place


def calls(place: Path) -> list[str]:
    return sorted(file.read_text() for file in place.glob("called-*"))


def epochs(place: Path) -> list[int]:
    return [int(line) for line in (place / "epochs").read_text().split()]


def test_it_goes_on_in_place(begun):
    run, place = begun
    run.kill(run.members[2])
    assert run.wait() == "succeeded", run.failure
    assert run.level is not None
    assert (run.level.level, run.level.reason) == (1, "")
    assert (calls(place), epochs(place)) == (["x"] * WORKERS, [*range(EPOCHS)])
    lines = metrics(place)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["samples"] == EPOCHS * SAMPLES
    assert {line["world_size"] for line in lines} == {WORKERS, WORKERS - 1}


def test_without_rank_0_it_is_called_again_and_goes_on_from_its_own_state(begun):
    """It keeps its rank, and so nobody would save."""
    run, place = begun
    run.kill(run.members[0])
    assert run.wait() == "succeeded", run.failure
    assert (calls(place), epochs(place)) == (["x", "xx", "xx"], [*range(EPOCHS)])
