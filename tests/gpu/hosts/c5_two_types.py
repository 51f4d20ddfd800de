"""Two types of GPU under bitwise: refused in a line that names both."""

import argparse
import sys

from tests.gpu import runs
from tests.gpu.experiment import Table, main


def body(table: Table, arguments: argparse.Namespace) -> None:
    with runs.place(arguments) as at, at.run("mixed", steps=30) as run:
        end = run.finish(runs.SLOW)
    line = end["err"].strip().splitlines()[-1] if end["err"].strip() else ""
    table.holds("refused", "does not compute as" in end["err"], line[:200])
    table.tell("exit status", end["status"])


if __name__ == "__main__":
    sys.exit(main(body, options=runs.options))
