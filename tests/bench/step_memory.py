"""Bytes per parameter at the peak of a step: ddp with clipping, AdamW, fp32, two workers, each with
four micro-batches. What the process holds at most above what it held before the model was built.

    python -m tests.bench.step_memory
"""

import sys
from pathlib import Path

from tests.bench.harness import (
    console,
    elastic_run,
    machine,
    record,
    report,
    storage_directory,
)
from tests.bench.wide import LAYERS, WIDTH

WORLD, STEPS = 2, 8


def bytes_per_parameter(storage: Path, reduction: str) -> float:
    """The higher of the workers'."""
    notes = storage / f"notes-{reduction}"
    notes.mkdir()
    options = {"global_batch": 8, "micro_batch": 1, "clip_norm": 1.0, "reduction": reduction}
    target, setting = "tests.bench.wide:Wide", {"notes": repr(str(notes))}
    made = elastic_run(
        storage, reduction, target=target, workers=WORLD, steps=STEPS, set_=setting, **options
    )
    with made as run:
        run.finish(600)
    found = [float(file.read_text()) for file in notes.iterdir()]
    assert len(found) == WORLD, found
    return max(found)


def main() -> int:
    about = machine(WORLD)
    console.print(about)
    with storage_directory() as storage:
        results = {
            reduction: f"{bytes_per_parameter(storage, reduction):.1f} B/parameter"
            for reduction in ("fast", "bitwise")
        }
    report("Peak of a step", list(results), [list(results.values())])
    record("step_memory", about=about, setting=f"{LAYERS} layers of {WIDTH}", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
