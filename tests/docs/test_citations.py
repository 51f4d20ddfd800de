"""Code, tests and pages cite only what is in the repository.

A reader who follows a name to a file that he does not have is lost. The changelog may name files of
before.
"""

import io
import re
import tokenize
from pathlib import Path

import pytest

import elastic
from tests.docs.pages import ROOT, files, named

SUFFIXES = (".py", ".md", ".yaml", ".yml", ".toml", ".sh")
OF_USERS = {"my_job.py", "path/to/file.py", "elastic.yaml", "train.py", "SCRIPT.py"}
"""Files of a reader's own, in examples."""
BEFORE = ("CHANGELOG.md", "RESULTS.md")
FILE = re.compile(r"(?<![\w./<*{$-])(?:[\w.-]+/)*[\w-]+\.(?:md|py)\b")
MODULE = re.compile(r"(?<![\w./\"'@-])(?:elastic|workers)(?:\.[A-Za-z_]\w*)+")
OUTSIDE = re.compile(r"(?<![\w./])(?:shared|house|/work|/home)/\w+")
CITING = [path for path in files() if path.suffix in SUFFIXES and path.name not in BEFORE]
NAMES = {named(path) for path in files()}


def texts(path: Path) -> list[str]:
    """What a reader reads: of code its comments and docstrings."""
    content = path.read_text()
    if path.suffix != ".py":
        return [content]
    tokens = tokenize.generate_tokens(io.StringIO(content).readline)
    return [t.string for t in tokens if is_told(t)]


def is_told(token: tokenize.TokenInfo) -> bool:
    is_string = token.type == tokenize.STRING
    return token.type == tokenize.COMMENT or (is_string and token.string.endswith('"""'))


def is_file(name: str) -> bool:
    """A path, or the end of one: a docstring may say `recorder.py`."""
    return name in OF_USERS or any(n == name or n.endswith(f"/{name}") for n in NAMES)


def is_module(name: str) -> bool:
    """Of ours, or something in one: the first part that is no folder is a file, or public."""
    parts = name.split(".")
    if name in OF_USERS or parts[1] in elastic.__all__ or parts == ["elastic", "run"]:
        return True
    for i in range(1, len(parts)):
        folder, stem = ROOT.joinpath(*parts[:i]), parts[i]
        if (folder / f"{stem}.py").exists():
            return i + 1 >= len(parts) or has_name(folder / f"{stem}.py", parts[i + 1])
        if not (folder / stem).is_dir():
            return has_name(folder / "__init__.py", stem)
    return True


def has_name(path: Path, name: str) -> bool:
    return re.search(rf"\b{name}\b", path.read_text()) is not None


def missing(text: str) -> list[str]:
    wrong = [name for name in FILE.findall(text) if not is_file(name)]
    wrong += [name for name in MODULE.findall(text) if not is_module(name)]
    return wrong + OUTSIDE.findall(text)


@pytest.mark.parametrize("path", CITING, ids=named)
def test_what_is_cited_is_here(path: Path):
    assert [name for text in texts(path) for name in missing(text)] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("see elastic/config.py and config.py", []),
        ("the fields are NOWHERE.md's", ["NOWHERE.md"]),
        ("elastic/nowhere.py, nowhere.py", ["elastic/nowhere.py", "nowhere.py"]),
        ("`elastic.config.RunConfig`, elastic.run(), elastic.control.", []),
        ("`elastic.config.Nothing`", ["elastic.config.Nothing"]),
        ("workers.nowhere.Thing", ["workers.nowhere.Thing"]),
        ("shared/design", ["shared/design"]),
    ],
)
def test_what_is_missing_is_found(text: str, wrong: list[str]):
    assert missing(text) == wrong
