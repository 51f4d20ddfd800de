"""What is declared is what is tested: nobody installs a version that no test has seen."""

import re
import shutil
import subprocess
import sys
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


def test_the_wheel_installs_the_command_the_type_markers_and_the_data_files(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in ("elastic", "workers"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    shipped = [
        path
        for folder in ("elastic", "workers")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    missing = [p for p in shipped if not (target / p.relative_to(ROOT)).exists()]
    assert missing == []
    (metadata,) = target.glob("elastic_ray_trainer-*.dist-info/entry_points.txt")
    assert "elastic = elastic.cli.app:main" in metadata.read_text()
