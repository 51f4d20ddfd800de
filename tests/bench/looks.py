"""How long `elastic status` and the first answer of `elastic watch` take on a very long run.

Whole commands, the interpreter's start and all imports included; the run directory is made here.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.bench.harness import REPOSITORY, environment, machine, record, report

PATIENCE_S = 60.0


def make(run: Path, steps: int) -> None:
    """The files of a live run after so many steps."""
    run.mkdir()
    step = (
        '{"step": %d, "time": %.1f, "loss": 1.0, "generation": 1, "world_size": 2, "samples": 1, '
        '"step_s": 0.1, "applied": true, "user": {}}\n'
    )
    decision = (
        '{"at": %.1f, "generation": 1, "step": %d, "phase": "running", "entry": {"type": "Entry", '
        '"commands": [], "reason": "w1 lost"}}\n'
    )
    with (run / "metrics.jsonl").open("w") as metrics, (run / "journal.jsonl").open("w") as journal:
        for n in range(1, steps + 1):
            metrics.write(step % (n, n * 0.1))
            journal.write(decision % (n * 0.1, n))
    status = {
        **{"phase": "running", "generation": 1, "world_size": 2, "step": steps, "steps": steps},
        **{"committed_checkpoint": None, "workers": [], "standby": [], "controller": {}},
        "reason": "all is well",
    }
    (run / "status.json").write_text(json.dumps(status))
    (run / "config.json").write_text(json.dumps({"steps": steps, "detect_s": 10.0}))


def first_answer_s(command: str, run: Path) -> float:
    """Until the first byte on its standard output."""
    begun = time.monotonic()
    words = [sys.executable, "-m", "elastic", command, str(run)]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), cwd=REPOSITORY
    )
    assert process.stdout is not None
    try:
        assert process.stdout.read(1), process.communicate(timeout=PATIENCE_S)[1]
        return time.monotonic() - begun
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--times", type=int, default=9)
    given, about = parser.parse_args(), machine(1)
    with tempfile.TemporaryDirectory(prefix="looks-") as folder:
        run = Path(folder) / "run"
        make(run, given.steps)
        taken = {
            command: [first_answer_s(command, run) for _ in range(given.times)]
            for command in ("status", "watch")
        }
    rows = [(c, f"{median(all_s):.2f} s", f"{max(all_s):.2f} s") for c, all_s in taken.items()]
    report(f"first answer, {given.steps:,} steps", ("command", "median", "worst"), rows)
    record(
        "looks",
        about=about,
        setting=f"{given.steps:,} steps, {given.times} times",
        results={f"elastic {c}": f"{middle}, worst {worst}" for c, middle, worst in rows},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
