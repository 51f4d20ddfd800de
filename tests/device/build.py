"""Builds the simulated device's C++ once for each version of its source, and imports it."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).parent / "source"
NAME = "simulated_device"
FLAGS = ["-O1", "-w"]


class NoCompiler(RuntimeError):
    """What to install."""


def load() -> ModuleType:
    """The extension, out of torch's cache folder of extensions where it is there already."""
    sources = sorted(SOURCE.glob("*.cpp"))
    version = f"{NAME}_{_digest([*sources, *SOURCE.glob('*.h')])}"
    folder = Path(cpp_extension._get_build_directory(version, verbose=False))
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # torch's own lock outlives a process that was killed
        if not (folder / "built").exists():
            _check_compiler()
            shutil.rmtree(folder)
            folder.mkdir()
            _build(sources, folder)
            (folder / "built").touch()
    return _imported(folder / f"{NAME}.so")


def _digest(files: list[Path]) -> str:
    content = b"".join(path.read_bytes() for path in sorted(files))
    of_torch = f"{torch.__version__} {sys.version} {FLAGS}".encode()
    return hashlib.sha256(content + of_torch).hexdigest()[:16]


def _check_compiler() -> None:
    # ninja may be there in this environment alone, which need not be on the path.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        raise NoCompiler(
            f"tests/device needs a C++ compiler ({compiler} is not there): "
            "install g++ (Debian: apt-get install g++), or set CXX"
        )
    if not cpp_extension.is_ninja_available():
        raise NoCompiler("tests/device needs ninja: pip install -e .[test]")


def _build(sources: list[Path], folder: Path) -> None:
    began = time.perf_counter()
    cpp_extension.load(
        NAME,
        [str(path) for path in sources],
        extra_cflags=FLAGS,
        build_directory=str(folder),
        is_python_module=False,
    )
    took_s = time.perf_counter() - began
    print(f"simulated device: built in {took_s:.0f} s, kept in {folder}", file=sys.stderr)


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
