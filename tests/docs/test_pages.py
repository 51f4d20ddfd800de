"""The pages are short, and what they name is there."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.bench.walks import STEP, items_of, measure, steps_of
from tests.docs.pages import (
    DOCS,
    FOLDERS,
    PAGES,
    ROOT,
    blocks,
    named,
    num_words,
    prose,
    sentences,
)

MAX_README_LINES, MAX_WORDS = 140, 30
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
PATH = re.compile(rf"`((?:{'|'.join(map(re.escape, FOLDERS))})/[^`\s]*)`")
WALKS = ("A training step", "A failure", "A join", "A checkpoint save", "A resume")
LIMITS = {"A training step": (7, 577), "A failure": (15, 1295), "A checkpoint save": (12, 418)}
"""Files that a reader needs, and lines of the functions. The project is after 7 files, 15 files and
1,300 lines, and 12 files."""


def anchor(heading: str) -> str:
    words = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
    return re.sub(r"[-\s]+", "-", words)


def anchors(page: Path) -> set[str]:
    return {anchor(h) for h in re.findall(r"^#+ (.*)$", prose(page.read_text()), re.M)}


def defined_in(path: Path) -> set[str]:
    """`function`, `Class` and `Class.method` of a source file."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{n.name}" for n in inner}
    return found


def test_the_readme_is_short():
    assert (ROOT / "README.md").read_text().count("\n") <= MAX_README_LINES


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_sentences_are_short(page: Path):
    found = sentences(page.read_text())
    assert [(num_words(s), s) for s in found if num_words(s) > MAX_WORDS] == []


def test_sentences_are_found():
    text = "# Head\nOne `a. B` two. Three\nfour: *five*; six! (Seven.)\n\n| a. | B c. D |\n- x y\n"
    words = ["Head", "One CODE two.", "Three four: *five*; six!", "(Seven.)"]
    assert sentences(text) == [*words, "a.", "B c.", "D", "x y"]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path):
    for link in LINK.findall(prose(page.read_text())):
        if re.match(r"https?://", link):
            continue
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link}: no such file"
        assert not fragment or fragment in anchors(target), f"{link}: no such heading"
        is_outside = page.parent == DOCS and DOCS not in target.parents
        assert not is_outside, f"{link}: the site has only docs/; name the path in code instead"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_paths_exist(page: Path):
    names = PATH.findall(page.read_text())
    assert [name for name in names if not list(ROOT.glob(name.rstrip("/")))] == []


def test_every_page_is_in_the_table_of_contents():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = [path for entry in nav for path in entry.values()]
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md"))


def test_the_site_can_be_built(tmp_path: Path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e .[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_pages_say_of_gpus_what_the_results_say():
    """What ran names its torch there; one of a CUDA build is a run on GPUs."""
    results = [(ROOT / f"tests/{of}/RESULTS.md").read_text() for of in ("bench", "gpu")]
    has_run = any(re.search(r"\+cu\d", text) for text in results)
    for page in (ROOT / "README.md", DOCS / "index.md", DOCS / "operations.md"):
        says_not = "has not been run on a GPU yet" in " ".join(page.read_text().split())
        assert says_not is not has_run, f"{named(page)}: GPUs have run: {has_run}"


# --- the walks --------------------------------------------------------------------------
def walks() -> dict[str, list[tuple[str, list[str]]]]:
    """Of each walk of docs/architecture.md its steps: a file, and functions in it."""
    found = re.findall(r"^### (.*)$", (DOCS / "architecture.md").read_text(), re.M)
    return {name: steps_of(name) for name in found if name in WALKS}


def test_there_are_five_walks_and_every_item_begins_with_a_step():
    assert tuple(walks()) == WALKS
    for name in WALKS:
        for number, item in enumerate(items_of(name), 1):
            assert re.match(rf"{number}\. {STEP.pattern}", item), item


@pytest.mark.parametrize("name", WALKS)
def test_whatever_file_an_item_names_is_counted(name: str):
    for item in items_of(name):
        named_there = re.findall(r"`((?:elastic|workers)/[^`]*\.py)`", item)
        assert named_there == [path for path, _ in STEP.findall(item)], item


@pytest.mark.parametrize("name", WALKS)
def test_what_a_walk_names_is_there(name: str):
    for path, functions in walks()[name]:
        assert functions, f"{path} without a function"
        missing = set(functions) - defined_in(ROOT / path)
        assert not missing, f"{path} has no {sorted(missing)}"


@pytest.mark.parametrize("name", LIMITS)
def test_a_walk_grows_no_longer(name: str):
    """Limits go down only."""
    walk, (files, lines) = measure(name), LIMITS[name]
    assert len(walk.files) <= files, walk.files
    assert walk.lines <= lines


def test_a_manifest_is_four_hops_from_the_decision():
    """From file to file: transition (with checkpointing's rule), cluster, publisher, writer,
    catalogue. The loop, which carries every command, stands before the decision."""
    files = [path for path, _ in steps_of("A checkpoint save")]
    behind = dict.fromkeys(files[files.index("elastic/control/checkpointing.py") + 1 :])
    assert len(behind) <= 4, list(behind)


# --- examples -----------------------------------------------------------------------------
@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_examples_are_python(page: Path):
    for code in blocks(page, "python"):
        compile(code, named(page), "exec")
