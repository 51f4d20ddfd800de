"""Milliseconds per step against a plain torch DDP loop under torchrun, in alternating pairs.

World 2, one thread each; the same model, micro-batches, accumulation, loader process and clipping.
    python -m tests.bench.throughput --pairs 9
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
from tests.bench.torchrun_ddp import WARMUP_STEPS

WORLD = 2


BATCHES = {"long steps": (64, 8), "short steps": (8, 4)}
"""Global and micro-batch: about 180 ms with accumulation, and 20 ms without."""


def torchrun_ms(steps: int, batch: tuple[int, int]) -> float:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--standalone", "--nproc-per-node", str(WORLD)]
    command += ["-m", "tests.bench.torchrun_ddp", "--steps", str(steps)]
    command += ["--global-batch", str(batch[0]), "--micro-batch", str(batch[1])]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), cwd=REPOSITORY, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"torchrun failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])["ms_per_step"]


def elastic_ms(
    storage: Path, name: str, reduction: str, steps: int, batch: tuple[int, int] = (64, 8)
) -> float:
    """Median time from commit to commit: whatever we do between steps counts, too."""
    sizes = {"global_batch": batch[0], "micro_batch": batch[1]}
    options = {**sizes, "clip_norm": 1.0, "reduction": reduction}
    with elastic_run(storage, name, workers=WORLD, steps=steps, **options) as run:
        run.finish(600)
        lines = run.metrics()[WARMUP_STEPS:]
    return 1000 * statistics.median(b["time"] - a["time"] for a, b in pairwise(lines))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    about = machine(WORLD)
    console.print(about)
    results: dict[str, str] = {}
    names = map(str, count())
    with storage_directory() as storage:
        for (name, batch), reduction in product(BATCHES.items(), ("fast", "bitwise")):
            steps = arguments.steps * BATCHES["long steps"][0] // batch[0]
            ours, theirs = alternating(
                arguments.pairs,
                lambda r=reduction, n=steps, b=batch: elastic_ms(storage, next(names), r, n, b),
                lambda n=steps, b=batch: torchrun_ms(n, b),
            )
            ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
            results[f"{reduction}, {name}"] = (
                f"{statistics.median(ratios):.3f} of torchrun "
                f"({statistics.median(ours):.1f} against {statistics.median(theirs):.1f} ms)"
            )
    report("Throughput, median of pairs", list(results), [list(results.values())])
    record("throughput", about=about, setting=f"{arguments.pairs} pairs", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
