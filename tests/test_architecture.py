"""The rooms of CONTRIBUTING.md, checked from the source text: who may import whom.

Every import counts, at module level or inside a function; the only difference between the two is
that on_ray (whose functions run in an actor's process) and the composition root may import
`workers`, `ray` and `torch` inside functions.
"""

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 500
MAX_FIELDS = 25

# room -> which of our rooms it may import anywhere
ALLOWED = {
    "elastic.protocol": {"elastic.protocol"},
    "elastic.control": {"elastic.control", "elastic.protocol"},
    "elastic.store": {"elastic.store", "elastic.protocol"},
    "elastic.data": {"elastic.data", "elastic.store", "elastic.protocol"},
    "elastic.on_ray": {
        "elastic.on_ray",
        "elastic.data",
        "elastic.store",
        "elastic.control",
        "elastic.protocol",
    },
    "workers": {"workers", "elastic.data", "elastic.protocol", "elastic.store"},
    "elastic": {
        "elastic",
        "elastic.data",
        "elastic.on_ray",
        "elastic.store",
        "elastic.control",
        "elastic.protocol",
        "workers",
    },
}
ALLOWED_IN_FUNCTIONS = {**ALLOWED, "elastic.on_ray": ALLOWED["elastic.on_ray"] | {"workers"}}
STDLIB_ONLY = ("elastic.protocol", "elastic.control")
# third party -> rooms that may import it at module level (the root only inside functions)
OWNERS = {"ray": ("elastic.on_ray",), "torch": ("workers",)}
# a shipped workload is a user's file: it may use the public package
PUBLIC = ("elastic",)


class Import(NamedTuple):
    name: str  # dotted module
    is_deferred: bool  # inside a function, or only for type checking
    line: int


def room_of(module: str) -> str:
    """The room of a dotted module of ours; "" if it is not ours."""
    parts = module.split(".")
    if parts[0] == "workers":
        return "workers"
    if parts[0] != "elastic":
        return ""
    room = ".".join(parts[:2])
    return room if room in ALLOWED else "elastic"


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[Import]:
    yield from walk(ast.parse(path.read_text()), module_of(path), False)


def walk(node: ast.AST, module: str, is_deferred: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, is_deferred, child.lineno)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                package = module.split(".")[: -child.level]
                base = ".".join([*package, base]).rstrip(".")
            for alias in child.names:  # `from elastic import control` imports elastic.control
                full = f"{base}.{alias.name}"
                is_module = room_of(base) == "elastic" and room_of(full) != "elastic"
                yield Import(full if is_module else base, is_deferred, child.lineno)
        elif is_dynamic(child):
            assert isinstance(child, ast.Call)
            assert isinstance(child.args[0], ast.Constant)
            yield Import(str(child.args[0].value), is_deferred, child.lineno)
        deferred = is_deferred or isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        )
        deferred = deferred or (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        )
        yield from walk(child, module, deferred)


def is_dynamic(node: ast.AST) -> bool:
    """A call of import_module("...") or __import__("...")."""
    if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in ("import_module", "__import__")


FILES = sorted([*(ROOT / "elastic").rglob("*.py"), *(ROOT / "workers").rglob("*.py")])


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_room_imports_only_what_it_may(path: Path):
    here = room_of(module_of(path))
    is_workload = module_of(path).startswith("workers.workloads")
    for name, is_deferred, line in imports(path):
        there, top = room_of(name), name.split(".")[0]
        where = f"{named(path)}:{line} imports {name}"
        if there:
            allowed = (ALLOWED_IN_FUNCTIONS if is_deferred else ALLOWED)[here]
            is_public = is_workload and name in PUBLIC
            assert there in allowed or is_public, f"{where}; {here} may import {sorted(allowed)}"
        elif here in STDLIB_ONLY:
            assert top in sys.stdlib_module_names, f"{where}; {here} is standard library only"
        if top in OWNERS:
            is_owner = here in OWNERS[top]
            is_root = here == "elastic" and is_deferred
            may_defer = here == "elastic.on_ray" and is_deferred
            assert is_owner or is_root or may_defer, f"{where}; {top} belongs to {OWNERS[top]}"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_files_are_short_and_say_what_lives_in_them(path: Path):
    text = path.read_text()
    assert text.count("\n") <= MAX_LINES, f"{named(path)} has more than {MAX_LINES} lines"
    assert not text or ast.get_docstring(ast.parse(text)), f"{named(path)} has no docstring"


def test_every_room_exists():
    found = {room_of(module_of(path)) for path in FILES}
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    "module",
    [
        "elastic",
        "elastic.controller.loop",
        "elastic.control.transition",
        "workers.membership.machine",
    ],
)
def test_importing_it_loads_neither_ray_nor_torch(module: str):
    code = f"import sys, {module}; print([m for m in ('ray', 'torch') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


