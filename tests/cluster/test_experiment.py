"""A sweep carried out on live runs: the same bits with faults and without, and none run twice."""

import csv
import json

import pytest
import yaml

from tests.cluster.live import JOBS, elastic, environment

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
STEPS = 60


def test_a_sweep_is_carried_out_compared_and_not_repeated(
    shared_head, reference, ray_temp, tmp_path
):
    run = {"target": f"{JOBS}/toy.py:Toy", "arguments": {"sleep": 0.1}, "steps": STEPS}
    job = {
        "resources": {"workers": "2..3", "address": shared_head.address},
        "run": {**run, "global_batch": 48, "micro_batch": 6, "reduction": "bitwise"},
    }
    (tmp_path / "elastic.yaml").write_text(yaml.safe_dump(job))
    (tmp_path / "kill.yaml").write_text("faults: [{what: kill, when: {step: 10}}]")
    sweep = {"job": "elastic.yaml", "place": "out", "scenarios": ["none", "kill.yaml"]}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))

    def carry_out() -> str:
        env, sweep = environment(ray_temp), tmp_path / "sweep.yaml"
        done = elastic(env, "experiment", sweep, patience_s=240.0)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    out = carry_out()
    assert "[1/2] none, seed 0: succeeded" in out
    assert "[2/2] kill, seed 0: succeeded" in out
    with (tmp_path / "out" / "results.csv").open() as file:
        calm, hit = csv.DictReader(file)
    assert calm["weights_sha256"] == hit["weights_sha256"] == reference(steps=STEPS)[0]
    assert (calm["faults"], hit["faults"], hit["lost_steps"]) == ("0", "1", "0")
    result = json.loads((tmp_path / "out" / hit["run"] / "result.json").read_text())
    recoveries_s = [float(seconds) for seconds in hit["recoveries_s"].split()]
    assert recoveries_s
    assert recoveries_s == pytest.approx([r["total_s"] for r in result["recoveries"]], abs=1e-3)
    assert "2 of 2 runs, 2 conditions" in (tmp_path / "out" / "experiment.html").read_text()
    again = carry_out()
    assert "2 of 2 runs are in" in again
    assert "[" not in again
    shared_head.assert_empty()
