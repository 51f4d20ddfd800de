"""The peer of `recovery.py` and `startup.py`: Ray Train on the same model, tuned as well as we can.

Tuned: health checks every 0.1 s (default 2 s) and a checkpoint every 10 steps (without one it
starts again at step 0). `--elastic` and a short group start timeout were tried: slower here. Prints
one JSON line: fit() to first step, SIGKILL to the next finished step, steps redone.
    python -m tests.bench.ray_train --workers 4 --kill-at 25
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.harness import REPOSITORY, lines_of

CHECKPOINT_EVERY = 10
TUNED = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    "OMP_NUM_THREADS": "1",
}


def train_loop(config: dict[str, Any]) -> None:
    """Runs in each of Ray Train's workers: DDP, accumulation with no_sync, clip, checkpoints."""
    import contextlib

    import torch
    from ray import train
    from ray.train import Checkpoint, get_checkpoint, get_context
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    from tests.bench.torchrun_ddp import batches_of_rank
    from workers.workloads.charlm import CharLM

    torch.set_num_threads(1)
    context = get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    workload = CharLM()
    torch.manual_seed(0)
    module = workload.build_model()
    optimizer = workload.build_optimizer(list(module.parameters()))
    scheduler = workload.build_scheduler(optimizer)
    begin = 0
    checkpoint = get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory) / "state.pt", weights_only=False)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        begin = state["step"]
    model = DistributedDataParallel(module)
    marks = Path(config["marks"])
    (marks / f"pid-{rank}").write_text(str(os.getpid()))
    dataset = workload.dataset()
    plan = list(
        batches_of_rank(
            len(dataset), steps=config["steps"], ids=8, micro_batch=8, rank=rank, world=world
        )
    )
    per_rank = len(plan) // config["steps"]
    batches = iter(DataLoader(dataset, batch_sampler=plan[begin * per_rank :], num_workers=1))
    for step in range(begin, config["steps"]):
        for micro in range(per_rank):
            is_last = micro == per_rank - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                (workload.loss(model, next(batches)) / per_rank).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if rank == 0:
            mark_step(marks, step + 1, world)
        if (step + 1) % CHECKPOINT_EVERY == 0:
            with tempfile.TemporaryDirectory() as directory:
                saved = None
                if rank == 0:
                    state = {
                        "model": module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(),
                        "step": step + 1,
                    }
                    torch.save(state, Path(directory) / "state.pt")
                    saved = Checkpoint.from_directory(directory)
                train.report({"step": step + 1}, checkpoint=saved)


def mark_step(marks: Path, step: int, world: int) -> None:
    """For `figures`: a step is finished, now."""
    with (marks / "steps.jsonl").open("a") as file:
        print(json.dumps({"step": step, "time": time.time(), "world": world}), file=file)


def kill_one(marks: Path, kill_at: int, killed: dict[str, float]) -> None:
    """SIGKILL rank 1's process once `kill_at` steps are finished."""
    while True:
        steps = lines_of(marks / "steps.jsonl")
        if steps and steps[-1]["step"] >= kill_at:
            break
        time.sleep(0.01)
    pid = int((marks / "pid-1").read_text())
    killed["at_step"] = steps[-1]["step"]
    killed["at"] = time.time()
    os.kill(pid, signal.SIGKILL)


def measure(
    loop: Callable[[dict[str, Any]], None],
    *,
    workers: int,
    steps: int,
    kill_at: int,
    is_elastic: bool = False,
    address: str | None = None,
) -> dict[str, Any]:
    """One fit() of Ray Train's with `loop`, in this process; kill_at: 0 kills nobody. address: of
    a cluster; None: Ray is started here."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    scratch = Path(tempfile.mkdtemp(prefix="rt-"))
    own = {"num_cpus": workers + 2, "include_dashboard": False, "_temp_dir": str(scratch / "r")}
    ray.init(
        **({"address": address} if address else own),
        log_to_driver=False,
        runtime_env={"env_vars": {**TUNED, "PYTHONPATH": str(REPOSITORY)}},
    )
    killed: dict[str, float] = {}
    if kill_at:
        arguments = (scratch, kill_at, killed)
        threading.Thread(target=kill_one, args=arguments, daemon=True).start()
    trainer = TorchTrainer(
        loop,
        train_loop_config={"marks": str(scratch), "steps": steps},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=(2, workers) if is_elastic else workers,
            resources_per_worker={"CPU": 1},
            elastic_resize_monitor_interval_s=5 if is_elastic else 60,
        ),
        run_config=RunConfig(
            name="peer",
            storage_path=str(scratch / "storage"),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    fit_at = time.time()
    trainer.fit()
    ended_at = time.time()
    marks = lines_of(scratch / "steps.jsonl")
    ray.shutdown()
    return figures(marks, fit_at, ended_at, killed)


def figures(marks: list[dict[str, Any]], fit_at: float, ended_at: float, killed: dict[str, float]):
    found: dict[str, Any] = {"first_step_at": marks[0]["time"], "fit_s": ended_at - fit_at}
    found["first_step_s"] = marks[0]["time"] - fit_at
    gaps = [b["time"] - a["time"] for a, b in itertools.pairwise(marks)]
    found["median_step_s"] = statistics.median(gaps)
    if killed:
        # A survivor may still finish the step in flight: it begins where the number falls back.
        restarts = [i for i in range(1, len(marks)) if marks[i]["step"] <= marks[i - 1]["step"]]
        resumed = marks[restarts[0]]
        before = marks[restarts[0] - 1]
        found["recovery_s"] = resumed["time"] - killed["at"]
        found["redone_steps"] = before["step"] - resumed["step"] + 1
        caught_up = next(m for m in marks[restarts[0] :] if m["step"] > before["step"])
        found["kill_to_new_step_s"] = caught_up["time"] - killed["at"]
        found["world_after"] = resumed["world"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kill-at", type=int, default=0, help="0: kill nobody")
    parser.add_argument("--elastic", action="store_true", help="(2, workers) instead of fixed")
    parser.add_argument("--set", action="append", default=[], help="another RAY_TRAIN_* NAME=VALUE")
    parser.add_argument("--address", help="of a cluster; left out: Ray is started here")
    arguments = parser.parse_args()
    TUNED.update(item.split("=", 1) for item in arguments.set)
    os.environ.update(TUNED)
    found = measure(
        train_loop,
        workers=arguments.workers,
        steps=arguments.steps,
        kill_at=arguments.kill_at,
        is_elastic=arguments.elastic,
        address=arguments.address,
    )
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