MACHINE = tuple(
    f"workers/membership/{name}.py" for name in ("machine", "state", "events", "actions")
)


@pytest.mark.parametrize("path", MACHINE)
def test_the_machine_of_a_worker_decides_from_values_alone(path: str):
    """No torch, no thread, no clock, no I/O: the simulation drives what workers run."""
    pure = {"dataclasses", "enum", "typing", "workers.membership"}
    pure |= {path.removesuffix(".py").replace("/", ".") for path in MACHINE}
    for imported in imports(ROOT / path):
        is_pure = imported.name in pure or imported.name.startswith("elastic.protocol.")
        assert is_pure, f"{path}:{imported.line} imports {imported.name}"


LOOKS = {"item", "tolist", "cpu", "numpy"}
REDUCTIONS = {"sum", "all", "any", "max", "min", "norm"}
HOST_READS = {
    "workers/distributed/device_wait.py to_host": "for Group.read",
    "workers/distributed/device_wait.py leave": "committed state",
    "workers/distributed/exchange.py gather_json": "came over the control group",
    "workers/distributed/pieces.py _end_round": "came over the control group",
    "workers/verify.py verify": "came over the control group",
    "workers/verify.py fingerprints": "committed state",
    "workers/nonfinite.py look": "only told of over the control group",
    "workers/reduction/norm.py norm_of_rows": "a finite vote has waited for the gradients",
    "workers/reduction/reducers.py magnitude": "was read by the group",
    "workers/step/vote.py _numbers": "was read by the group",
    "workers/step/vote.py add_up": "was read by the group",
    "workers/train_state/train_state.py _hash": "was read by the group",
    "workers/train_state/digest.py tensor_bytes": "committed state",
    "workers/train_state/serialization.py encode": "committed state",
    "workers/tensors/local.py as_bytes": "in host memory",
    "workers/step/vote.py encode": "numpy's",
    "workers/step/vote.py decode": "numpy's",
    "workers/step/vote.py _means": "numpy's",
    "workers/reduction/tree.py _part": "numpy's",
    "workers/worker.py place_in_stream": "numpy's",
    "workers/scripts/in_place/unit.py _outcome": "came over the control group, and through read",
    "workers/scripts/in_place/unit.py _agreed_order": "likewise",
    "workers/scripts/in_place/collective.py encoded": "kept after its wait has ended well",
    "workers/scripts/values.py number_in": "the script's own metrics",
    "workers/scripts/workload.py has_ended": "committed state",
    "workers/health/preflight.py _keeps": "no group yet",
    "workers/health/fingerprint.py computed": "no group yet",
    "workers/distributed/staged.py send": "handed to gloo once it has come",
    "workers/distributed/staged.py bring_back": "came over gloo, and goes to the device",
    "workers/parallel/pipeline/stand_in.py stand_in": "shapes that came over control",
    "workers/health/preflight.py _computes": "no group yet",
}
"""Who looks at tensors on the host, and why what it sees is no garbage. Files and datasets have no
collectives."""


def looks_at_tensors(function: ast.FunctionDef) -> bool:
    """`.item()`, `float(x.sum())` and the like, not in functions within."""
    calls = [n for n in ast.walk(function) if isinstance(n, ast.Call)]
    nested = [n for n in ast.walk(function) if isinstance(n, ast.FunctionDef) and n is not function]
    inner = {id(n) for f in nested for n in ast.walk(f)}
    for call in (c for c in calls if id(c) not in inner):
        if isinstance(call.func, ast.Attribute) and call.func.attr in LOOKS and not call.args:
            return True
        if any(keyword.arg == "non_blocking" for keyword in call.keywords):
            return True
        if isinstance(call.func, ast.Name) and call.func.id in {"float", "bool", "int"}:
            names = {n.attr for n in ast.walk(call) if isinstance(n, ast.Attribute)}
            is_read = any(isinstance(n, ast.Name) and n.id == "read" for n in ast.walk(call))
            if names & REDUCTIONS or is_read:
                return True
    return False


def test_what_comes_of_a_collective_is_read_in_one_function():
    """A group that was aborted leaves garbage and no error: `Group.read` looks at that."""
    found = {
        f"{named(path)} {node.name}"
        for path in FILES
        if module_of(path).startswith("workers.")
        if module_of(path).split(".")[1] not in ("checkpoint", "data", "workloads")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and looks_at_tensors(node)
    }
    assert found == set(HOST_READS)


@pytest.mark.parametrize(
    "cls", ["RunConfig", "Checkpointing", "Resources", "FaultPolicy", "Parallel"]
)
def test_a_class_of_settings_has_few_fields_each_explained(cls: str):
    from elastic import config

    names = [f.name for f in dataclasses.fields(getattr(config, cls))]
    assert len(names) <= MAX_FIELDS
    source = sys.modules[getattr(config, cls).__module__].__file__
    assert source is not None
    tree = ast.parse(Path(source).read_text())
    body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls)
    explained = {
        field.target.id
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }
    assert set(names) <= explained, f"no docstring under {sorted(set(names) - explained)}"


