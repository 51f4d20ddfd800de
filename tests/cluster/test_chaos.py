"""A scenario carried out from outside on a live run: the bits, and a report that adds up."""

import json

import pytest

from tests.cluster.live import JOBS, LiveRun, assert_same_bits, begin, elastic

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STEPS = 60
NODE = {"num_cpus": 3, "object_store_memory": 80 * 2**20}
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


CORRUPT = """
faults:
  - {what: corrupt, when: {step: 33}}
  - {what: kill, whom: {node_of: 0}, when: {after_fault: 1, after_s: 0}}
"""


def test_bits_that_flip_in_a_checkpoint_are_found_and_the_one_before_it_is_used(
    start, reference, tmp_path
):
    """All workers of the one node are killed with it, so that the run needs a checkpoint."""
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(CORRUPT)
    options = {"workers": 2, "steps": STEPS, "checkpoint_every": 16, "set": ["sleep=0.1"]}
    with start("Toy", **options) as run:
        run.wait_for(lambda s: s["step"] > 0)
        chaos = begin(run.env, "-m", "elastic", "chaos", scenario, run.directory)
        run.wait_for(lambda s: (run.directory / "metrics.rolledback.jsonl").exists())
        end = run.finish()
        said = chaos.communicate(timeout=60)
    assert_same_bits(run, end, reference(steps=STEPS), STEPS)
    corrupted = run.lines("chaos.jsonl")[0]
    step, file = corrupted["whom"].split("/")
    told = [line["checkpoint"] for line in run.lines("journal.jsonl") if "checkpoint" in line]
    damaged = [line for line in told if "damaged" in line]
    assert [f"step-{line['damaged']:08d}" for line in damaged] == [step], said
    assert file in damaged[0]["reason"]
    assert (run.directory / "checkpoints" / damaged[0]["kept"] / file).exists()


def test_a_loss_of_capacity_shrinks_the_run_and_its_gain_grows_it(
    nodes, reference, tmp_path, ray_temp
):
    """Somebody else's actors have the slots meanwhile, so nobody comes back before its time."""
    nodes.add_node(**NODE)
    (tmp_path / "trace.csv").write_text("0,3\n2,1\n9,3\n")
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("faults: [{what: capacity, when: {trace: trace.csv}}]")
    options = {"address": nodes.address, "workers": "1..3", "steps": STEPS, "set": ["sleep=0.2"]}
    with LiveRun(f"{JOBS / 'toy.py'}:Toy", tmp_path, "run", ray_temp, **options) as run:
        run.wait_for(lambda s: s["world_size"] == 3 and s["step"] > 0)
        words = ("chaos", scenario, run.directory, "--address", nodes.address)
        chaos = begin(run.env, "-m", "elastic", *words)
        run.wait_for_step(lambda s: s["world_size"] == 1)
        run.wait_for_step(lambda s: s["world_size"] == 3)
        end = run.finish()
        _, err = chaos.communicate(timeout=60)
    assert chaos.returncode == 0, err
    assert_same_bits(run, end, reference(steps=STEPS), STEPS)
    assert end["result"]["lost_steps"] == 0
    rooms = [x["whom"] for x in run.lines("chaos.jsonl") if x["worker"] is None]
    assert rooms == ["room for 3 workers", "room for 1 worker", "room for 3 workers"]
