"""A run through a fault that a person makes between two hosts: what c1 to c4 have in common."""

import argparse
import time

from tests.gpu import runs
from tests.gpu.experiment import Table


def through(
    table: Table, arguments: argparse.Namespace, *, limit_s: float, watched_s: float, **how: object
) -> None:
    """The next step within `limit_s` of the fault, the undisturbed hash, and nobody else lost in
    `watched_s` seconds more."""
    plain = {"steps": arguments.steps, **how}
    with runs.place(arguments) as at:
        expected = runs.hash_of(at, "plain", **plain)
        with at.run("faulted", set=["sleep=0.05"], **plain) as run:
            run.wait_for(runs.whole(arguments), runs.SLOW)
            run.wait_for(lambda s: s["step"] >= 20, runs.SLOW)
            at_s = runs.shell(arguments.fault)
            table.tell("fault", arguments.fault)
            status = run.wait_for(lambda s: s["step"] >= 60, runs.SLOW)
            table.at_most("next step after", runs.first_step_after(run, at_s), limit_s, "s")
            table.tell("why, as status says it", status["reason"][:160])
            runs.shell(arguments.mend)
            before = runs.pids(run.status())
            time.sleep(watched_s)
            after = runs.pids(run.status())
            gone = [w for w in before if w not in after]
            table.at_most(f"lost in {watched_s:g} s more", len(gone), 0)
            end = run.finish(runs.SLOW)
        runs.judge_end(table, "run", end, expected)
