"""Two stages against torch.distributed.pipelining's 1F1B under torchrun, in alternating pairs; and
what a step of sleeping blocks takes against the closed form.

About 19 million parameters, 8 micro-batches, one thread each. `every step` keeps copies of each
step in another process, as is the default; `none` keeps none in the steps that are measured.
    python -m tests.bench.pipeline --pairs 9
A SIGKILL of a rank: `python -m tests.bench.fsdp_recovery --parallel pp:2`.
"""

import argparse
import json
import statistics
import subprocess
import sys
from itertools import count, pairwise, product
from pathlib import Path

from tests.bench.harness import (
    REPOSITORY,
    alternating,
    console,
    elastic_run,
    environment,
    machine,
    record,
    report,
    storage_directory,
)
from tests.bench.torchrun_fsdp import MODEL, WARMUP_STEPS
from tests.workers.test_pipeline_bubble import closed_form_s, step_s

WORLD = 2
GLOBAL_BATCH, MICRO_BATCH = 32, 4
SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B")
SNAPSHOTS = {"every step": 1, "none": 1000}


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


def elastic_ms(storage: Path, name: str, snapshot_every: int, steps: int) -> float:
    """Median time from commit to commit: whatever we do between steps counts, too."""
    options = {
        "global_batch": GLOBAL_BATCH,
        "micro_batch": MICRO_BATCH,
        "clip_norm": 1.0,
        "parallel": f"pp:{WORLD}",
        "snapshot_every": snapshot_every,
    }
    with elastic_run(storage, name, workers=WORLD, steps=steps, set_=MODEL, **options) as run:
        run.finish(900)
        lines = run.metrics()[WARMUP_STEPS:]
    return 1000 * statistics.median(b["time"] - a["time"] for a, b in pairwise(lines))


def throughput(pairs: int, steps: int) -> dict[str, str]:
    results: dict[str, str] = {}
    names = map(str, count())
    with storage_directory() as storage:
        for word, every in SNAPSHOTS.items():
            ours, theirs = alternating(
                pairs,
                lambda n=every: elastic_ms(storage, next(names), n, steps),
                lambda: torchrun_ms(steps),
            )
            ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
            results[f"snapshots {word}"] = (
                f"{statistics.median(ratios):.3f} of torchrun "
                f"({statistics.median(ours):.1f} against {statistics.median(theirs):.1f} ms)"
            )
    return results


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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=9, help="0: only sleeping blocks")
    parser.add_argument("--steps", type=int, default=15)
    arguments = parser.parse_args()
    about = machine(WORLD)
    console.print(about)
    results = throughput(arguments.pairs, arguments.steps) if arguments.pairs else {}
    results |= closed_forms()
    report("Pipelines, median of pairs", list(results), [list(results.values())])
    record("pipeline", about=about, setting=f"{arguments.pairs} pairs", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
