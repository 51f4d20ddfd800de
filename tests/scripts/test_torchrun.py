"""A script that torchrun starts, on real workers: one is killed, and the weights are those of plain
torch."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic.protocol.errors import WrongInput
from elastic.torchrun import request_of
from tests.scripts import torchrun_job
from tests.scripts.local_run import LocalRun
from workers.distributed.process_group import Alone
from workers.script_loop import ScriptLoop
from workers.scripts.default_group import DefaultGroup, as_default
from workers.scripts.in_place.course import Course
from workers.scripts.in_place.trial import Nobody
from workers.scripts.torchrun import ScriptExited, Torchrun, started_by_torchrun

JOB = torchrun_job.__file__
ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


def started(place: Path, *arguments: str, max_restarts: int = 0) -> LocalRun:
    """Three workers, which go on with two."""
    place.mkdir()
    loop = ScriptLoop(
        function=Torchrun(JOB, arguments, str(place)),
        place=str(place),
        name=place.name,
        max_failures=max_restarts,
        installed=started_by_torchrun,
    )
    run = LocalRun(loop, place, 3, least=2)
    run.can_replace = False
    return run.start()


def epochs(place: Path) -> list[dict[str, Any]]:
    file = place / "epochs.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def weights(place: Path) -> torch.Tensor:
    return torch.load(place / "state.pt")["model"]["weight"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Of the script by itself, over torch's own process group."""
    place = tmp_path_factory.mktemp("plain")
    command = [sys.executable, JOB]
    subprocess.run(command, cwd=place, env={**os.environ, **ALONE}, check=True, timeout=120)
    return weights(place)


def test_after_the_loss_of_rank_0_it_is_run_again_in_the_same_processes(plain, tmp_path):
    place = tmp_path / "run"
    run = started(place, "--sleep-s", "0.05")
    deadline = time.monotonic() + 90
    while not (done := epochs(place)):
        assert time.monotonic() < deadline, run.decisions
        time.sleep(0.01)  # polling, bounded by the deadline
    run.kill(run.members[0])
    assert run.wait() == "succeeded", run.failure
    assert torch.equal(weights(place), plain)
    found = epochs(place)
    assert [line["epoch"] for line in found] == list(range(6)), "its own file was gone on from"
    assert found[-1]["pids"] == done[0]["pids"][1:], "no process was started"
    assert found[-1]["restarts"] == 1


def test_a_status_that_is_not_0_is_a_failure_and_restarts_are_counted(plain, tmp_path):
    place = tmp_path / "run"
    assert started(place, "--fail-at", "2", max_restarts=1).wait() == "succeeded"
    assert torch.equal(weights(place), plain)
    run = started(tmp_path / "too_often", "--fail-at", "2")
    assert run.wait() == "failed"
    assert "the script called sys.exit(3)" in run.failure


@pytest.mark.slow
def test_a_script_that_cannot_be_called_twice_is_told_so(tmp_path):
    """What it does once, a second call in the same process does again."""
    place = tmp_path / "run"
    run = started(place, "--sleep-s", "0.05", "--only-once")
    deadline = time.monotonic() + 90
    while not epochs(place):
        assert time.monotonic() < deadline, run.decisions
        time.sleep(0.01)  # polling, bounded by the deadline
    run.kill(run.members[0])
    assert run.wait() == "failed"
    assert "cannot be called twice in one process: RuntimeError: Tried to" in run.failure


# --- in this process ------------------------------------------------------------------------
def call_of(world_size: int) -> Any:
    place = SimpleNamespace(world_size=world_size)
    return SimpleNamespace(
        group=DefaultGroup(Alone("run/torchrun")), device=torch.device("cpu"), place=place
    )


def run_here(tmp_path: Path, source: str, world_size: int = 1, *arguments: str) -> None:
    (tmp_path / "script.py").write_text(source)
    call = call_of(world_size)
    with as_default(call.group), started_by_torchrun(call):
        Torchrun(str(tmp_path / "script.py"), arguments, str(tmp_path))()


def test_a_script_has_its_rank_from_the_environment():
    """So rank 0's loss has it called again, unless it asks for its rank while it trains."""
    call = call_of(1)
    course = call.group.course = Course("torchrun", call.group, Nobody())
    assert not course.stand().keeps_rank
    with as_default(call.group), started_by_torchrun(call):
        assert course.stand().keeps_rank


