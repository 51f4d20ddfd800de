"""Fixtures of more than one suite."""

import os

import pytest

from tests.object_store import CREDENTIALS, FaultProxy, S3Server


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """In CI everything is allowed: what skips there tests nothing, and nobody would notice."""
    report = yield
    if report.skipped and os.environ.get("ELASTIC_NO_SKIPS"):
        report.outcome, report.longrepr = "failed", f"skipped, where it must not: {report.longrepr}"
    return report
