"""Ray leaves CUDA_VISIBLE_DEVICES alone: each worker uses the GPU that Ray gave it all the same."""

import argparse
import os
import sys

from tests.gpu import runs
from tests.gpu.experiment import Table, main


def body(table: Table, arguments: argparse.Namespace) -> None:
    os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    with runs.place(arguments) as at:
        run = at.run("which", steps=30, set=["sleep=0.05"])
        run.env |= {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        with run:
            status = run.wait_for(runs.whole(arguments), runs.SLOW)
            names = [w["device"] for w in status["workers"]]
            end = run.finish(runs.SLOW)
    runs.judge_end(table, "run", end, "")
    table.at_most("workers that share a GPU", len(names) - len(set(names)), 0)
    for name in sorted(set(names)):
        table.tell("GPU", name)


if __name__ == "__main__":
    sys.exit(main(body, num_gpus=8, options=runs.options))
