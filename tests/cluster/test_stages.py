"""A model in stages on a cluster: whoever survives a SIGKILL cuts the layers anew, and the bits are
those of one undisturbed worker that computes whole micro-batches."""

import pytest

from tests.cluster.live import assert_same_bits

pytestmark = pytest.mark.cluster

STEPS = 60


@pytest.mark.parametrize(("rank", "parallel"), [(0, "pp:2"), (3, "pp:2/GPipe")])
def test_a_lost_stage_is_computed_by_the_others_and_the_bits_are_those_of_ddp(
    start, rank, parallel
):
    options = {"job": "staged", "steps": STEPS}
    with start("Layers", name="whole", workers=1, **options) as whole:
        undisturbed = whole.finish()
    expected = (
        undisturbed["result"]["weights_sha256"],
        [s["sha256"] for s in whole.lines("samples.jsonl")],
    )
    options |= {"parallel": parallel, "set": ["sleep=0.03"]}
    with start("Layers", workers="2..4", **options) as run:
        at = run.wait_for_step(lambda s: s["step"] > 10 and s["world_size"] == 4)
        stages = [(w["mesh"]["dp"], w["mesh"]["pp"]) for w in run.status()["workers"]]
        run.kill(rank=rank)
        run.wait_for_step(lambda s: s["generation"] > at["generation"])
        end = run.finish()
    assert_same_bits(run, end, expected, STEPS)
    assert end["result"]["lost_steps"] == 0
    assert sorted(stages) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    layouts = [
        line["planned"]["layout"] for line in run.lines("journal.jsonl") if "planned" in line
    ]
    assert any(layout.startswith("2 pipelines of 2 stages") for layout in layouts), layouts
    assert any(layout.startswith("1 pipeline of 3 stages") for layout in layouts), layouts


def test_a_model_that_has_no_stages_is_told_before_anything_starts(start):
    with start("Skipping", job="staged", parallel="pp:2") as run:
        end = run.finish()
    assert end["status"] == 2
    assert end["err"].count("\n") == 1
    assert "(a skip connection); return it from blocks.0 too" in end["err"]
    assert not run.directory.exists()