def test_it_is_run_as_main_with_its_arguments_in_the_directory_of_the_command(tmp_path):
    run_here(
        tmp_path,
        "import sys, pathlib, os\nassert __name__ == '__main__'\n"
        "assert sys.modules['__main__'].__file__ == __file__\n"
        "pathlib.Path('seen').write_text(' '.join(sys.argv[1:]))\n",
        1,
        "--lr",
        "0.1",
    )
    assert (tmp_path / "seen").read_text() == "--lr 0.1"


def test_its_process_group_is_ours_until_it_destroys_it(tmp_path):
    run_here(
        tmp_path,
        "import torch.distributed as dist\n"
        "from torch.distributed import distributed_c10d\n"
        "assert not dist.is_initialized()\n"
        "dist.init_process_group(backend='gloo', rank=0, world_size=1)\n"
        "assert dist.is_initialized() and dist.get_world_size() == 1\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
        "assert not dist.is_initialized()\n"
        "distributed_c10d.init_process_group()\n",
    )
    assert not dist.is_initialized()
    assert dist.init_process_group.__module__.startswith("torch.")


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("world_size=2, rank=0", "this process is rank 0 of 1"),
        ("'nccl'", "have CPUs only"),
        ("); dist.init_process_group(", "twice"),
    ],
)
def test_another_group_than_the_run_has_is_refused(tmp_path, asked, why):
    script = f"import torch.distributed as dist\ndist.init_process_group({asked})\n"
    with pytest.raises(ValueError, match=why):
        run_here(tmp_path, script)


def test_a_script_that_shares_nothing_is_told_so(tmp_path):
    run_here(tmp_path, "x = 1\n")
    with pytest.raises(WrongInput, match="the script ran 3 times without a process group"):
        run_here(tmp_path, "x = 1\n", 3)


def test_how_it_exits(tmp_path):
    run_here(tmp_path, "raise SystemExit\n")
    run_here(tmp_path, "import sys; sys.exit(0)\n")
    with pytest.raises(ScriptExited, match="'no data'"):
        run_here(tmp_path, "import sys; sys.exit('no data')\n")


# --- torchrun's options -----------------------------------------------------------------------
def asked(*words: str) -> Any:
    return request_of([*words, "train.py", "--nnodes", "of the script"])


def test_options_of_torchrun_that_have_a_meaning():
    found = asked("--nnodes=2", "--nproc-per-node", "4", "--max-restarts", "3")
    assert (found.workers, found.is_range, found.max_restarts) == ((4, 8), False, 3)
    assert found.arguments == ("--nnodes", "of the script")
    assert found.notes == ()
    found = asked("--nnodes=1:3", "--nproc_per_node=2", "--standalone")
    assert (found.workers, found.is_range, found.notes) == ((2, 6), True, ())
    assert request_of(["-m", "pkg.train"]).is_module
    found = asked("--nproc-per-node=cpu", "--log-dir", "logs", "--rdzv-id=mine")
    assert (found.device, found.name, Path(found.storage).name) == ("cpu", "mine", "logs")
    levels = [asked(), asked("--script-level", "1"), asked("--script-level=0")]
    assert [each.goes_in_place for each in levels] == [True, True, False]


def test_options_that_have_no_effect_are_told():
    found = asked("--master-port", "1234", "--rdzv_backend=c10d")
    assert found.notes == (
        "--rdzv-backend has no effect: the cluster is Ray's",
        "--master-port has no effect: the cluster is Ray's",
    )
    assert asked("--numa-binding", "node").notes == ()
    said = "--numa-binding socket has no effect: it is `node` on machines with GPUs"
    assert asked("--numa-binding=socket").notes == (said,)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--no-python"], "elastic runs Python scripts"),
        (["--nnodes", "x"], "elastic torchrun: "),
        (["--nnodes", "3:2"], "make no workers"),
        (["--nproc-per-node", "many"], "Unsupported nproc_per_node value"),
        (["--wrong"], "see `elastic torchrun --help`"),
        (["--max-restarts", "-1"], "at least 0"),
        (["--script-level", "2"], "--script-level must be 0 or 1, got '2'"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(words, why):
    with pytest.raises(WrongInput, match=why) as found:
        asked(*words)
    assert "\n" not in str(found.value)


def test_without_a_script_nothing_runs():
    with pytest.raises(WrongInput, match="training_script"):
        request_of([])
