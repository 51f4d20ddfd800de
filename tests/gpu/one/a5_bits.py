"""The tests of `tests/workers` that train, on this GPU: ranks share it by the staged group."""

import argparse
import importlib.util
import os
import re
import subprocess
import sys

from tests.gpu.experiment import Table, main

SUITES = ("tests/workers", "-m", "not slow")
AT_ONCE = min(8, (os.cpu_count() or 2) // 2) if importlib.util.find_spec("xdist") else 0
"""Processes of pytest, each with up to four ranks."""


def counts(last_line: str) -> dict[str, int]:
    """Of pytest's last line, "2 failed, 30 passed in 9.1s"."""
    return {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", last_line.partition(" in ")[0])}


def body(table: Table, arguments: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "pytest", *SUITES, "-q", "-k", arguments.k, "--tb=short"]
    command += ["-p", "tests.gpu.told", "--timeout", "120"]
    command += ["-n", str(arguments.n)] if arguments.n else []
    environment = os.environ | {"ELASTIC_TEST_DEVICE": arguments.place}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    lines = ["nothing was printed"]
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("FAILED ") and ": " in line:  # told.py's
            print(line, end="", flush=True)
        lines.append(line.strip() or lines[-1])
    status, found = process.wait(), counts(lines[-1])
    table.tell("pytest", lines[-1].strip("= "))
    table.at_least("tests that passed", found.get("passed", 0), 1)
    bad = found.get("failed", 0) + found.get("error", 0) + found.get("errors", 0)
    table.at_most("tests that failed", bad, 0)
    table.holds("pytest ended as it should", status == 0, f"status {status}")


def options(parser: argparse.ArgumentParser) -> None:
    # Tests that train have their place in their names.
    parser.add_argument("-k", default="cuda", help="as pytest's")
    parser.add_argument("-n", type=int, default=AT_ONCE, help="processes, if there is xdist")
    parser.add_argument("--place", default="cuda", help="cpu and sim try the script")


if __name__ == "__main__":
    sys.exit(main(body, options=options))
