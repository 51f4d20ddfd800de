"""A run that Ray Train itself has begun, and lost, goes on here from its newest checkpoint."""

import inspect
import json

import pytest
from ray.train import Result

from tests.cluster.live import Ended, environment, python
from tests.cluster.test_script import SCRIPT
from tests.scripts import jobs

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]
FAILS = '"sleep_s": 0.0, "raise_at": 4, "raise_times": 99'


def test_a_run_of_ray_train_goes_on(shared_head, ray_temp, tmp_path):
    env = environment(ray_temp) | {"RAY_ADDRESS": shared_head.address}
    functions = inspect.getsource(jobs.raise_until) + inspect.getsource(jobs.learn)
    source = SCRIPT.format(learn=functions)
    script = tmp_path / "train.py"

    def run(settings: str, *command: str) -> Ended:
        script.write_text(source.replace('"sleep_s": float(sys.argv[2])', settings))
        return python(env, *command, script, tmp_path, patience_s=200)

    ended = run(FAILS)
    assert "the script's own" in ended.stderr, ended.stderr[-4000:]
    begun = Result.from_path(tmp_path / "run")
    assert begun.metrics is not None
    assert begun.metrics["epoch"] == 3
    ended = run('"sleep_s": 0.0', "-m", "elastic", "run")
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "epoch 7 returned learned" in ended.stdout
    lines = (tmp_path / "run" / "reports.jsonl").read_text().splitlines()
    epochs = [r["metrics"]["epoch"] for r in map(json.loads, lines) if r["checkpoint"]]
    assert epochs == [4, 5, 6, 7], "what Ray Train has done is not done again"
    found = Result.from_path(tmp_path / "run").best_checkpoints
    assert found is not None
    assert [metrics["epoch"] for _, metrics in found] == [*range(8)]
    shared_head.assert_empty()
