"""A frozen worker, a hang, and losses at instants that are easy to get wrong: between the vote and
the optimizer's step (with clipping), in a collective, in a regroup."""

import argparse
import sys

from tests.gpu import runs
from tests.gpu.experiment import Table, main

CASES = {
    "frozen": [("stop", "forward", 12)],
    "hangs in the forward": [("hang", "forward", 12)],
    "between vote and step": [("kill", "vote", 8)],
    "in a collective": [("kill", "collective", 8)],
    "in a regroup": [("kill", "forward", 8), ("kill", "regroup", 8)],
    "a GPU that fails": [("gpu", "backward", 8)],
}


def body(table: Table, arguments: argparse.Namespace) -> None:
    how = {"parallel": arguments.parallel, "steps": arguments.steps, "clip_norm": 0.5}
    with runs.place(arguments) as at:
        expected = runs.hash_of(at, "plain", **how)
        for number, (name, faults) in enumerate(CASES.items()):
            if arguments.only not in name:
                continue
            notes = at.ray_temp / f"faults-{number}"
            notes.mkdir()
            given = [f"folder={str(notes)!r}", f"faults={faults!r}"]
            with at.run(f"case-{number}", runs.FAULTY, set=given, **how) as run:
                end = run.finish(runs.SLOW)
            runs.judge_end(table, name, end, expected)
            recoveries = (end["result"] or {}).get("recoveries", [])
            table.at_least(f"{name}: losses seen", len(recoveries), 1)
            table.tell(f"{name}: cause", ", ".join(r["cause"] for r in recoveries))


def options(parser: argparse.ArgumentParser) -> None:
    runs.options(parser)
    parser.add_argument("--parallel", default="fsdp")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", default="", help="a part of a case's name")


if __name__ == "__main__":
    sys.exit(main(body, num_gpus=8, options=options))
