"""Two stages against torch.distributed.pipelining's 1F1B under torchrun, in alternating pairs; what
a step of sleeping blocks takes against the closed form, and with fewer ranks against the plan; what
the user's loss costs on a stage beside its blocks; and what a plan takes.

About 19 million parameters, 8 micro-batches, one thread each. With snapshots every step another
process has a copy of each step, as is the default; else none is made in the steps measured.
    python -m tests.bench.pipeline --pairs 9 [--only throughput,peer,closed,losses,loss,plan,memory]
A SIGKILL of a rank: `python -m tests.bench.fsdp_recovery --parallel pp:2`, and of one pipeline of
four `--parallel pp:4`; nothing is saved to storage there.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic.protocol.pipeline import PipelinePlan, plan_pipeline
from elastic.protocol.rank_order import Holding, order_ranks
from elastic.protocol.schedule import SCHEDULES
from tests.bench.harness import (
    POLL_S,
    REPOSITORY,
    console,
    elastic_run,
    end,
    environment,
    lines_of,
    machine,
    record,
    report,
    storage_directory,
)
from tests.bench.stage_memory import peaks
from tests.bench.torchrun_fsdp import MODEL, WARMUP_STEPS
from tests.workers.test_pipeline_bubble import CASE, Sleeper, closed_form_s, step_s
from workers.parallel.pipeline.chain import find_chain
from workers.parallel.pipeline.stage import StageModel
from workers.workloads.charlm import CharLM

WORLD = 2
GLOBAL_BATCH, MICRO_BATCH = 32, 4
LOSS_RUNS, PEERS_PATIENCE_S = 50, 600.0
OURS = {
    "fast": ("fast", 1000),
    "bitwise": ("bitwise", 1000),
    "bitwise, snapshots every step": ("bitwise", 1),
}
"""Reduction, and after how many steps another process gets a copy of the state."""


def torchrun_ms(steps: int) -> float:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--standalone", "--nproc-per-node", str(WORLD)]
    command += ["-m", "tests.bench.torchrun_pp", "--steps", str(steps)]
    command += ["--global-batch", str(GLOBAL_BATCH), "--micro-batch", str(MICRO_BATCH)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), cwd=REPOSITORY, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"torchrun failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])["ms_per_step"]


def elastic_ms(storage: Path, name: str, steps: int, reduction: str, snapshot_every: int) -> float:
    """Median time from commit to commit: whatever we do between steps counts, too."""
    options = {
        "global_batch": GLOBAL_BATCH,
        "micro_batch": MICRO_BATCH,
        "clip_norm": 1.0,
        "parallel": f"pp:{WORLD}",
        "reduction": reduction,
        "snapshot_every": snapshot_every,
    }
    with elastic_run(storage, name, workers=WORLD, steps=steps, set_=MODEL, **options) as run:
        run.finish(900)
        lines = run.metrics()[WARMUP_STEPS:]
    return 1000 * statistics.median(b["time"] - a["time"] for a, b in pairwise(lines))


def throughput(rounds: int, steps: int) -> dict[str, str]:
    """Each round has every variant of ours and torchrun once, another one first, so that the
    machine's drift hits all of them."""
    names = map(str, count())
    took: dict[str, list[float]] = {name: [] for name in (*OURS, "torchrun")}
    with storage_directory() as storage:
        for number in range(rounds):
            first = number % len(took)
            for name in [*took, *took][first : first + len(took)]:
                if name in OURS:
                    ms = elastic_ms(storage, next(names), steps, *OURS[name])
                else:
                    ms = torchrun_ms(steps)
                took[name].append(ms)
            found = ", ".join(f"{name} {times[-1]:.0f} ms" for name, times in took.items())
            console.print(f"round {number + 1}/{rounds}: {found}")
    theirs = took["torchrun"]
    return {
        name: f"{statistics.median(b / a for a, b in zip(took[name], theirs, strict=True)):.3f} of "
        f"torchrun ({statistics.median(took[name]):.0f} against {statistics.median(theirs):.0f} ms)"
        for name in OURS
    }


