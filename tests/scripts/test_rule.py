"""What keeps a script from level 1 is in one place, and all of it is of one rule."""

import ast
from pathlib import Path

import pytest

from workers.scripts.in_place import rule
from workers.scripts.in_place.rule import OBSTACLES, Clause

ROOT = Path(__file__).parents[2]
FILES = [
    *(ROOT / "workers" / "scripts").rglob("*.py"),
    *(ROOT / "elastic" / "on_ray" / "feed").rglob("*.py"),
    ROOT / "workers" / "script_loop.py",
]
REFUSE = ("refuse", "suspect", "deny")


def begins_with_words(value: ast.expr) -> bool:
    first = value.values[0] if isinstance(value, ast.JoinedStr) else value
    return isinstance(first, ast.Constant)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_nobody_makes_up_a_reason_of_his_own(file):
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    reasons = [
        call.args[0]
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in REFUSE and call.args
    ]
    assert [ast.unparse(reason) for reason in reasons if begins_with_words(reason)] == []


def test_each_obstacle_is_met_somewhere_and_each_clause_has_some():
    texts = [file.read_text() for file in FILES if file.name != "rule.py"]
    names = [name for name, value in vars(rule).items() if value in OBSTACLES]
    assert len(names) == len(OBSTACLES)
    assert [name for name in names if not any(name in text for text in texts)] == []
    assert {obstacle.clause for obstacle in OBSTACLES} == set(Clause)
    assert len({obstacle.why for obstacle in OBSTACLES}) == len(OBSTACLES)
