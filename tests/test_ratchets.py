"""Nothing imports upwards; long signatures, wide classes and packed tuples only get fewer.

Each count is today's. Whoever mends one lowers its number here; none is ever raised.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_architecture import FILES, MAX_LINES, ROOT, module_of, named

MAX_POSITIONAL, MAX_ATTRIBUTES = 6, 15
ORDER = (
    *(
        "torch_private",
        "tensors",
        "distributed",
        "reduction",
        "step",
        "train_state",
        "checkpoint",
        "backup",
    ),
    *("resharding", "data", "parallel", "health", "membership", "scripts"),
)
"""Folders of `workers`, the lowest first; its loose files are above all, workloads are a user's."""
ON_RAY = (
    *("naming", "slots", "links", "head_calls", "background", "stores", "backup", "cluster_view"),
    *("failover", "detection", "record", "placement", "feed", "cluster", "actors", "driver"),
)
"""Folders and loose files of `elastic.on_ray`, the lowest first."""
ROOMS = {"workers": ORDER, "elastic.on_ray": ON_RAY}
LONG_SIGNATURES = {"elastic": 0, "workers": 0}
WIDE_CLASSES = {
    "elastic/config.py RunConfig": 20,
    "elastic/control/state.py Ledger": 25,
    "elastic/controller/recorder.py Recorder": 24,
    "elastic/controller/supervisor.py Supervisor": 20,
    "elastic/on_ray/cluster.py RayCluster": 25,
    "elastic/on_ray/detection/diagnosis.py Diagnosis": 16,
    "elastic/on_ray/driver/submission.py RayDriver": 18,
    "elastic/on_ray/slots.py Slot": 19,
    "elastic/protocol/worker_spec.py WorkerSpec": 32,
    "elastic/store/run_directory.py RunDirectory": 21,
    "workers/backup/client.py BackupClient": 19,
    "workers/data/parquet_loader.py ParquetLoader": 16,
    "workers/membership/member.py Member": 24,
    "workers/train_state/train_state.py TrainState": 17,
}
"""Their attributes; no other class has more than MAX_ATTRIBUTES."""
PACKED_TUPLES = {"elastic": 0, "workers": 0}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


MODULES = {module_of(path): path for path in FILES}


def imported(module: str) -> set[str]:
    """Modules of ours, at any depth."""
    found: set[str] = set()
    for node in ast.walk(parsed(MODULES[module])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in full}
    return (found & MODULES.keys()) - {module}


def reachable(start: str, arrows: dict[str, set[str]]) -> set[str]:
    found, left = set[str](), list(arrows[start])
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left += arrows[module]
    return found


def cycles(arrows: dict[str, set[str]]) -> set[frozenset[str]]:
    """Modules that import each other, over however many others."""
    after = {module: reachable(module, arrows) for module in arrows}
    return {frozenset(n for n in after[m] if m in after[n]) for m in arrows if m in after[m]}


def top(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def num_positional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without self. A command's parameters are options of the terminal."""
    if any("command" in ast.unparse(decorator) for decorator in function.decorator_list):
        return 0
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def attributes(node: ast.ClassDef) -> set[str]:
    found: set[str] = set()
    for child in node.body:
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            found.add(child.target.id)
    for child in ast.walk(node):
        is_stored = isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store)
        if is_stored and isinstance(child.value, ast.Name) and child.value.id == "self":
            found.add(child.attr)
    return found


