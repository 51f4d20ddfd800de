"""For pytest, `-p tests.gpu.told`: a failure is printed in a line as it comes, and written whole to
the file that ELASTIC_TOLD names: a run that is ended before its time has then told of those it has
met."""

import os
import sys
from pathlib import Path

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.failed or "PYTEST_XDIST_WORKER" in os.environ:  # whose master hears of it, too
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    reason = str(crash.message if crash else report.longrepr).strip().splitlines()
    print(f"FAILED {report.nodeid}: {(reason or [''])[0]}", file=sys.__stdout__, flush=True)
    if place := os.environ.get("ELASTIC_TOLD"):
        with Path(place).open("a") as file:
            file.write(f"==== {report.nodeid}\n{report.longreprtext}\n")
            file.writelines(f"---- {name}\n{text}\n" for name, text in report.sections)
