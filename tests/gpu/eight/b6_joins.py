"""One worker leaves by a notice, and a newcomer joins: how long does the run pause?"""

import argparse
import signal
import sys

from tests.gpu import runs
from tests.gpu.experiment import Table, main, median

PAUSE_S = 0.5


def body(table: Table, arguments: argparse.Namespace) -> None:
    size = [f"width={arguments.width}", f"blocks={arguments.blocks}"]
    with runs.place(arguments) as at, at.run(
        "joins", runs.WIDE, parallel=arguments.parallel, steps=arguments.steps, set=size,
        reduction="fast", keep="1",
    ) as run:  # fmt: skip
        run.wait_for(runs.whole(arguments), runs.SLOW)
        run.wait_for(lambda s: s["step"] >= 10, runs.SLOW)
        runs.send(run, 1, signal.SIGTERM)
        run.wait_for(lambda s: s["world_size"] < arguments.workers, runs.SLOW)
        run.wait_for(runs.whole(arguments), runs.SLOW)
        end = run.finish(runs.SLOW)
        times = [line["step_s"] for line in run.lines("metrics.jsonl")]
        gap = runs.longest_gap(run)
    runs.judge_end(table, arguments.parallel, end, "")
    usual = median(times)
    table.at_most("longest pause, less a step", gap - usual, usual + PAUSE_S, "s")
    table.tell("a step", f"{usual:.3f} s")


def options(parser: argparse.ArgumentParser) -> None:
    runs.options(parser)
    parser.add_argument("--parallel", default="ddp", help="ddp with 1 B parameters, fsdp with 8 B")
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--blocks", type=int, default=15, help="120 with width 8192 are 8 B")
    parser.add_argument("--steps", type=int, default=300)


if __name__ == "__main__":
    sys.exit(main(body, num_gpus=8, options=options))
