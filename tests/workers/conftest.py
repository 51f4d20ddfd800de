"""Fixtures of tests that train."""

import os

import pytest

from tests.workers import where

ONLY = os.environ.get("ELASTIC_TEST_DEVICE", "")
"""On which device alone: "cuda" on a machine with a GPU (tests/gpu/README.md)."""
if ONLY != "cuda":  # torch has one kind of accelerator, and its autograd counts them at first
    from tests.device import device  # noqa: F401
collect_ignore = ["test_slow_devices.py", "test_steady_step.py"] if ONLY == "cuda" else []
"""Of the simulated device alone."""
SLOWLY = pytest.param("sim", marks=pytest.mark.slow)


@pytest.fixture(params=[ONLY] if ONLY else ["cpu", "sim"], scope="module")
def place(request):
    """A test of training takes it, or its module does: it runs on the CPU and on the simulated
    device, and where a rule of the device was broken the module's last test fails."""
    where.go_to(request.param)
    yield request.param
    where.leave()


@pytest.fixture
def on_device():
    """Of a test of the simulated device alone."""
    where.go_to("sim")
    yield
    where.leave()


@pytest.fixture(params=[ONLY] if ONLY else ["cpu", SLOWLY], scope="module")
def place_slowly(request):
    """Likewise, where the second time takes too long for `make test`."""
    where.go_to(request.param)
    yield request.param
    where.leave()


@pytest.fixture(autouse=True)
def on_cpu_unless_asked(request):
    """A place lasts for its module: the tests there that take none are of the CPU alone."""
    if {"place", "place_slowly", "on_device"} & set(request.fixturenames):
        yield
        return
    with where.on_cpu():
        yield
