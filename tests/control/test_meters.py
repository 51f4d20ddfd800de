"""The numbers that Prometheus reads of a run, from its first moment on."""

from dataclasses import replace

from elastic.control.accounting import Recovery, open_account
from elastic.controller.status import meters_of
from elastic.on_ray.meters import METERS, Meters

STATUS = {
    "step": 3,
    "steps": 9,
    "world_size": 2,
    "wanted": [1, 4],
    "generation": 1,
    "committed_checkpoint": None,
}


def test_there_is_a_number_or_none_for_each_meter():
    values = meters_of(STATUS, {}, open_account(0.0), 0)
    assert set(values) == set(METERS)
    assert (values["step"], values["wanted_workers"], values["idle"]) == (3, 4, 0.0)
    assert (values["loss"], values["last_recovery_seconds"]) == (None, None)
    Meters("run", "id").show(values | {"loss": float("nan")})


def test_a_meter_that_fails_is_told_once_and_ends_nothing(caplog):
    meters = Meters("run", "id")
    for _ in range(2):
        meters.show({"step": 3, "of_another_version": 1})
    assert [r.message for r in caplog.records] == [
        "meters reason=\"Ray takes no metrics: KeyError: 'of_another_version'\""
    ]


def test_two_runs_of_one_name_are_told_apart():
    first, second = (Meters("run", run_id).tags for run_id in ("a", "b"))
    assert (first, second) == ({"run": "run", "run_id": "a"}, {"run": "run", "run_id": "b"})


def test_what_was_is_told():
    recovery = Recovery("process_died", 0.1, 0.1, 0.1, 0.1, 0.1, 0.5, 0)
    account = open_account(0.0)
    badput = tuple((b, 2.0 if b == "idle" else s) for b, s in account.badput)
    account = replace(account, since=8.0, goodput_s=6.0, badput=badput, recoveries=(recovery,))
    values = meters_of(STATUS, {"loss": 1.5, "step_s": 0.2, "samples": 30}, account, 4)
    assert (values["goodput"], values["idle"], values["recoveries"]) == (0.75, 0.25, 1)
    assert (values["loss"], values["samples"], values["lost_steps"]) == (1.5, 30, 4)
    assert values["last_recovery_seconds"] == 0.5
