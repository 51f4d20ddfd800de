"""Real workers lose a peer in the middle of a script, which goes on: it is called once, each sample
is used once in each pass, in as many steps as without a loss, and the weights are equal."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripts import counting
from tests.scripts.local_run import LocalRun
from workers.script_loop import ScriptLoop

WORKERS = 3
STEPS = counting.SAMPLES // counting.BATCH // WORKERS * counting.EPOCHS


def started(place: Path, function: Any = counting.count_uses, *, in_place=True, **settings):
    from elastic.on_ray.train_api import answering

    loop = ScriptLoop(
        function=partial(function, settings),
        place=str(place),
        name=place.name,
        ray_version="2.60.0",
        installed=answering,
        goes_in_place=in_place,
        saves=False,
    )
    run = LocalRun(loop, place, WORKERS, least=1)
    run.can_replace = False
    return run.start()


def ends(place: Path) -> list[dict[str, Any]]:
    return [torch.load(path) for path in sorted(place.glob("end-*.pt"))]


def steps(place: Path) -> list[list[dict]]:
    files = sorted(place.glob("steps-*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def check(place: Path, survivors: int, steps: int = STEPS) -> dict[str, Any]:
    """The state of the first survivor."""
    found = ends(place)
    assert len(found) == survivors
    for name, value in found[0].items():
        for other in found[1:]:
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])), name
    assert found[0]["steps"] == steps
    calls = [file.read_text() for file in place.glob("called-*")]
    assert calls == ["x"] * WORKERS
    assert found[0]["uses"].tolist() == [counting.EPOCHS] * counting.SAMPLES
    return found[0]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("undisturbed") / "run"
    run = started(place)
    assert run.wait() == "succeeded", run.failure
    return place


def test_without_a_loss_the_steps_are_those_of_stock_ddp(undisturbed, tmp_path):
    check(undisturbed, WORKERS)
    place = tmp_path / "stock"
    run = started(place, in_place=False)
    assert run.wait() == "succeeded", run.failure
    losses = [sorted(line["loss"] for line in lines) for lines in steps(place)]
    ours = [sorted(line["loss"] for line in lines) for lines in steps(undisturbed)]
    for stock, own in zip(sorted(losses), sorted(ours), strict=True):
        assert own == pytest.approx(stock, rel=1e-6)


@pytest.mark.parametrize(
    ("rank", "step", "where"), [(2, 4, "backward"), (0, 14, "backward"), (1, 7, "forward")]
)
def test_a_loss_is_survived_in_the_middle(tmp_path, rank, step, where):
    place = tmp_path / "run"
    run = started(place, ends=[[rank, step, where]])
    assert run.wait() == "succeeded", run.failure
    check(place, WORKERS - 1)
