"""What a copy of all shards in peer memory after every step costs a step of fsdp."""

import argparse
import sys

from tests.gpu import runs
from tests.gpu.experiment import Table, main, median

MAX_SLOWER, WARM = 0.05, 10


def body(table: Table, arguments: argparse.Namespace) -> None:
    size = [f"width={arguments.width}", f"blocks={arguments.blocks}"]
    found = dict[str, list[float]](every=[], never=[])
    with runs.place(arguments) as at:
        for number in range(arguments.pairs):
            for name, each in (("every", 1), ("never", 10**6)):
                with at.run(
                    f"{name}-{number}", runs.WIDE, parallel="fsdp", reduction="fast",
                    steps=arguments.steps, snapshot_every=each, set=size, keep="1",
                ) as run:  # fmt: skip
                    end = run.finish(runs.SLOW)
                    assert end["status"] == 0, end["err"]
                    times = [line["step_s"] for line in run.lines("metrics.jsonl")][WARM:]
                found[name].append(median(times))
    slower = median([a / b for a, b in zip(found["every"], found["never"], strict=True)]) - 1
    table.at_most("a step with peer memory is slower by", slower, MAX_SLOWER)
    table.tell("a step without", f"{median(found['never']):.3f} s")


def options(parser: argparse.ArgumentParser) -> None:
    runs.options(parser)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--blocks", type=int, default=120, help="with width 8192: 8 B parameters")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=1)


if __name__ == "__main__":
    sys.exit(main(body, num_gpus=8, options=options))
