"""A script that reports no checkpoint, and counts its epochs by `elastic.torch`: new workers enter
at their ends, and its objects go on."""

import gc
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR

import elastic.torch
from tests.scripts import epochs_job
from tests.scripts.local_run import LocalRun
from tests.scripts.test_units import Listening
from workers.distributed.process_group import Alone
from workers.script_loop import ScriptLoop
from workers.scripts.default_group import DefaultGroup, as_default
from workers.scripts.epochs import Epochs
from workers.scripts.in_place.course import Course
from workers.scripts.reports import UNTRAINED, Reports, Retention

WORKERS = 3


class LoneCall:
    """Of a lone rank, which loses nobody: what it publishes counts."""

    rank, generation = 0, 1
    course: Course | None = None
    trained = UNTRAINED

    def __init__(self, place: Path) -> None:
        self.reports = Reports(str(place), Retention(), "2.60.0")

    def commit(self, publish: Any) -> None:
        publish()

    def broadcast(self, value: Any) -> Any:
        return value


@pytest.fixture
def calls(tmp_path) -> Any:
    place = tmp_path / "run"
    place.mkdir()
    return lambda: Epochs(LoneCall(place)).at_hand()  # pyright: ignore


def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    return model, optimizer, ExponentialLR(optimizer, 0.5)


def test_the_next_call_goes_on_with_the_epoch_and_the_objects_of_the_last(calls):
    with calls():
        model, optimizer, schedule = made()
        elastic.torch.keep(net=model)
        for epoch in elastic.torch.epochs(5):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            schedule.step()
            if epoch == 2:
                break
            before = {name: value.clone() for name, value in model.state_dict().items()}
    with calls():
        again, optimizer, schedule = made()
        elastic.torch.keep(net=again)
        left = elastic.torch.epochs(5)
        assert next(left) == 2
        assert all(torch.equal(before[k], value) for k, value in again.state_dict().items())
        assert schedule.get_last_lr() == [0.25]
        assert optimizer.state_dict()["state"] != {}
        assert list(left) == [3, 4]


def test_a_script_that_makes_other_objects_is_told_which(calls):
    with calls():
        kept = made()
        assert list(elastic.torch.epochs(2)) == [0, 1]
        assert kept is not None
    with calls(), pytest.raises(RuntimeError, match="differ in: optimizer 1, schedule 1;"):
        next(elastic.torch.epochs(2))


def test_what_is_made_after_the_first_epoch_is_told_and_not_gone_on_with(calls, caplog):
    with calls():
        kept = [made()]
        for epoch in elastic.torch.epochs(3):
            kept += [made()] if epoch == 0 else []
    assert "not kept: optimizer 2, schedule 2" in caplog.text
    assert caplog.text.count("not kept") == 1
    with calls():
        kept = [made()]
        with pytest.raises(RuntimeError, match="differ in: optimizer 2, schedule 2;"):
            next(elastic.torch.epochs(3))


def test_what_only_a_cycle_holds_is_none_of_the_objects(calls):
    """Whether it is there still is another matter on each rank."""

    def leave_garbage() -> None:
        _, optimizer, _ = made()
        optimizer.own: Any = optimizer  # type: ignore[attr-defined]

    gc.disable()
    try:
        with calls():
            kept = made()
            leave_garbage()
            assert list(elastic.torch.epochs(2)) == [0, 1]
        with calls():
            kept = made()
            assert next(elastic.torch.epochs(2)) == 1
    finally:
        gc.enable()
    assert kept is not None


def test_ranks_that_make_different_objects_are_told_so_at_once(calls, monkeypatch):
    monkeypatch.setattr(LoneCall, "broadcast", lambda self, value: [*value, "scaler 1"])
    with calls():
        kept = made()
        with pytest.raises(RuntimeError, match=r"different objects.* scaler 1;"):
            next(elastic.torch.epochs(2))
    assert kept is not None


def test_what_cannot_be_kept_is_refused(calls):
    with calls(), pytest.raises(ValueError, match=r"keep\(count=...\): int has no state_dict"):
        elastic.torch.keep(count=3)
    for wrong in ({"policy": "ignore"}, {"sums": "ignore"}, {"samples": "ignore"}):
        with pytest.raises(ValueError, match='must be "restart" or "survivors"'):
            elastic.torch.on_missing(**wrong)


