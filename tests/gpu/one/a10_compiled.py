"""`model.compile()` under bitwise: three processes have one hash, also with two ranks and a regroup
in between; or what cannot is refused by name."""

import argparse
import os
import subprocess
import sys
from typing import Any

from tests.gpu.experiment import Table, main
from tests.gpu.groups import HAS_GPU

MODES = ("default", "reduce-overhead", "max-autotune")
STEPS = 3


def trained(mode: str, members: list[int], those: Any) -> str:
    """The hash after STEPS steps of some ranks, and as many of the first one alone."""
    from tests.gpu.groups import Member
    from tests.workers import sharded_rig as rig
    from tests.workers import where
    from workers.distributed.process_group import Alone
    from workers.health import gpu

    where.go_to("cuda" if HAS_GPU else "cpu")
    if HAS_GPU:
        gpu.make_deterministic()

    class Work(rig.Dense):
        def build_model(self):
            model = super().build_model()
            model.compile(**({} if mode == "default" else {"mode": mode}))
            return model

    member = None if those is None else Member(those, is_shared=True)
    group = Alone() if member is None or len(members) == 1 else member.form(1, members)
    strategy = rig.build("ddp", "bitwise", Work(), clip_norm=None)
    rig.train(strategy, group, "ddp", STEPS, work=Work())
    if member is None or member.index == 0:
        rig.train(strategy, Alone(), "ddp", STEPS, work=Work())
    return rig.sha256(strategy)


def alone(mode: str) -> None:
    """In a process of its own."""
    try:
        print("hash:", trained(mode, [0], None))
    except Exception as error:
        print("refused:", str(error).splitlines()[0])


def of_two(mode: str) -> str:
    from tests.workers.ranks import run_ranks

    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # ranks are daemons, and have no children
    return run_ranks(2, lambda those: trained(mode, [0, 1], those))[0]


def body(table: Table, arguments: argparse.Namespace) -> None:
    for mode in arguments.modes:
        code = f"from tests.gpu.one import a10_compiled as a; a.alone({mode!r})"
        command = [sys.executable, "-c", code]
        outputs = [
            subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
            for _ in range(arguments.processes)
        ]
        said = [next((x for x in o.splitlines() if x.startswith(("hash:", "refused:"))), "nothing")
                for o in outputs]  # fmt: skip
        is_refused = all(line.startswith("refused:") for line in said)
        good = len(set(said)) == 1 and said[0] != "nothing"
        table.holds(f"{mode}: one hash, or refused", good, said[0][:80] if good else str(set(said)))
        if not is_refused:
            table.holds(f"{mode}: two ranks, then one", f"hash: {of_two(mode)}" == said[0])
    set_to = os.environ.get("TORCHINDUCTOR_DETERMINISTIC", "1, in workers (workers/health/gpu.py)")
    table.tell("TORCHINDUCTOR_DETERMINISTIC", set_to)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", nargs="*", default=MODES)
    parser.add_argument("--processes", type=int, default=3)


if __name__ == "__main__":
    sys.exit(main(body, options=options))
