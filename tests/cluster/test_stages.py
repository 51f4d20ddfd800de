"""A model in stages on a cluster: whoever survives a SIGKILL cuts the layers anew, gets what it
lacks of the state from whoever has it, and the bits are those of one undisturbed worker that
computes whole micro-batches."""

import json

import pytest

from tests.cluster.live import assert_same_bits

pytestmark = pytest.mark.cluster

STEPS = 30


@pytest.mark.parametrize(
    ("rank", "parallel"),
    [
        (0, "pp:2"),
        pytest.param(3, "pp:2/GPipe", marks=pytest.mark.slow),
        (1, "pp:2,fsdp-grad-op"),
    ],
)
def test_a_lost_stage_is_computed_by_the_others_and_the_bits_are_those_of_ddp(
    start, reference, rank, parallel
):
    expected = reference(STEPS, job="staged", target="Layers")
    options = {"job": "staged", "steps": STEPS, "parallel": parallel, "set": ["sleep=0.2"]}
    with start("Layers", workers="2..4", **options) as run:
        at = run.wait_for_step(lambda s: s["step"] > 3 and s["world_size"] == 4)
        stages = [(w["mesh"]["dp"], w["mesh"]["pp"]) for w in run.status()["workers"]]
        run.kill(rank=rank)
        run.wait_for_step(lambda s: s["generation"] > at["generation"])
        end = run.finish()
    assert_same_bits(run, end, expected, STEPS)
    assert end["result"]["lost_steps"] == 0
    assert sorted(stages) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(0 <= m.get("bubble", 0) <= 1 for m in run.lines("metrics.jsonl"))
    assert run.lines("metrics.jsonl")[-1]["bubble"] > 0
    layouts = planned(run)
    assert any(layout.startswith("2 pipelines of 2 stages") for layout in layouts), layouts
    assert any(
        layout.startswith("1 pipeline of 3 stages") and layout.endswith(" MB moved")
        for layout in layouts
    ), layouts


def planned(run) -> list[str]:
    """The layouts of all generations."""
    lines = run.lines("journal.jsonl")
    return [line["planned"]["layout"] for line in lines if "planned" in line]


def evaluations(run) -> list[tuple[int, float]]:
    found = run.lines("metrics.jsonl")
    return [(m["step"], m["user"]["validation"]) for m in found if "validation" in m["user"]]


def test_blocks_that_nobody_else_has_come_from_a_holder_and_evaluations_agree(start):
    """Of one pipeline of two stages: the one that is left has the whole model then, until the
    other's place is taken."""
    options = {"job": "staged", "steps": STEPS, "eval_every": 5, "clip_norm": 0.5}
    with start("Evaluated", name="whole", workers=1, **options) as whole:
        undisturbed = whole.finish()
    expected = (
        undisturbed["result"]["weights_sha256"],
        [s["sha256"] for s in whole.lines("samples.jsonl")],
    )
    options |= {"parallel": "pp:2", "set": ["sleep=0.1"]}
    with start("Evaluated", workers="1..2", **options) as run:
        at = run.wait_for_step(lambda s: s["step"] > 3 and s["world_size"] == 2)
        run.kill(rank=1)
        run.wait_for_step(lambda s: s["generation"] > at["generation"])
        end = run.finish()
    assert_same_bits(run, end, expected, STEPS)
    assert end["result"]["lost_steps"] == 0
    assert evaluations(run) == evaluations(whole) != []
    assert any(layout.startswith("1 pipeline of 1 stage,") for layout in planned(run))


@pytest.mark.parametrize(
    "schedule", ["ZBVZeroBubble", pytest.param("Interleaved1F1B", marks=pytest.mark.slow)]
)
def test_ranks_with_two_stages_each_recover_and_evaluate_with_the_bits_of_ddp(start, schedule):
    """A micro-batch comes twice on each rank, as it was loaded."""
    options = {"job": "staged", "steps": 20, "eval_every": 5, "set": ["depth=8"]}
    with start("TakingApart", name="whole", workers=1, **options) as whole:
        undisturbed = whole.finish()
    expected = (
        undisturbed["result"]["weights_sha256"],
        [s["sha256"] for s in whole.lines("samples.jsonl")],
    )
    options |= {"parallel": f"pp:2/{schedule}", "set": ["depth=8", "sleep=0.2"]}
    with start("TakingApart", workers="2..3", **options) as run:
        at = run.wait_for_step(lambda s: s["step"] > 3 and s["world_size"] == 3)
        blocks = [w["blocks"] for w in at["workers"]]
        run.kill(rank=1)
        run.wait_for_step(lambda s: s["generation"] > at["generation"])
        end = run.finish()
    assert_same_bits(run, end, expected, 20)
    assert evaluations(run) == evaluations(whole) != []
    assert sorted(map(len, blocks)) in ([0, 4, 4], [4, 4, 4])
    assert any("of 4 stages on 2 ranks" in layout for layout in planned(run)), planned(run)


@pytest.mark.slow
def test_a_run_in_stages_goes_on_with_other_workers_from_its_checkpoint(start, reference):
    options = {"job": "staged", "checkpoint_every": 10, "parallel": "pp:2"}
    with start("Layers", name="stages", workers=3, steps=20, **options) as first:
        assert first.finish()["status"] == 0
    with start("Layers", name="stages", workers=2, steps=STEPS, **options) as run:
        end = run.finish()
    assert end["status"] == 0, end["err"]
    expected, _ = reference(STEPS, job="staged", target="Layers")
    assert end["result"]["weights_sha256"] == expected


def test_a_run_in_stages_goes_on_under_other_strategies_and_says_so(start, reference):
    """And back; config.json and the journal have the newest one."""
    kinds = [("pp:3", 3), ("fsdp", 2), ("pp:2", 2)]
    for part, (parallel, workers) in enumerate(kinds, 1):
        options = {"job": "staged", "parallel": parallel, "steps": STEPS // len(kinds) * part}
        with start("Layers", name="changing", workers=workers, **options) as run:
            end = run.finish()
        assert end["status"] == 0, end["err"]
        assert ("goes on with" in end["err"]) == (part > 1)
        assert json.loads((run.directory / "config.json").read_text())["parallel"] == parallel
    assert "with parallel='fsdp' and goes on with 'pp:2'" in end["err"]
    expected, _ = reference(STEPS, job="staged", target="Layers")
    assert end["result"]["weights_sha256"] == expected
    starts = [x["entry"] for x in run.lines("journal.jsonl") if "run" in x]
    pp = [e["limits"]["parallel"]["pp"] for e in starts if e["type"] == "Started"]
    assert pp == [3, 1, 2]


def test_a_model_that_has_no_stages_is_told_before_anything_starts(start):
    with start("Skipping", job="staged", parallel="pp:2") as run:
        end = run.finish()
    assert end["status"] == 2
    assert end["err"].count("\n") == 1
    assert "(a skip connection); return it from blocks.0 too" in end["err"]
    assert not run.directory.exists()
