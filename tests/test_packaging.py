"""What is declared is what is tested: nobody installs a version that no test has seen."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("package", ["torch", "ray"])
def test_the_oldest_version_that_may_be_installed_is_the_one_that_ci_installs(package):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    declared = [d for of in (project["dependencies"], *extras) for d in of]
    pinned = re.search(rf"^{package}==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned
    found = [d for d in declared if re.match(rf"{package}\b", d)]
    assert found
    for requirement in found:
        assert requirement.endswith(f">={pinned[1]}"), requirement
