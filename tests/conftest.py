"""Fixtures of more than one suite."""

import gc
import os
import signal
import threading

import pytest

from elastic.store.claim import Claim
from elastic.store.run_directory import RunDirectory
from tests.object_store import CREDENTIALS, FaultProxy, S3Server

# As in a terminal: who runs the tests in the background has interrupts ignored, and so would have
# all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What all tests and torch bring while they are imported is no garbage: to look for some in
    the meantime takes 4 of 9 s, and each later look would go through all of it. Simulations make
    much that dies by itself: to look for the rest less often makes them 17 % cheaper."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(5_000)
        gc.enable()


@pytest.fixture(scope="session")
def s3_server():
    """A real S3 server; the credentials that it takes are in the environment."""
    pytest.importorskip("moto", reason="moto is not installed: pip install -e .[test]")
    with pytest.MonkeyPatch.context() as patch, S3Server() as server:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def s3(s3_server):
    """A proxy before the server, without faults yet."""
    with FaultProxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def controllers_end():
    """What a test leaves of a controller ends as with its process: else it would write on, and
    complain on the standard error of the tests that follow."""
    yield
    threads = threading.enumerate()
    for thread in threads:
        owner = getattr(getattr(thread, "_target", None), "__self__", None)
        if isinstance(owner, RunDirectory):
            owner._closed.set()
        elif isinstance(owner, Claim):
            owner._is_released.set()
        else:
            continue
        thread.join(60)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """In CI everything is allowed: what skips there tests nothing, and nobody would notice. What
    fails as expected has run (pytest calls it skipped, too)."""
    report = yield
    is_skipped = report.skipped and not hasattr(report, "wasxfail")
    if is_skipped and os.environ.get("ELASTIC_NO_SKIPS"):
        report.outcome, report.longrepr = "failed", f"skipped, where it must not: {report.longrepr}"
    return report
