"""Steps of a script's optimizers are lines of metrics.jsonl, each once, whatever is said twice."""

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic.protocol.messages.to_controller import ScriptSteps
from elastic.protocol.step_record import StepMetrics
from elastic.store.applied_steps import AppliedSteps
from tests.scripts.test_units import BATCH, SAMPLES, alone, listening, loader_of
from workers.scripts.in_place.applied import Applied
from workers.scripts.in_place.course import Course


@pytest.fixture
def course() -> Iterator[Course]:
    with alone() as course:
        yield course


def trained(optimizers: int = 1) -> tuple[Any, list[torch.optim.Optimizer]]:
    model = DistributedDataParallel(nn.Linear(2, 1))
    return model, [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(optimizers)]


def told(course: Any) -> list[tuple[int, int]]:
    """Step and samples of each line."""
    course.applied.tell()
    lines = listening(course).steps
    assert all(line.step_s > 0 and line.world_size == 1 for line in lines)
    return [(line.step, line.samples) for line in lines]


def test_each_step_behind_gradients_is_a_line_with_the_samples_so_far(course):
    model, optimizers = trained(2)
    course.applied.begin_at(10, 100)
    for (inputs,) in loader_of():
        model(inputs).sum().backward()
        for optimizer in optimizers:  # of one model
            optimizer.step()
    optimizers[0].step()  # behind no gradients of its own
    of_pass = range(BATCH, SAMPLES + 1, BATCH)
    assert told(course) == [(11 + n, 100 + samples) for n, samples in enumerate(of_pass)]


def test_what_is_accumulated_is_one_step(course):
    model, (optimizer,) = trained()
    for number, (inputs,) in enumerate(loader_of()):
        if number % 2 == 0:
            with model.no_sync():
                model(inputs).sum().backward()
            continue
        model(inputs).sum().backward()
        optimizer.step()
    assert told(course) == [(1, 2 * BATCH), (2, 4 * BATCH)]


def test_what_is_not_applied_or_not_trained_on_is_no_line(course):
    model, (optimizer,) = trained()
    scaler = torch.amp.GradScaler("cpu")
    inputs = torch.full((BATCH, 2), torch.inf)
    scaler.scale(model(inputs).sum()).backward()
    scaler.step(optimizer)  # it leaves the step out
    scaler.update()
    with torch.no_grad():
        for (inputs,) in loader_of():
            model(inputs)
    assert told(course) == []
    model(torch.ones(BATCH, 2)).sum().backward()
    optimizer.step()
    assert told(course) == [(1, 0)], "samples of no loader are not counted"


class Alive:
    def size(self) -> int:
        return 2


def test_after_a_loss_the_newest_steps_are_told_again_and_the_time_begins_anew():
    said: list[ScriptSteps] = []
    applied = Applied(Alive(), lambda: 3, said.append)
    for _ in range(3):
        applied.begin()
        applied.end_unit(4)
        applied.hear_step()
    applied.tell()
    applied.tell()
    assert [[line.step for line in each.steps] for each in said] == [[1, 2, 3]]
    applied.begin()
    began = applied._began
    applied.go_on()
    assert applied._began is not None and began is not None  # noqa: PT018
    assert applied._began > began
    applied.tell()
    assert (said[1].call, said[1].base, said[1].steps) == (3, 0, said[0].steps)


@pytest.fixture
def opened(tmp_path) -> Callable[[], AppliedSteps]:
    return lambda: AppliedSteps(tmp_path, None, threading.Lock())


def lines(generation: int, *steps: int) -> list[StepMetrics]:
    return [StepMetrics(step, 0.0, None, generation, 2, step, 0.1, True, {}) for step in steps]


def on_record(place: Path, name: str = "metrics.jsonl") -> list[tuple[int, int]]:
    found = [json.loads(line) for line in (place / name).read_text().splitlines()]
    return [(line["step"], line["generation"]) for line in found]


def test_what_is_told_twice_is_written_once_also_by_the_next_controller(opened, tmp_path):
    steps = opened()
    assert steps.record(1, 0, lines(1, 1, 2)) == lines(1, 1, 2)
    assert steps.record(1, 0, [*lines(1, 1, 2), *lines(2, 3)]) == lines(2, 3)
    steps = opened()
    assert steps.record(1, 0, [*lines(1, 2), *lines(2, 3), *lines(2, 4)]) == lines(2, 4)
    assert on_record(tmp_path) == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert not (tmp_path / "metrics.rolledback.jsonl").exists()


def test_a_call_that_begins_further_back_moves_later_lines_aside_once(opened, tmp_path):
    steps = opened()
    steps.record(1, 0, lines(1, 1, 2, 3))
    steps.record(4, 1, ())
    assert steps.record(1, 0, lines(1, 4)) == [], "of a lost rank, late"
    steps.record(4, 1, lines(4, 2))
    steps = opened()
    steps.record(4, 1, lines(4, 2, 3))
    assert on_record(tmp_path) == [(1, 1), (2, 4), (3, 4)]
    assert on_record(tmp_path, "metrics.rolledback.jsonl") == [(2, 1), (3, 1)]


def test_a_move_that_a_crash_has_interrupted_is_ended(opened, tmp_path):
    opened().record(1, 0, lines(1, 1, 2, 3))
    content = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.rolledback.jsonl").write_text("".join(content[1:]))
    assert (opened().last, on_record(tmp_path)) == (1, [(1, 1)])


def test_steps_that_come_while_the_disk_is_full_are_on_record_later(opened, tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    steps = opened()
    steps.record(1, 0, lines(1, 1, 2, 3))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                steps.record(4, 1, lines(4, 2))
    assert steps.record(4, 1, lines(4, 3)) == lines(4, 2, 3)
    assert on_record(tmp_path) == [(1, 1), (2, 4), (3, 4)]
    assert on_record(tmp_path, "metrics.rolledback.jsonl") == [(2, 1), (3, 1)]
