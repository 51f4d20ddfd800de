"""How far a reader walks: files, and lines of the functions, of the walks in docs/architecture.md.

    python -m tests.bench.walks

What a walk leaves out is a reader's loss, so a walk names all that decides; tests/docs holds the
figures to their limits. A step is measured under `ddp`, from `next_step` on, and without data.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
ITEM = re.compile(r"^\d+\. .*?(?=^\d+\. |^$|\Z)", re.M | re.S)
STEP = re.compile(r"`([^`]+\.py)`: (`[^`]+`(?:,\s+`[^`]+`)*)")
"""A file and what to read there: an item has one or more."""
MEASURED = {"A training step": "step", "A failure": "failure", "A checkpoint save": "save"}


@dataclass(frozen=True)
class Walk:
    files: tuple[str, ...]
    """Each once, in the order in which it is met first."""
    stays: int
    """So often the reader comes to a file, the same one again included."""
    lines: int
    """Of the functions that are named."""


def items_of(name: str) -> list[str]:
    """Of a walk its numbered items, as text."""
    part = PAGE.read_text().partition(f"### {name}\n")[2].partition("\n#")[0]
    return ITEM.findall(part)


def steps_of(name: str) -> list[tuple[str, list[str]]]:
    """Of a walk its steps: a file, and functions in it."""
    found = [step for item in items_of(name) for step in STEP.findall(item)]
    return [(path, re.findall(r"`([^`]+)`", functions)) for path, functions in found]


def measure(name: str) -> Walk:
    steps = steps_of(name)
    named = dict.fromkeys((path, function) for path, found in steps for function in found)
    lengths = {path: lengths_in(ROOT / path) for path, _ in steps}
    lines = sum(lengths[path][function] for path, function in named)
    return Walk(tuple(lengths), len(steps), lines)


def lengths_in(path: Path) -> dict[str, int]:
    """Function, class or Class.method -> its lines."""
    found: dict[str, int] = {}

    def look(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                assert child.end_lineno is not None
                found[prefix + child.name] = child.end_lineno - child.lineno + 1
                if isinstance(child, ast.ClassDef):
                    look(child, f"{prefix}{child.name}.")

    look(ast.parse(path.read_text()), "")
    return found


def main() -> None:
    from tests.bench.harness import machine, record
    from tests.test_ratchets import MODULES, ROOMS, cycles, imported, upward

    results: dict[str, str] = {}
    for name, short in MEASURED.items():
        walk = measure(name)
        results[short] = f"{len(walk.files)} files, {walk.lines} lines, {walk.stays} stays"
        print(f"{name}: {len(walk.files)} files, {walk.lines} lines of functions")
        print("".join(f"  {path}\n" for path in walk.files), end="")
    circles = cycles({module: imported(module) for module in MODULES})
    upwards = [arrow for room, order in ROOMS.items() for arrow in upward(room, order)]
    print(f"import cycles: {len(circles)}; upward imports: {len(upwards)}")
    record("walks", about=machine(0), setting="docs/architecture.md", results=results)


if __name__ == "__main__":
    main()
