"""Runs whose head or driver is cut off, and links that lose packets."""

import time
from functools import partial

import pytest

from tests.cluster.hosts import Forbidden, Hosts, command_of
from tests.cluster.live import JOBS, assert_same_bits, leftovers

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
HOSTS = partial(Hosts, 3, head_cpus=0)
"""A head without slots and two hosts with one each."""

STEPS = 250
TOY = f"{JOBS / 'toy.py'}:Toy"
OPTIONS = {"steps": STEPS, "detect_s": 3.0, "set": ["sleep=0.02"]}
LEASE_S = 30.0  # 10 x detect_s
LOADED_S = 8.0
"""From a fault to the next step beside other work; on an idle machine detect_s and a second."""


def assert_unharmed(run, end, reference) -> None:
    assert_same_bits(run, end, reference(steps=STEPS), STEPS)
    assert end["result"]["lost_steps"] == 0


@pytest.mark.slow
def test_the_heads_link_is_cut_for_ten_seconds_and_nobody_is_punished(hosts, reference, tmp_path):
    """Driver, controller and Ray's head on one side, all members on the other: they train on."""
    hosts.start_ray()
    with hosts.run(TOY, tmp_path, "run", workers=2, **OPTIONS) as run:
        run.wait_for(lambda s: s["world_size"] == 2 and s["step"] > 20)
        assert hosts.host_running("ray::ControllerActor") == 0
        generation = run.status()["generation"]
        hosts.cut(0)
        time.sleep(10)  # the length of the cut is the fault
        hosts.mend(0)
        end = run.finish()
    assert_unharmed(run, end, reference)
    assert end["result"]["generations"] == generation


@pytest.mark.slow
def test_a_driver_that_is_cut_off_is_gone_and_the_run_ends_with_it(hosts, tmp_path):
    hosts.start_ray()
    run = hosts.run(TOY, tmp_path, "run", host=2, workers=2, **{**OPTIONS, "steps": 10_000})
    with run:
        run.wait_for(lambda s: s["world_size"] == 2 and s["step"] > 20)
        hosts.cut(2)
        at = time.monotonic()
        ours = {host: of_run(hosts, host) for host in range(3)}
        assert all(ours.values()), ours
        for host, patience_s in ((0, 10), (1, 10), (2, LEASE_S + 5)):
            while leftovers(ours[host]) and time.monotonic() - at < patience_s:
                time.sleep(0.05)  # polling, bounded by the deadline
            said = [command_of(pid) for pid in leftovers(ours[host])]
            assert said == [], f"host {host} after {time.monotonic() - at:.1f} s"
            print(f"host {host} is empty after {time.monotonic() - at:.1f} s")


def of_run(hosts, host: int) -> list[int]:
    """The run's actors on a host."""
    return [pid for pid in hosts.pids(host) if "Actor" in command_of(pid)]


@pytest.mark.slow
def test_a_link_that_delays_every_packet_only_slows_the_run(hosts, reference, tmp_path):
    hosts.start_ray()
    with hosts.run(TOY, tmp_path, "run", workers=2, **OPTIONS) as run:
        run.wait_for(lambda s: s["world_size"] == 2 and s["step"] > 20)
        hosts.delay(1, 30)
        end = run.finish()
    assert_unharmed(run, end, reference)
    assert end["result"]["recoveries"] == []


@pytest.mark.slow
def test_a_link_that_loses_every_tenth_packet_only_slows_the_run(hosts, reference, tmp_path):
    hosts.start_ray()
    with hosts.run(TOY, tmp_path, "run", workers=2, **OPTIONS) as run:
        run.wait_for(lambda s: s["world_size"] == 2 and s["step"] > 20)
        try:
            hosts.lose(1, 0.1)
        except Forbidden as reason:
            pytest.skip(f"loss was not tried: {reason}")
        end = run.finish()
    assert_unharmed(run, end, reference)


def next_step_of(run, at: float, world_size: int) -> float:
    """Seconds from `at` to the first committed step of so many members."""
    lines = run.lines("metrics.jsonl")
    return next(m["time"] for m in lines if m["time"] > at and m["world_size"] == world_size) - at


@pytest.mark.slow
@pytest.mark.parametrize("way", ["incoming", "outgoing"])
def test_a_link_that_is_dead_in_one_direction_costs_seconds_and_no_step(
    hosts, reference, tmp_path, way, capsys
):
    hosts.start_ray()
    with hosts.run(TOY, tmp_path, "run", **{**OPTIONS, "workers": "1..2"}) as run:
        status = run.wait_for(lambda s: s["world_size"] == 2 and s["step"] > 20)
        at = time.time()
        host = hosts.host_of(status["workers"][1]["node_ip"])
        try:
            hosts.lose(host, 1.0, incoming=way == "incoming", outgoing=way == "outgoing")
        except Forbidden as reason:
            pytest.skip(f"loss was not tried: {reason}")
        end = run.finish()
    took_s = next_step_of(run, at, 1)
    with capsys.disabled():
        print(f"\n{way} dead: {took_s:.2f} s to the next step")
    assert_unharmed(run, end, reference)
    assert took_s < LOADED_S


@pytest.mark.slow
def test_of_two_workers_that_cannot_reach_each_other_one_goes_on(
    hosts, reference, tmp_path, capsys
):
    """Driver and controller reach both."""
    hosts.start_ray()
    with hosts.run(TOY, tmp_path, "run", **{**OPTIONS, "workers": "1..2"}) as run:
        run.wait_for(lambda s: s["world_size"] == 2 and s["step"] > 20)
        assert hosts.host_running("ray::ControllerActor") == 0
        try:
            at = hosts.separate(1, 2)
        except Forbidden as reason:
            pytest.skip(f"a path was not cut: {reason}")
        end = run.finish()
    took_s = next_step_of(run, at, 1)
    with capsys.disabled():
        print(f"\npath cut: {took_s:.2f} s to the next step")
    assert_unharmed(run, end, reference)
    assert took_s < LOADED_S
    assert {r["cause"] for r in end["result"]["recoveries"]} == {"unreachable"}


@pytest.mark.slow
def test_connections_that_break_between_the_living_are_made_again(hosts, reference, tmp_path):
    hosts.start_ray()
    with hosts.run(TOY, tmp_path, "run", workers=2, **OPTIONS) as run:
        status = run.wait_for(lambda s: s["world_size"] == 2 and s["step"] > 20)
        try:
            hosts.reset(1, 2)
        except Forbidden as reason:
            pytest.skip(f"nothing was reset: {reason}")
        run.wait_for(lambda s: s["generation"] > status["generation"] and s["world_size"] == 2)
        end = run.finish()
    assert_unharmed(run, end, reference)
    assert end["result"]["recoveries"] == []
