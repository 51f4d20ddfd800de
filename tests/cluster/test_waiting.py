"""Runs that are started before their machines are there."""

import pytest

from tests.cluster.live import elastic

pytestmark = pytest.mark.cluster
MARKET = "ray.io/market-type"
LACK = "waiting for a place for 2 workers of 1 CPU; the cluster has 1 node with 0 CPUs"
TOLD = "elastic: waiting for 2 workers to start: 2 loading TARGET and its mod"


def test_a_run_says_what_it_waits_for_and_begins_when_it_comes(start, nodes):
    with start("Toy", address=nodes.address, workers=2, steps=10) as run:
        status = run.wait_for(lambda s: LACK in s.get("reason", ""))
        nodes.add_node(num_cpus=2, object_store_memory=10**8)
        end = run.finish()
    assert (status["phase"], status["step"]) == ("starting", 0)
    assert end["status"] == 0, end["err"]
    assert f"elastic: {LACK}" in end["err"]


def test_workers_come_where_their_labels_and_fallbacks_are_and_a_lack_of_them_is_told(start, nodes):
    nodes.add_node(num_cpus=2, object_store_memory=10**8, labels={MARKET: "reserved"})
    options = {"workers": 2, "steps": 30, "worker_resources": "disk=1"}
    options["labels"] = f"{MARKET}=spot; {MARKET}=on-demand"
    with start("Toy", address=nodes.address, **options) as run:
        status = run.wait_for(lambda s: "with these labels" in s.get("reason", ""))
        asked_for = [
            nodes.add_node(
                num_cpus=1,
                object_store_memory=10**8,
                resources={"disk": 1},
                labels={MARKET: market},
            ).node_id
            for market in ("on-demand", "spot")
        ]
        running = run.wait_for(lambda s: s.get("world_size") == 2)
        end = run.finish()
    assert (
        "2 workers of 1 CPU and 1 disk on a node with ray.io/market-type=spot or else"
        in (status["reason"])
    )
    assert (
        "0 disks (0 free), 0 of them with these labels (there are: ray.io/market-type="
        in (status["reason"])
    )
    assert {w["node_id"] for w in running["workers"]} == set(asked_for)
    assert end["status"] == 0, end["err"]


def test_a_run_whose_workers_take_long_to_start_says_how_far_they_are(start, tmp_path):
    folder = tmp_path / "held"
    folder.mkdir()
    (folder / "hold").touch()
    options = {"job": "held", "workers": 2, "steps": 10, "set": [f"folder={str(folder)!r}"]}
    run = start("HeldAtTheStart", **options)
    run.command.remove("--json")  # nobody reads there how a start goes
    with run:
        status = run.wait_for(
            lambda s: (
                "2 loading TARGET and its model" in s.get("reason", "")
                and TOLD in run.process.errors_so_far()  # the driver asks now and then
            )
        )
        (folder / "hold").unlink()
        end = run.finish()
    assert (status["phase"], status["step"]) == ("starting", 0)
    assert end["status"] == 0, end["err"]


def test_a_detached_run_is_left_alone_while_it_waits_and_can_be_stopped(start, nodes):
    with start("Toy", address=nodes.address, workers=2, steps=10, detach=True) as run:
        assert run.finish()["status"] == 0
        assert run.status()["phase"] == "starting"
        done = elastic(run.env, "stop", run.directory)
        end = run.finish()
    assert (done.returncode, end["result"]["outcome"]) == (0, "stopped"), done.stderr
    assert end["result"]["steps"] == 0


def test_a_worker_that_no_node_can_ever_take_is_refused_with_what_there_is(start, nodes):
    nodes.add_node(num_cpus=2, object_store_memory=10**8)
    for attempt in range(20):  # Ray's report of its nodes is seconds old: until then a run waits
        with start("Toy", f"run-{attempt}", address=nodes.address, cpus_per_worker=64) as run:
            if run.wait_or_end(lambda s: "waiting for a place" in (s.get("reason") or "")) is None:
                end = run.finish()
                break
    else:
        raise AssertionError("it was never refused")
    assert end["status"] == 2, end["err"]
    assert "a worker needs 64 CPUs" in end["err"]
    assert "the largest has 2 CPUs, and nothing adds nodes" in end["err"]
    assert not run.directory.exists()
