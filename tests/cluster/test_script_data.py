"""A script over Ray Data, as it is, one of whose ranks is killed in the middle of a pass."""

import json
import os
import signal
import time
from random import Random

import pytest
import torch

from elastic.data.rounds import LocalShuffle
from tests.cluster.live import begin, environment
from tests.cluster.processes import about, parent, running
from tests.scripts import dataset_job, rows_job
from tests.scripts.dataset_job import BUFFER, PASSES, RANKS, SEED

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
PATIENCE_S = 120.0


@pytest.mark.parametrize(
    ("rows", "kills"), [(250, 1), pytest.param(2500, 20, marks=pytest.mark.slow)]
)
def test_each_row_is_used_once_in_each_pass_though_ranks_are_killed(
    shared_head, fork_server, ray_temp, tmp_path, rows, kills
):
    command = ("-m", "elastic", "run", dataset_job.__file__, tmp_path, rows, 0.05)
    env = environment(ray_temp) | {"RAY_ADDRESS": shared_head.address}

    def reports() -> list[dict]:
        file = tmp_path / "run" / "reports.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    process = begin(env, *command)
    done, random = list[dict](), Random(0)
    for kill in range(kills):
        num, deadline = len(done), time.monotonic() + PATIENCE_S
        while len(done := reports()) == num:
            assert time.monotonic() < deadline, process.communicate(timeout=5)
            time.sleep(0.02)  # polling, bounded by the deadline
        if kill % 5 == 4:
            end_feed(fork_server.pid)
        os.kill(random.choice(done[-1]["metrics"]["pids"][1:]), signal.SIGKILL)
    assert done[-1]["metrics"]["pass"] < PASSES - 1 or kills > 1, "in the middle of its first pass"
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, f"used {PASSES * rows}" in out) == (0, True), (out, err)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    num = len(result["recoveries"])
    assert (result["level"], 1 <= num <= kills) == (0, True), "two losses may be one recovery"
    newest = reports()[-1]["checkpoint"]
    found = torch.load(tmp_path / "run" / newest / "state.pt")
    assert found["counts"].eq(PASSES).all()
    shuffle = LocalShuffle(BUFFER * RANKS, SEED, 0, lambda row: rows if row > rows else None)
    assert found["orders"][0] == shuffle.rows(range(rows)).tolist(), "as without a loss"
    assert [len(set(order)) for order in found["orders"]] == [rows] * PASSES
    shared_head.assert_empty()


@pytest.mark.slow
def test_at_level_1_the_rows_of_a_killed_rank_are_dealt_again_in_place(
    shared_head, fork_server, ray_temp, tmp_path
):
    rows = 400
    command = ("-m", "elastic", "run", rows_job.__file__, tmp_path, rows, 0.05)
    env = environment(ray_temp) | {"RAY_ADDRESS": shared_head.address}
    process = begin(env, *command)
    told, deadline = tmp_path / "pids-0.json", time.monotonic() + PATIENCE_S
    while not told.exists() or not told.read_text():
        assert time.monotonic() < deadline, process.communicate(timeout=5)
        time.sleep(0.02)  # polling, bounded by the deadline
    os.kill(json.loads(told.read_text())[1], signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, (out, err)
    uses = [json.loads(file.read_text()) for file in tmp_path.glob("uses-*.json")]
    assert uses == [[rows_job.PASSES] * rows] * 2
    assert "goes on in place with 2 of 3 ranks" in out + err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["level"], len(result["recoveries"])) == (1, 1)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["samples"] == rows_job.PASSES * rows
    steps = -(-rows // (rows_job.BATCH * rows_job.RANKS))
    assert len(lines) == rows_job.PASSES * steps, "as many as without a loss"
    shared_head.assert_empty()


def end_feed(server: int) -> None:
    """The process that executes the data sets dies, too: the one that this fork server, or one that
    it has forked, has started. Others of this machine may have one as well."""
    found = [pid for pid in running() if about(pid, "cmdline").startswith(b"ray::PassesActor")]
    (feed,) = (pid for pid in found if server in (parent(pid), parent(parent(pid))))
    os.kill(feed, signal.SIGKILL)