PRIVATE_ROOMS = ("workers/torch_private/", "workers/parallel/fsdp2_private/")
"""All that touches what torch keeps private, behind torch_private/version.py."""
OF_TORCH_TOO = {
    "_backend", "_buffers", "_flat_weights", "_forward_hooks", "_local_tensor", "_modules",
    "_optimizer_step_pre_hooks", "_parameters", "_spec", "_version",
}  # fmt: skip
"""Private names of torch that classes of ours have, too."""
OURS = {("self._session", "_spec"), ("session", "_spec")}
"""Whose of these is ours, by how it is spelled."""
OF_OTHERS = {
    ("os", "_exit"),
    ("sys", "_getframe"),
    ("sys", "_current_frames"),
    ("spec.tensor_meta", "_replace"),
    ("state.AcceleratorState", "_reset_state"),
    ("state.GradientState", "_reset_state"),
}
"""Of the standard library, named tuples (`_fields`) included, and of Accelerate."""


def private_names_of_ours() -> set[str]:
    """What a class, a module or a function of ours defines, by name."""
    found: set[str] = set()
    for path in FILES:
        if named(path).startswith(PRIVATE_ROOMS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                found.add(node.attr)
    return {name for name in found if is_private(name)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def torchs_private(tree: ast.AST, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name: what is imported from torch, or asked of an object, and is torch's own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            base = ast.unparse(node.value)
            is_own = base in ("self", "cls", "super()")
            is_ours = node.attr in ours - OF_TORCH_TOO or (base, node.attr) in OURS | OF_OTHERS
            if not is_own and not is_ours:
                yield node.lineno, f"{base}.{node.attr}"
        elif isinstance(node, ast.Call) and is_asked_by_name(node):
            name = ast.literal_eval(node.args[1])
            if is_private(name) and name != "_fields" and name not in ours - OF_TORCH_TOO:
                yield node.lineno, name
        for name in modules_named(node):
            top, *rest = name.split(".")
            if top == "torch" and any(map(is_private, rest)):
                yield node.lineno, name


def modules_named(node: ast.AST) -> list[str]:
    """What it imports, or a module of torch as one imports it by name."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value] if re.fullmatch(r"torch(\.\w+)+", node.value) else []
    return []


def is_asked_by_name(node: ast.Call) -> bool:
    """getattr(x, "_name") and its like."""
    is_one = isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr")
    return is_one and isinstance(node.args[1], ast.Constant)


def test_what_torch_keeps_private_is_used_in_its_rooms_only():
    """Elsewhere than in `workers` private names are Ray's, unless they are modules of torch."""
    ours = private_names_of_ours()
    found = [
        f"{named(path)}:{line} {name}"
        for path in FILES
        if not named(path).startswith(PRIVATE_ROOMS)
        for line, name in torchs_private(ast.parse(path.read_text()), ours)
        if named(path).startswith("workers/") or name.startswith("torch.")
    ]
    assert found == [], "give it a name in workers/torch_private"


def test_private_names_of_torch_are_seen():
    tree = ast.parse(
        "from torch._ops import A\nfrom torch.optim import _b\nimport torch._dynamo\n"
        "torch._foreach_add_(x)\ndist._c()\ntensor._version\nself._mine\nmodule._parameters\n"
        "self._session._spec\ngetattr(x, '_local_tensor')\nother._mine\nos._exit(1)\n"
        "self._parameters\nimport_module('torch._inductor.config')\n"
    )
    assert sorted(torchs_private(tree, {"_mine"})) == [
        (1, "torch._ops.A"),
        (2, "torch.optim._b"),
        (3, "torch._dynamo"),
        (4, "torch._foreach_add_"),
        (5, "dist._c"),
        (6, "tensor._version"),
        (8, "module._parameters"),
        (10, "_local_tensor"),
        (14, "torch._inductor.config"),
    ]


def test_imports_are_found_at_any_depth():
    tree = ast.parse(
        "import a\n"
        "def f():\n    if x:\n        from b.c import d\n"
        "    importlib.import_module('e')\n"
        "class K:\n    import g\n"
        "if TYPE_CHECKING:\n    import h\n"
        "from elastic import control\n"
        "from ..protocol import membership\n"
    )
    assert list(walk(tree, "elastic.control.somewhere", False)) == [
        Import("a", False, 1),
        Import("b.c", True, 4),
        Import("e", True, 5),
        Import("g", False, 7),
        Import("h", True, 9),
        Import("elastic.control", False, 10),
        Import("elastic.protocol", False, 11),
    ]
