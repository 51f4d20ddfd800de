"""Steps of a script's optimizers are lines of metrics.jsonl, each once, whatever is said twice."""

import errno
import json
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic.protocol.in_force import ReportsInForce
from elastic.protocol.messages.to_controller import ScriptSteps
from elastic.protocol.step_record import NONE_APPLIED, AppliedRecord, StepMetrics
from elastic.store.applied_steps import AppliedSteps
from tests.scripts.test_units import BATCH, SAMPLES, alone, listening, loader_of
from workers.scripts.in_place.applied import Applied
from workers.scripts.in_place.course import Course
from workers.scripts.reports import Reports, Retention


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
    course.applied.begin_at(10, 100, deque())
    for (inputs,) in loader_of():
        model(inputs).sum().backward()
        for optimizer in optimizers:  # of one model
            optimizer.step()
    optimizers[0].step()  # behind no gradients of its own
    of_pass = range(BATCH, SAMPLES + 1, BATCH)
    assert told(course) == [(11 + n, 100 + samples) for n, samples in enumerate(of_pass)]


def test_each_line_has_the_learning_rate_that_its_step_was_taken_with(course):
    model, (optimizer,) = trained()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for (inputs,) in loader_of():
        model(inputs).sum().backward()
        optimizer.step()
        schedule.step()
    course.applied.tell()
    lines = listening(course).steps
    assert [line.learning_rate for line in lines] == [0.1, 0.1, 0.05, 0.05][: len(lines)]
    assert lines[0].gradient_norm is None


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
    call: Any = SimpleNamespace(
        generation=3, tell_steps=lambda each: said.append(each) or NONE_APPLIED
    )
    applied = Applied(Alive(), call)
    for _ in range(3):
        applied.begin()
        applied.end_unit(4)
        applied.hear_step(None)
    applied.tell()
    applied.tell()
    told_first, then = ([line.step for line in each.steps] for each in said)
    assert (told_first, then) == ([1], [2, 3]), "the first one at once"
    applied.begin()
    began = applied._began
    applied.go_on()
    assert applied._began is not None and began is not None  # noqa: PT018
    assert applied._began > began
    applied.tell()
    assert (said[2].call, said[2].base) == (3, 0)
    assert said[2].steps == (*said[0].steps, *said[1].steps)


class Ranks:
    """Of one call, and a controller, which hears the lowest one; without processes."""

    def __init__(self, place: Path, num_ranks: int) -> None:
        self.place, self.generation = place, 1
        self.calls = [Rank(self) for _ in range(num_ranks)]
        self.begin_controller()

    def begin_controller(self) -> None:
        """It knows what is on record, and is told what is in force."""
        self.file, self.writes = AppliedSteps(self.place, None, threading.Lock()), True
        for call in self.calls:
            call.said = call.in_force.again_after(call.said)

    def arrive(self) -> None:
        """What the lowest rank has said; a controller that dies before it writes has heard it."""
        said = self.calls[0].said
        while said:
            each: Any = said.popleft()
            if self.writes:
                self.file.record(each.call, each.base, each.steps)

    def hear_word(self) -> None:
        for call in self.calls:
            call.known = self.file.safe
            call.in_force.forget_applied(call.known)

    def lose(self) -> None:
        """The lowest rank."""
        del self.calls[0]
        self.generation += 1
        for call in self.calls:
            call.generation = self.generation
            call.applied.go_on()


class Rank:
    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self.generation = ranks, 1
        self.known, self.in_force = NONE_APPLIED, ReportsInForce()
        self.said: deque[Any] = deque()
        self.applied = Applied(Alive(), self)
        self.done: list[tuple[int, int]] = []

    def tell_steps(self, said: ScriptSteps) -> AppliedRecord:
        if self._ranks.calls[0] is self:
            self.in_force.say(said)
            self.said.append(said)
        return self.known

    def step(self, samples: int) -> None:
        self.applied.end_unit(samples)
        self.applied.hear_step(None)
        self.done.append((self.applied.steps, self.applied.samples))


def go_on(ranks: Ranks, is_so: Callable[[float], bool]) -> None:
    """By a step, behind which a rank or the controller may be lost. A step that only a lost rank
    has seen to its end is done again by the others, without its samples."""
    for call in ranks.calls:
        call.step(8)
        if is_so(0.4):
            call.applied.tell()
    if is_so(0.6):
        ranks.arrive()
    if is_so(0.4):
        ranks.hear_word()
    ranks.writes = ranks.writes and not is_so(0.1)
    if len(ranks.calls) > 1 and is_so(0.1):
        if is_ahead := is_so(0.5):
            ranks.calls[0].step(8)
            ranks.calls[0].applied.tell()
            if is_so(0.5):
                ranks.arrive()
        ranks.lose()
        for call in ranks.calls if is_ahead else ():
            call.step(6)
    if is_so(0.2):
        ranks.begin_controller()


@pytest.mark.parametrize("seed", range(30))
def test_each_step_is_on_record_once_whoever_dies_in_whatever_order(seed, tmp_path):
    draw = random.Random(seed)
    ranks = Ranks(tmp_path, 6)
    for _ in range(80):
        go_on(ranks, lambda probability: draw.random() < probability)
    (lowest, *_) = ranks.calls
    ranks.begin_controller()
    for _ in range(2):
        lowest.step(8)
        lowest.applied.tell()
        ranks.arrive()
        ranks.hear_word()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["samples"]) for line in lines] == lowest.done
    assert len(lines) == lowest.applied.steps
    assert len(lowest.applied._lines) == 1, "it keeps what is not known to be on record"
    assert not lowest.in_force.again_after(())


def test_what_a_lost_rank_has_not_said_is_said_by_the_next_call(tmp_path):
    """Of steps that its checkpoint is behind of; later ones are done again."""
    reports = Reports(str(tmp_path), Retention(), "")
    reports.unrecorded.extend(lines(1, 3, 4, 5))
    assert reports.unrecorded_until(4) == tuple(lines(1, 3, 4))
    steps = AppliedSteps(tmp_path, None, threading.Lock())
    steps.record(1, 0, lines(1, 1, 2))
    steps.record(2, 4, reports.unrecorded_until(4))
    steps.record(2, 4, lines(2, 5))
    assert on_record(tmp_path) == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2)]


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
