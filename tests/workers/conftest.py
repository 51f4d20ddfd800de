"""Fixtures of tests that train."""

import pytest

from tests.device import device  # noqa: F401  autograd counts the devices at its first backward
from tests.workers import where


@pytest.fixture(params=["cpu", "sim"], scope="module")
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


@pytest.fixture(params=["cpu", pytest.param("sim", marks=pytest.mark.slow)], scope="module")
def place_slowly(request):
    """Likewise, where the second time takes too long for `make test`."""
    where.go_to(request.param)
    yield request.param
    where.leave()