def packed(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[int]:
    """Lines of calls that unpack a tuple which the same function has packed: its values lose their
    names on the way."""
    tuples: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    tuples.add(target.id)
                elif isinstance(target, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=False)
                    tuples |= {
                        t.id
                        for t, value in pairs
                        if isinstance(t, ast.Name) and isinstance(value, ast.Tuple)
                    }
    for node in ast.walk(function):
        for argument in node.args if isinstance(node, ast.Call) else ():
            value = argument.value if isinstance(argument, ast.Starred) else None
            if isinstance(value, ast.Tuple) or (isinstance(value, ast.Name) and value.id in tuples):
                yield node.lineno


def test_no_module_imports_itself_over_others():
    assert cycles({module: imported(module) for module in MODULES}) == set()


def floor(module: str, room: str, order: tuple[str, ...]) -> int | None:
    """How high a module stands in its room; None: not in the room, or in no order there."""
    inside = module.removeprefix(f"{room}.").split(".")
    if not module.startswith(f"{room}."):
        return None
    if inside[0] in order:
        return order.index(inside[0])
    return len(order) if len(inside) == 1 else None


def upward(room: str, order: tuple[str, ...]) -> list[str]:
    """Imports of a floor above one's own, for type checking too."""
    floors = {module: floor(module, room, order) for module in MODULES}
    return [
        f"{module} imports {other}"
        for module, here in floors.items()
        for other in imported(module)
        if here is not None and (there := floors[other]) is not None and there > here
    ]


@pytest.mark.parametrize(("room", "order"), ROOMS.items())
def test_folders_of_a_room_import_downwards(room: str, order: tuple[str, ...]):
    assert upward(room, order) == []


@pytest.mark.parametrize(("room", "order"), ROOMS.items())
def test_every_folder_of_a_room_has_its_floor(room: str, order: tuple[str, ...]):
    inside = {m.removeprefix(f"{room}.") for m in MODULES if m.startswith(f"{room}.")}
    folders = {name.partition(".")[0] for name in inside if "." in name}
    assert folders - {"workloads"} <= set(order)
    assert set(order) <= {name.partition(".")[0] for name in inside}


@pytest.mark.parametrize("room", LONG_SIGNATURES)
def test_what_a_function_takes_by_position_can_be_read(room: str):
    found = [
        f"{named(path)}:{function.lineno} {function.name} takes {num_positional(function)}"
        for path, function in functions()
        if top(path) == room and num_positional(function) > MAX_POSITIONAL
    ]
    assert len(found) <= LONG_SIGNATURES[room], found


def made_by_position(tree: ast.AST, classes: set[str]) -> Iterator[tuple[int, str]]:
    """Line and class: where one of these is made of more than can be read without their names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > MAX_POSITIONAL:
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in classes:
                yield node.lineno, name


def test_what_a_value_is_made_of_can_be_read():
    nodes = [node for path in FILES for node in ast.walk(parsed(path))]
    classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    found = [
        f"{named(path)}:{line} {name}"
        for path in FILES
        for line, name in made_by_position(parsed(path), classes)
    ]
    assert found == [], "give the fields by name"


def test_a_class_has_few_attributes():
    found = {
        f"{named(path)} {node.name}": len(attributes(node))
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    }
    wide = {name: count for name, count in found.items() if count > MAX_ATTRIBUTES}
    assert {n: c for n, c in wide.items() if c > WIDE_CLASSES.get(n, 0)} == {}, "split by meaning"
    assert {n: c for n, c in WIDE_CLASSES.items() if wide.get(n) != c} == {}, "lower the number"


def test_files_of_tests_are_short():
    files = (ROOT / "tests").rglob("*.py")
    assert not [named(path) for path in files if path.read_text().count("\n") > MAX_LINES]


@pytest.mark.parametrize("room", PACKED_TUPLES)
def test_no_tuple_is_packed_to_be_unpacked_into_a_call(room: str):
    found = [
        f"{named(path)}:{line}"
        for path, function in functions()
        if top(path) == room
        for line in packed(function)
    ]
    assert len(set(found)) <= PACKED_TUPLES[room], sorted(set(found))


def test_what_is_counted_is_seen():
    code = ast.parse(
        "def f(a, b, *, c):\n    where, other = (a, b), c\n    log('%d', *where)\n"
        "    log(*(a, b))\n    log(*a)\n"
        "class K:\n    x: int\n    def g(self, a):\n        self.y = self.z.w = a\n"
    )
    function, kind = code.body
    assert isinstance(function, ast.FunctionDef)
    assert isinstance(kind, ast.ClassDef)
    assert (num_positional(function), list(packed(function))) == (2, [3, 4])
    assert attributes(kind) == {"x", "y"}
    assert [floor(m, "w", ("a", "b")) for m in ("w.b.c", "w.d", "w.e.f", "v.a.b")] == [
        1,
        2,
        None,
        None,
    ]
    made = ast.parse("K(1, 2, 3, 4, 5, 6, 7)\nm.K(1, 2, 3, 4, 5, 6, a=7)\nL(1, 2, 3, 4, 5, 6, 7)\n")
    assert list(made_by_position(made, {"K"})) == [(1, "K")]
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set[str]()}
    assert cycles(arrows) == {frozenset("abc")}
