"""A model that fits over all workers and not over one fewer: one is killed, and its place stays
empty for a while. The run must wait and say why, then go on."""

import argparse
import sys

from tests.gpu import runs
from tests.gpu.experiment import Table, main


def body(table: Table, arguments: argparse.Namespace) -> None:
    size = [f"width={arguments.width}", f"blocks={arguments.blocks}"]
    with runs.place(arguments) as at, at.run(
        "fits", runs.WIDE, parallel="fsdp", reduction="fast", steps=arguments.steps, set=size,
        keep="1", workers=f"1..{arguments.workers}",
    ) as run:  # fmt: skip
        run.wait_for(runs.whole(arguments), runs.SLOW)
        run.wait_for(lambda s: s["step"] >= 10, runs.SLOW)
        run.kill(1)
        waiting = run.wait_for(
            lambda s: "fit" in s["reason"] or s["step"] >= arguments.steps, runs.SLOW
        )
        table.holds("waits and says why", "fit" in waiting["reason"], waiting["reason"][:120])
        end = run.finish(runs.SLOW)
    runs.judge_end(table, "fsdp", end, "")


def options(parser: argparse.ArgumentParser) -> None:
    runs.options(parser)
    parser.add_argument("--width", type=int, default=16384)
    parser.add_argument("--blocks", type=int, default=150, help="choose what fits 8 and not 7")
    parser.add_argument("--steps", type=int, default=60)


if __name__ == "__main__":
    sys.exit(main(body, num_gpus=8, options=options))
