"""What a controller does when its driver is gone: without Ray."""

import asyncio
import math
from types import SimpleNamespace

import pytest

from elastic.controller.status import what_is_lost
from elastic.on_ray import actors
from elastic.on_ray.actors import ControllerActor


def left_alone(
    *, detect_s: float | None, is_stopping: bool, asked: list[str] | None = None
) -> list[str]:
    """-> why the run is ended at once; nothing: it ends by itself. asked: gets why to stop."""
    actor, ended = object.__new__(ControllerActor), []  # its constructor asks Ray who it is
    actor._order = {"config": SimpleNamespace(detect_s=detect_s)}
    actor._wishes, actor._is_stopping, actor._heard = (
        {"end_now": ended.append, "stop": ([] if asked is None else asked).append},
        is_stopping,
        -math.inf,
    )
    asyncio.run(asyncio.wait_for(actor._watch_driver(), 60))
    return ended


@pytest.mark.parametrize("detect_s", [None, 3.0])
def test_a_run_whose_driver_dies_may_save_its_last_step_before_it_is_ended(detect_s, monkeypatch):
    assert actors.DRIVER_LEASE_S + actors.DRIVER_WATCH_S + actors.SAVE_ALONE_S < 8
    monkeypatch.setattr(actors, "SAVE_ALONE_S", 0.01)
    asked: list[str] = []
    why = left_alone(detect_s=detect_s, is_stopping=False, asked=asked)
    assert asked == ["the driver is gone"]
    assert why == ["the driver is gone, and the run did not stop within 0.01 s"]


@pytest.mark.parametrize(
    ("step", "checkpoint", "said"),
    [
        (7, 7, ""),
        (8, 7, "; step 8 is in no checkpoint and will be done again"),
        (9, 0, "; steps 1 to 9 are in no checkpoint and will be done again"),
    ],
)
def test_a_run_that_ends_at_once_says_what_is_lost(step, checkpoint, said):
    assert what_is_lost(step, checkpoint) == said


def test_a_run_that_stops_already_goes_on_to_its_end(monkeypatch):
    monkeypatch.setattr(actors, "STOP_ALONE_S", 0.01)
    assert left_alone(detect_s=3.0, is_stopping=True) == []


def test_a_run_that_finds_no_hangs_has_so_long_to_stop_alone(monkeypatch):
    """A step that hangs would keep its processes for ever: nobody is there to end it."""
    assert actors.STOP_ALONE_S == 600.0
    monkeypatch.setattr(actors, "STOP_ALONE_S", 0.01)
    (why,) = left_alone(detect_s=None, is_stopping=True)
    said = "the driver is gone, and the run has not stopped for 0.01 s; detect_s is None"
    assert why == said
