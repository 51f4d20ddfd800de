"""Milliseconds per step of `parallel="fsdp"` against a plain FSDP2 loop under torchrun, in pairs.

World 2 (and 4, with fewer pairs), one thread each; about 19 million parameters, the same
micro-batches and clipping; copies to peer memory after no step, or after every one.
    python -m tests.bench.fsdp --pairs 9
"""

import argparse
import json
import statistics
import subprocess
import sys
from itertools import count, pairwise
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

NEVER = 10**6
WHEN = {1: "every step", NEVER: "off"}
KINDS = (
    (2, "fsdp", "fast", NEVER),
    (2, "fsdp", "fast", 1),
    (2, "fsdp", "bitwise", NEVER),
    (2, "fsdp-grad-op", "fast", NEVER),
    (4, "fsdp", "fast", NEVER),
    (4, "fsdp", "fast", 1),
)


def torchrun_ms(world: int, steps: int) -> float:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--standalone", "--nproc-per-node", str(world)]
    command += ["-m", "tests.bench.torchrun_fsdp", "--steps", str(steps)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), cwd=REPOSITORY, timeout=900
    )
    if done.returncode:
        raise RuntimeError(f"torchrun failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])["ms_per_step"]


def elastic_ms(
    storage: Path, name: str, world: int, parallel: str, reduction: str, every: int, steps: int
) -> float:
    """Median time from commit to commit. every: steps between snapshots."""
    options: dict[str, object] = {"snapshot_every": every, "clip_norm": 1.0}
    options |= {"global_batch": 16, "micro_batch": 4, "reduction": reduction}
    with elastic_run(
        storage, name, workers=world, steps=steps, parallel=parallel, set_=MODEL, **options
    ) as run:
        run.finish(900)
        lines = run.metrics()[WARMUP_STEPS:]
    return 1000 * statistics.median(b["time"] - a["time"] for a, b in pairwise(lines))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    about = machine(2)
    console.print(about)
    results: dict[str, str] = {}
    numbers = count()
    with storage_directory() as storage:
        for kind in KINDS:
            world = kind[0]
            ours, theirs = alternating(
                arguments.pairs if world == 2 else -(-arguments.pairs // 3),
                lambda k=kind: elastic_ms(storage, f"f{next(numbers)}", *k, arguments.steps),
                lambda w=world: torchrun_ms(w, arguments.steps),
            )
            ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
            results[f"{kind[1]} {kind[2]}, snapshots {WHEN[kind[3]]}, world {world}"] = (
                f"{statistics.median(ratios):.3f} of torchrun's fsdp "
                f"({statistics.median(ours):.0f} against {statistics.median(theirs):.0f} ms)"
            )
    report("FSDP throughput, median of pairs", list(results), [list(results.values())])
    record("fsdp", about=about, setting=f"{arguments.pairs} pairs", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