def test_what_goes_on_without_the_lost_is_said_for_sums_and_samples_or_for_both(calls, monkeypatch):
    course = Course("call", DefaultGroup(Alone("call")), Listening())
    monkeypatch.setattr(LoneCall, "course", course, raising=False)
    said = course.operations
    with calls():
        elastic.torch.on_missing(sums="survivors")
        assert (said.sums, said.samples) == ("survivors", "restart")
        elastic.torch.on_missing(samples="survivors")
        assert (said.sums, said.samples) == ("survivors", "survivors")
        elastic.torch.on_missing("restart")
        assert (said.sums, said.samples) == ("restart", "restart")
        elastic.torch.on_missing("restart", samples="survivors")
        assert (said.sums, said.samples) == ("restart", "survivors")


def test_without_a_run_it_is_range():
    elastic.torch.keep(anything=3)
    elastic.torch.on_missing("survivors")
    assert list(elastic.torch.epochs(3)) == [0, 1, 2]


def alone(most_ranks: int) -> Any:
    """A call of a lone rank, in whose run there may be so many."""
    place = SimpleNamespace(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0)
    return SimpleNamespace(
        course=None,
        place=place,
        most_ranks=most_ranks,
        generation=1,
        loop=SimpleNamespace(name="r"),
        reports=SimpleNamespace(folder=None, passes=None),
        device=torch.device("cpu"),
        check=lambda: None,
    )


def prepared(most_ranks: int) -> tuple[nn.Module, list[torch.Tensor]]:
    """A model, and its gradients."""
    import ray.train.torch

    from elastic.on_ray.train_api import answering

    torch.manual_seed(0)
    with as_default(DefaultGroup(Alone(f"of {most_ranks}"))), answering(alone(most_ranks)):
        model = ray.train.torch.prepare_model(nn.Linear(3, 2))
        assert ray.train.get_context().get_world_size() == 1
        model(torch.randn(5, 3)).square().sum().backward()
        ray.train.torch.prepare_model(nn.Linear(3, 2), parallel_strategy=None)
    return model, [p.grad for p in model.parameters() if p.grad is not None]


def test_a_lone_rank_that_may_get_company_has_the_model_that_several_have():
    """What is kept at the end of an epoch has the same names then; the bits are those of before."""
    lone, of_lone = prepared(1)
    one_of_several, gradients = prepared(3)
    assert (type(lone), type(one_of_several)) == (nn.Linear, DistributedDataParallel)
    assert all(torch.equal(a, b) for a, b in zip(of_lone, gradients, strict=True))


def run(place: Path, **settings: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines of its epochs, and the states at the end."""
    from elastic.on_ray.train_api import answering

    settings["place"] = str(place)
    loop = ScriptLoop(
        function=partial(epochs_job.learn_by_epochs, settings),
        place=str(place),
        name=place.name,
        ray_version="2.60.0",
        installed=answering,
        goes_in_place=True,
    )
    started = LocalRun(loop, place, WORKERS, least=1).start()
    assert started.wait(240) == "succeeded", started.failure
    lines = (place / "epochs.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], [torch.load(f) for f in place.glob("end-*.pt")]


@pytest.mark.slow
@pytest.mark.parametrize("num_lost", [1, 2], ids=["to two ranks", "to one rank"])
def test_a_script_without_reports_grows_at_the_end_of_an_epoch(tmp_path, num_lost):
    _, calm = run(tmp_path / "calm")
    lost = [[rank, 2, 2] for rank in range(1, num_lost + 1)]
    lines, ends = run(tmp_path / "hit", sleep_s=0.15, ends=lost)
    sizes = {epoch: {x["size"] for x in lines if x["epoch"] == epoch} for epoch in range(12)}
    assert all(len(of_epoch) == 1 for of_epoch in sizes.values()), sizes
    found = [next(iter(of_epoch)) for of_epoch in sizes.values()]
    assert (found[0], found[2], found[-1]) == (WORKERS, WORKERS - num_lost, WORKERS)
    assert len(lines) == sum(found), "no epoch is done again"
    assert len(ends) == WORKERS
    for end in ends:
        for name, value in calm[0].items():
            torch.testing.assert_close(end[name], value)
    steps = (tmp_path / "hit" / "metrics.jsonl").read_text().splitlines()
    wanted = list(range(1, epochs_job.EPOCHS * epochs_job.STEPS + 1))
    assert [json.loads(line)["step"] for line in steps] == wanted
