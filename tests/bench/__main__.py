"""`make bench`: every benchmark, one after another, in processes of their own."""

import subprocess
import sys

from tests.bench.harness import REPOSITORY, environment

BENCHMARKS = (
    "control_scale",
    "checkpoints",
    "checkpoint_load",
    "worlds",
    "throughput",
    "overhead",
    "fsdp",
    "pipeline",
    "startup",
    "join",
    "recovery",
    "controller_death",
    "fsdp_recovery",
    "feed",
    "feed_wait",
    "feed_regroup",
    "feed_memory",
    "faults",
    "goodput",
    "scripts",
    "looks",
    "clouds",
)


def main() -> int:
    failed = []
    for name in BENCHMARKS:
        command = [sys.executable, "-m", f"tests.bench.{name}", *sys.argv[1:]]
        if subprocess.run(command, env=environment(), cwd=REPOSITORY, check=False).returncode:
            failed.append(name)
    print(
        f"failed: {', '.join(failed)}" if failed else "all done; rows are in tests/bench/RESULTS.md"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
