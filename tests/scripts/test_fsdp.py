"""A script that shards its model by itself (FSDP2) loses a rank in the middle of a backward: it is
called again on those that are left, from its newest report, and its weights are the undisturbed
run's."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.scripts import fsdp_job
from tests.scripts.local_run import LocalRun
from tests.scripts.test_restart import reports
from workers.script_loop import ScriptLoop


def run(place: Path, **settings: str) -> LocalRun:
    from elastic.on_ray.train_api import answering

    loop = ScriptLoop(
        function=partial(fsdp_job.learn, settings),
        place=str(place),
        name=place.name,
        ray_version="2.60.0",
        installed=answering,
        goes_in_place=True,
    )
    started = LocalRun(loop, place, 3, least=2)
    started.can_replace = False
    started.start()
    assert started.wait() == "succeeded", started.failure
    return started


def state(place: Path) -> dict[str, torch.Tensor]:
    return torch.load(place / reports(place)[-1]["checkpoint"] / "state.pt")["model"]


@pytest.mark.slow
def test_its_weights_are_those_of_the_undisturbed_run(tmp_path):
    calm, hit = tmp_path / "calm", tmp_path / "hit"
    run(calm)
    struck = run(hit, kills=str(tmp_path / "killed"))
    assert (tmp_path / "killed").exists()
    assert struck.level is not None
    assert struck.level.level == 0
    assert "device mesh" in struck.level.reason
    found = [line["metrics"] for line in reports(hit)]
    assert [line["epoch"] for line in found] == [*range(fsdp_job.EPOCHS)]
    at = fsdp_job.KILLED_AT[0]
    assert [line["ranks"] for line in found] == [3] * at + [2] * (fsdp_job.EPOCHS - at)
    theirs = state(calm)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in state(hit).items())
