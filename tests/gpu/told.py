"""For pytest, `-p tests.gpu.told`: a failure is printed in a line as it comes: a run that is
ended before its time has then told of those it has met."""

import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = str(crash.message if crash else report.longrepr).strip().splitlines()
        print(f"FAILED {report.nodeid}: {(reason or [''])[0]}", file=sys.__stdout__, flush=True)
