"""SIGKILL of a random one of all workers at random instants, again and again."""

import argparse
import random
import sys
import time

from tests.gpu import runs
from tests.gpu.experiment import Table, main

P50_S, P99_S, LEAK_MIB = 1.0, 3.0, 16.0


def body(table: Table, arguments: argparse.Namespace) -> None:
    how = {"parallel": arguments.parallel, "reduction": arguments.reduction,
           "steps": arguments.steps, "set": [f"sleep={arguments.sleep}"]}  # fmt: skip
    if arguments.clip:
        how["clip_norm"] = 1.0
    name, drawn = f"{arguments.parallel} {arguments.reduction}", random.Random(arguments.seed)
    with runs.place(arguments) as at:
        is_bitwise = arguments.reduction == "bitwise"
        expected = runs.hash_of(at, "plain", **{**how, "set": []}) if is_bitwise else ""
        with at.run("killed", **how) as run:
            first = runs.pids(run.wait_for(runs.whole(arguments), runs.SLOW))
            before = {worker: runs.memory_of(pid) for worker, pid in first.items()}
            for number in range(arguments.kills):
                runs.kill_at_random(run, arguments, drawn)
                if number % 10 == 9:
                    time.sleep(arguments.pause)
            last = runs.pids(run.wait_for(runs.whole(arguments), runs.SLOW))
            kept = {worker: pid for worker, pid in last.items() if worker in first}
            grown = max((runs.memory_of(p) - before[w] for w, p in kept.items()), default=0.0)
            end = run.finish(runs.SLOW)
    runs.judge_end(table, name, end, expected)
    result = end["result"]
    runs.judge_recoveries(table, name, result, P50_S, P99_S)
    is_same = all(first[worker] == pid for worker, pid in kept.items())
    table.holds(f"{name}: survivors keep their processes", is_same)
    extra = len(result["recoveries"]) - arguments.kills
    table.at_most(f"{name}: losses that nobody made", extra, 0)
    table.at_most(f"{name}: device memory per regroup", grown / arguments.kills, LEAK_MIB, "MiB")


def options(parser: argparse.ArgumentParser) -> None:
    runs.options(parser)
    parser.add_argument("--parallel", default="ddp", help="ddp, fsdp or hsdp:4")
    parser.add_argument("--reduction", default="bitwise")
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--kills", type=int, default=20, help="50 take longer than ten minutes")
    parser.add_argument("--pause", type=float, default=60.0, help="seconds, after each tenth")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--sleep", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)


if __name__ == "__main__":
    sys.exit(main(body, num_gpus=8, options=options))
