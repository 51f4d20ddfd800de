"""A sweep carried out on live runs: the same bits with faults and without, and none run twice."""

import csv
import json
import time

import pytest
import yaml

from tests.cluster.fork_server import Forked
from tests.cluster.live import JOBS, begin, environment

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
STEPS = 60


def test_a_sweep_is_carried_out_compared_and_not_repeated(
    shared_head, reference, ray_temp, tmp_path
):
    env, until, hit = environment(ray_temp), tmp_path / "until", tmp_path / "out/kill-seed0"
    arguments = {"sleep": 0.1, "until": str(until)}
    run = {"target": f"{JOBS}/toy.py:Toy", "arguments": arguments, "steps": STEPS}
    job = {
        "resources": {"workers": "2..3", "address": shared_head.address},
        "run": {**run, "global_batch": 48, "micro_batch": 6, "reduction": "bitwise"},
    }
    (tmp_path / "elastic.yaml").write_text(yaml.safe_dump(job))
    (tmp_path / "kill.yaml").write_text("faults: [{what: kill, when: {step: 10}}]")
    sweep = {"job": "elastic.yaml", "place": "out", "scenarios": ["kill.yaml", "none"]}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    words = ("-m", "elastic", "experiment", tmp_path / "sweep.yaml")

    def carry_out() -> str:
        return said_by(begin(env, *words))

    experiment = begin(env, *words)
    deadline = time.monotonic() + 120
    while not (hit / "chaos.jsonl").exists():
        assert experiment.poll() is None, experiment.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)  # polling, bounded by the deadline
    until.touch()  # the fault has struck, and nothing rests any more
    out = said_by(experiment)
    assert "[1/2] kill, seed 0: succeeded" in out
    assert "[2/2] none, seed 0: succeeded" in out
    with (tmp_path / "out" / "results.csv").open() as file:
        killed, calm = csv.DictReader(file)
    assert calm["weights_sha256"] == killed["weights_sha256"] == reference(steps=STEPS)[0]
    assert (calm["faults"], killed["faults"], killed["lost_steps"]) == ("0", "1", "0")
    assert (tmp_path / "out" / killed["run"]) == hit
    result = json.loads((hit / "result.json").read_text())
    recoveries_s = [float(seconds) for seconds in killed["recoveries_s"].split()]
    assert recoveries_s
    assert recoveries_s == pytest.approx([r["total_s"] for r in result["recoveries"]], abs=1e-3)
    assert "2 of 2 runs, 2 conditions" in (tmp_path / "out" / "experiment.html").read_text()
    again = carry_out()
    assert "2 of 2 runs are in" in again
    assert "[" not in again
    shared_head.assert_empty()


def said_by(experiment: Forked) -> str:
    out, err = experiment.communicate(timeout=240)
    assert (experiment.returncode, err) == (0, ""), out
    return out