def peers_kill(world: int = 4, kill_at: int = 15) -> dict[str, str]:
    """SIGKILL of a rank of torch's pipeline of four under torchrun, which starts all of them again
    from the newest of the checkpoints of every tenth step: to the first step that had not been
    done, less a median one.

    torchrun's ranks find each other in its own store, which keeps the addresses of those of the
    first start; the variable makes them have one of their own, else they never meet again.
    """
    with storage_directory() as storage:
        command = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
        command += ["--nproc-per-node", str(world), "--max-restarts", "1"]
        command += ["-m", "tests.bench.torchrun_pp", "--steps", str(kill_at + 10)]
        command += ["--global-batch", "16", "--micro-batch", "2", "--place", str(storage)]
        variables = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (storage / "log").open("w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=variables, cwd=REPOSITORY, text=True
            )
        try:
            peers_lines(storage, process, lambda line: line["step"] >= kill_at)
            killed_at = time.time()
            os.kill(int((storage / "rank-1").read_text()), signal.SIGKILL)
            lines = peers_lines(storage, process, lambda line: line["start"] == 1)
            before = [line for line in lines if line["start"] == 0]
            done = before[-1]["step"]
            lines = peers_lines(storage, process, lambda e: e["start"] == 1 and e["step"] > done)
        finally:
            end(process)
    step_s = statistics.median(b["time"] - a["time"] for a, b in pairwise(before))
    again = [line for line in lines if line["start"] == 1]
    new = next(line for line in again if line["step"] > done)
    redone = sum(line["step"] <= done for line in again)
    seconds = new["time"] - killed_at - step_s
    return {
        "torchrun's restart after a SIGKILL": f"{seconds:.1f} s to the next step "
        f"(a median one of {step_s:.2f} s less), {redone} steps redone"
    }


def peers_lines(
    storage: Path, process: subprocess.Popen[str], is_there: Callable[[dict], bool]
) -> list[dict]:
    """All of its steps' lines, once there is such a one."""
    deadline = time.monotonic() + PEERS_PATIENCE_S
    while time.monotonic() < deadline:
        lines = lines_of(storage / "steps.jsonl")
        if any(map(is_there, lines)):
            return lines
        if process.poll() is not None:
            raise RuntimeError(f"torchrun failed: {(storage / 'log').read_text()[-2000:]}")
        time.sleep(POLL_S)
    log = (storage / "log").read_text()[-2000:]
    raise TimeoutError(f"not there after {PEERS_PATIENCE_S} s: {log}")


def closed_forms() -> dict[str, str]:
    results: dict[str, str] = {}
    for depth, num_microbatches, schedule in product((2, 4), (4, 8, 16), SCHEDULES):
        took_s, expected_s = (
            step_s(depth, schedule, num_microbatches),
            closed_form_s(depth, num_microbatches, schedule),
        )
        name = f"p {depth}, m {num_microbatches}, {schedule}"
        results[name] = f"{took_s / expected_s:.3f} of the closed form ({took_s:.3f} s)"
        console.print(f"{name}: {results[name]}")
    return results


def after_losses() -> dict[str, str]:
    """Twelve blocks that sleep, 16 micro-batches: the throughput of what is left of 8 and of 4
    ranks, as a share of that of all; nobody takes the place of the lost."""
    case = replace(CASE, build=lambda: nn.Sequential(*(Sleeper() for _ in range(12))))
    results: dict[str, str] = {}
    for whole, left in ((8, (7, 6, 5)), (4, (3,))):
        full_s = step_s(2, "", 16, whole, case)
        full = plan_pipeline(2, whole, (1,) * 12, 16)
        for num_ranks in left:
            share = full_s / step_s(2, "", 16, num_ranks, case)
            planned = full.time / plan_pipeline(2, num_ranks, (1,) * 12, 16).time
            results[f"{num_ranks} of {whole}"] = f"{share:.3f} (plan {planned:.3f})"
    return results


def cost_of_a_loss() -> dict[str, str]:
    """Of CharLM's loss on a stage of one of six blocks, which computes nothing here: what is left
    is the other stages' part."""
    torch.set_num_threads(1)
    workload = CharLM(**MODEL)
    model, dataset = workload.build_model(), workload.dataset()
    rows = [dataset[i] for i in range(MICRO_BATCH)]
    batch = [torch.stack(part) for part in zip(*rows, strict=True)]
    chain = find_chain(model, workload, lambda: workload.loss(model, batch))
    stage = StageModel(model, chain, range(2, 3))
    arrived = torch.randn(MICRO_BATCH, batch[0].shape[1], MODEL["width"])
    model.get_submodule(chain.names[2]).forward = lambda x: x

    def step() -> None:
        stage.begin_step()
        for _ in range(num_microbatches):
            stage.begin(lambda like: [arrived], lambda sent: None)
            workload.loss(model, batch)
            stage.end()

    num_microbatches = GLOBAL_BATCH // MICRO_BATCH
    took = [median_ms(step) / num_microbatches for _ in range(3)]
    return {
        "the user's loss on a stage": f"{statistics.median(took):.2f} ms per micro-batch beside "
        f"its blocks, of {num_microbatches} a step"
    }


