"""A scenario carried out from outside on a live run: the bits, and a report that adds up."""

import json

import pytest

from tests.cluster.live import assert_same_bits, elastic

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STEPS = 60
SCENARIO = """
seed: 1
faults:
  - {what: kill, whom: {rank: 1}, when: {step: 8}}
  - {what: stop, for_s: 0.3, when: {after_fault: 1, step: 6}}
  - {what: stop, whom: {rank: 0}, when: {after_fault: 2, step: 6}}
  - {what: kill, whom: {rank: 1}, when: {after_fault: 3, phase: forming}}
"""


def test_a_scenario_is_carried_out_survived_and_accounted_for(start, reference, tmp_path):
    """SIGKILL, a short freeze that must go unpunished, one for ever, and a kill while forming."""
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(SCENARIO)
    options = {"workers": "2..3", "steps": STEPS, "detect_s": 3.0, "set": ["sleep=0.06"]}
    with start("Toy", **options) as run:
        run.wait_for(lambda s: s["step"] > 0)
        done = elastic(run.env, "chaos", scenario, run.directory, "--report", tmp_path / "report")
        end = run.finish()
    assert done.returncode == 0, done.stderr
    assert_same_bits(run, end, reference(steps=STEPS), STEPS)

    report = json.loads((tmp_path / "report.json").read_text())
    results = [(f["strike"], f["what"], f["result"]) for f in report["faults"]]
    assert results == [
        ("1.1", "kill", "recovered"),
        ("2.1", "stop", "no loss followed"),
        ("3.1", "stop", "recovered"),
        ("4.1", "kill", "recovered"),
    ], report["faults"]
    assert report["lost_steps"] == end["result"]["lost_steps"] == 0
    assert report["goodput"]["time"] == pytest.approx(end["result"]["goodput"], rel=0.005)
    seconds = [sum(rank["buckets"].values()) for rank in report["ranks"]]
    assert seconds == pytest.approx([report["wall_s"]] * 3, rel=0.005)
    for name, spent_s in end["result"]["badput"].items():
        assert report["buckets"].get(name, 0.0) == pytest.approx(spent_s, abs=0.05), name
    phases = ("detect_s", "fence_s", "form_s", "restore_s", "first_step_s")
    for fault in report["faults"]:
        if fault["result"] == "recovered":
            assert sum(fault[p] for p in phases) == pytest.approx(fault["total_s"])
    assert (tmp_path / "report.html").read_text().count("<svg") == 3
