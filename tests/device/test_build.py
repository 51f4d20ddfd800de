"""Without a compiler the device cannot be built: that is said, not skipped."""

import pytest

from tests.device import build


def test_a_missing_compiler_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.NoCompiler, match=r"no-such-compiler is not there.*install g"):
        build._check_compiler()