def median_ms(run: Callable[[], Any]) -> float:
    """CPU time."""
    found: list[float] = []
    for _ in range(LOSS_RUNS):
        began = time.process_time()
        run()
        found.append(1000 * (time.process_time() - began))
    return statistics.median(found[LOSS_RUNS // 5 :])


def cost_of_a_plan() -> dict[str, str]:
    """Of 10,000 ranks: a plan, and with it their order, where one is lost, or half are newcomers;
    on nodes of eight, and where all are on one."""
    dice = random.Random(0)
    costs = tuple(dice.randint(10**9, 10**12) for _ in range(200))
    sizes = {(block,): cost // 1000 for block, cost in enumerate(costs)}
    found: dict[str, list[str]] = {}

    def note(name: str, wanted: int, run: Callable[[], Any]) -> None:
        found.setdefault(name, []).append(f"pp:{wanted} {median_ms(run):.1f} ms")

    for wanted in (2, 4, 8, 16):
        make = partial(plan_pipeline, wanted, costs=costs, num_microbatches=20_000)
        note("plan of 10,000 ranks, 200 blocks", wanted, partial(make, 10_000))
        for before, after, per_node in ((10_000, 9_999, 8), (5_000, 10_000, 8), (10_000, 9_999, 0)):
            ranks = changed(make(before), after, per_node or before)
            both = lambda n=after, r=ranks, plan=make: order_ranks(plan(n), r, sizes)  # noqa: E731
            where = f"{per_node} on a node" if per_node else "on one node"
            note(f"plan and order, {before:,} ranks become {after:,}, {where}", wanted, both)
    return {name: ", ".join(of_each) for name, of_each in found.items()} | moved_shares()


def changed(old: PipelinePlan, after: int, per_node: int = 1000, lost: int = 0) -> list[Holding]:
    """What `after` ranks have: those from the `lost` one on are gone, or newcomers are behind."""
    places = old.places()
    ranks = [Holding(str(at // per_node), places[at], at) for at in range(old.num_ranks)]
    del ranks[lost : lost + max(0, old.num_ranks - after)]
    return ranks + [Holding(str(at // per_node)) for at in range(len(ranks), after)]


def moved_shares() -> dict[str, str]:
    """Of the state, on one node, of twelve equal blocks and 16 micro-batches."""
    sizes, results = {(block,): 1 for block in range(12)}, dict[str, str]()
    cases = [(2, 8, 7, lost) for lost in (0, 3, 7)] + [(4, 4, 3, 1), (4, 3, 4, 0)]
    for depth, before, after, lost in cases:
        old, plan = (plan_pipeline(depth, size, (1,) * 12, 16) for size in (before, after))
        ranks, places = changed(old, after, lost=lost), plan.places()

        def share(order: Sequence[int], ranks: Any = ranks, places: Any = places) -> str:
            pairs = zip(ranks, order, strict=True)
            return f"{sum(len({*places[at]} - {*has.blocks}) for has, at in pairs) / 12:.2f}"

        what = f"rank {lost} of {before} lost" if after < before else f"one joins {before} ranks"
        found, plain = share(order_ranks(plan, ranks, sizes)), share(range(after))
        results[f"pp:{depth}, {what}: moved"] = f"{found} of the state, {plain} in rank order"
    return results


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--only", default="throughput,closed,losses,loss,plan")
    parser.add_argument("--steps", type=int, default=15)
    arguments = parser.parse_args()
    about = machine(WORLD)
    console.print(about)
    parts: dict[str, Callable[[], dict[str, str]]] = {
        "throughput": lambda: throughput(arguments.pairs, arguments.steps),
        "peer": peers_kill,
        "closed": closed_forms,
        "losses": after_losses,
        "loss": cost_of_a_loss,
        "plan": cost_of_a_plan,
        "memory": peaks,
    }
    results: dict[str, str] = {}
    for name in arguments.only.split(","):
        results |= parts[name]()
    report("Pipelines, median of pairs", ["measure", "result"], [list(r) for r in results.items()])
    record("pipeline", about=about, setting=f"{arguments.pairs} pairs", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
