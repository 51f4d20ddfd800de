"""The commands of the tutorials and of the examples run as they are printed, on one Ray."""

import csv
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cluster.live import Ended, elastic, environment, python
from tests.docs.pages import DOCS, ROOT, blocks
from tests.object_store import CREDENTIALS, uri

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
EXAMPLES = ROOT / "examples/README.md"
WEEK = sorted(DOCS.glob("tutorial_*.md"))
NOT_HERE = ("python -m venv", "source ", "pip install", "make demo", "ray start")
"""Their beginnings: an environment (tests/test_packaging.py installs the wheel), the demo
(tests/cli/test_demo.py) and clusters, which are one here."""
BUCKET = "s3://my-bucket/"
PATIENCE_S = 300.0
"""For one command: an experiment is two runs, on a machine that is busy."""


class Command(NamedTuple):
    words: list[str]
    status: int
    """With which it must end."""


def commands_of(page: Path) -> Iterator[Command]:
    for line in "\n".join(blocks(page, "")).replace("\\\n", " ").splitlines():
        if line and not line.startswith(NOT_HERE):
            told = re.search(r"# exit status (\d)", line)
            yield Command(shlex.split(line, comments=True), int(told[1]) if told else 0)


@pytest.fixture
def carry_out(tmp_path, ray_temp, shared_head):
    """carry_out(Command) -> Ended, in a folder that has the examples as a checkout has them."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    env = environment(ray_temp) | CREDENTIALS | {"RAY_ADDRESS": shared_head.address}

    def run(command: Command) -> Ended:
        (program, *words), how = command.words, {"folder": tmp_path}
        match program:
            case "elastic":
                done = elastic(env, *words, patience_s=PATIENCE_S, **how)
            case "pytest":
                done = python(env, "-m", "pytest", "-p", "no:cacheprovider", *words, **how)
            case _:
                assert program == "python", command
                done = python(env, *words, **how)
        assert done.returncode == command.status, (command, done.stdout, done.stderr[-3000:])
        return done

    yield run
    shared_head.assert_empty()


@pytest.mark.parametrize("number", range(len(WEEK[:4])), ids=lambda i: WEEK[i].stem)
def test_a_day_of_the_first_half_is_as_printed(number, carry_out, tmp_path):
    for command in commands_of(WEEK[number]):
        carry_out(command)
    if "data" in WEEK[number].stem:
        assert ended(tmp_path / "runs/local_rows") == ("succeeded", 20)
    if "machines" in WEEK[number].stem:
        assert ended(tmp_path / "runs/deep")[0] == "stopped"


def test_an_experiment_is_compared_not_repeated_and_explained_on_the_days_after_it(
    carry_out, tmp_path
):
    told = {}
    for page in WEEK[4:]:
        for command in commands_of(page):
            told[" ".join(command.words[1:3])] = carry_out(command)
    experiment = told["experiment examples/chaos/sweep.yaml"]
    assert "[1/2] none, seed 0: succeeded" in experiment.stdout
    assert "[2/2] kill, seed 0: succeeded" in experiment.stdout
    assert experiment.stderr == ""
    assert_compared(tmp_path / "results")
    again = carry_out(Command(["elastic", "experiment", "examples/chaos/sweep.yaml"], 0))
    assert "2 of 2 runs are in" in again.stdout
    assert "[" not in again.stdout
    assert "every decision is the same again" in told["replay results/kill-seed0"].stdout
    assert (tmp_path / "report.html").stat().st_size > 100_000


def assert_compared(results: Path) -> None:
    """A kill and no kill: the same weights, and what the kill has cost."""
    with (results / "results.csv").open() as file:
        runs = {row["run"]: row for row in csv.DictReader(file)}
    calm, killed = runs["none-seed0"], runs["kill-seed0"]
    result = read(results / "kill-seed0/result.json")
    assert calm["weights_sha256"] == killed["weights_sha256"] == result["weights_sha256"]
    assert (calm["faults"], killed["faults"], killed["lost_steps"]) == ("0", "1", "0")
    (recovery_s,) = [float(seconds) for seconds in killed["recoveries_s"].split()]
    (recovery,) = result["recoveries"]
    assert recovery_s == pytest.approx(recovery["total_s"], abs=1e-3)
    assert "2 of 2 runs, 2 conditions" in (results / "experiment.html").read_text()


def test_the_examples_train_as_printed(carry_out, tmp_path):
    names = []
    for command in commands_of(EXAMPLES):
        words = command.words
        if BUCKET not in " ".join(words) and words[1] == "run":
            carry_out(command)
            names.append(words[words.index("--name") + 1])
            assert ended(tmp_path / "runs" / names[-1]) == ("succeeded", 20)
    assert names == ["char_lm", "images", "finetune", "sharded", "pipeline"]
    losses = [read(tmp_path / "runs" / n / "result.json")["loss"] for n in ("sharded", "pipeline")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3), "one network, spread in two ways"
    lines = (tmp_path / "runs/images/metrics.jsonl").read_text().splitlines()
    user = [json.loads(line)["user"] for line in lines]
    assert max(u["accuracy"] for u in user if "accuracy" in u) > 0.2, "a tenth is right by chance"


def test_rows_of_a_bucket_are_trained_on_as_printed(carry_out, s3_server):
    bucket, trained = s3_server.new_bucket(), ""
    for words, status in commands_of(EXAMPLES):
        if BUCKET in " ".join(words):
            words = [
                re.sub(f"{BUCKET}(.*)", lambda m: uri(bucket, m[1], s3_server.port), w)
                for w in words
            ]
            trained = carry_out(Command(words, status)).stdout
    assert "succeeded: 20 of 20 steps" in trained


def test_the_notebook_runs_from_top_to_bottom(carry_out, tmp_path):
    cells = read(tmp_path / "examples/notebook.ipynb")["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "cells.py").write_text("\n\n".join(code))
    out = carry_out(Command(["python", "cells.py"], 0)).stdout
    shown = [line for line in out.splitlines() if line.startswith("step ")]
    assert len(shown) == 6
    assert float(shown[-1].split()[2]) < 0.1 * float(shown[0].split()[2])


def ended(run: Path) -> tuple[str, int]:
    result = read(run / "result.json")
    return result["outcome"], result["steps"]


def read(path: Path) -> dict:
    return json.loads(path.read_text())
