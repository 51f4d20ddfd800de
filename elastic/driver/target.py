"""TARGET: from `package.module:Class` or `path/to/file.py:Class` to a workload object.

Everything that can be wrong with it is one line (WrongInput); nothing is started here.
"""

import ast
import importlib
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from elastic.protocol.errors import WrongInput
from elastic.store.files import first_line
from elastic.workload import REQUIRED_METHODS, Workload

OUR_ROOT = Path(__file__).resolve().parents[2]
OUR_PACKAGES = ("elastic", "workers")


@dataclass(frozen=True)
class Target:
    """A workload, and what another process needs to import its class."""

    workload: Workload
    spelled: str
    """How config.json names it, module:Class: wherever its folder is, as under `ray job submit`."""
    folder: Path | None
    """What every node needs on its path; None where the class is installed, or goes by value."""
    module: str | None
    """Import name of the class's module; None: it goes by value (`__main__`, a notebook)."""
    source: Path | None = None
    """The file that the class is from, if it is from one."""


def load_target(text: str, arguments: dict[str, Any], *, current: Path | None = None) -> Target:
    """Import the class that TARGET names and construct it; its folder comes first on sys.path."""
    place, colon, class_name = text.rpartition(":")
    if not colon or not place or not class_name.isidentifier():
        raise WrongInput(
            f"TARGET {text!r} names no class: write package.module:Class or path/to/file.py:Class"
        )
    here = current or Path.cwd()
    if place.endswith(".py") or "/" in place:
        file = (here / Path(place).expanduser()).resolve()
        if not file.is_file():
            raise WrongInput(f"TARGET {text!r}: there is no file {file}")
        folder, name = import_place(file)
    else:
        file, folder, name = None, here, place
    refuse_shadows(folder)
    put_first(folder)
    module = import_target(name, text, folder)
    if file is not None and not is_file_of(module, file):
        raise WrongInput(
            f"TARGET {text!r}: its import name {name!r} belongs to another module "
            f"({module.__file__ or 'built in'}); rename the file"
        )
    workload = construct(find_class(module, class_name, text), arguments, folder)
    spelled = f"{name}:{class_name}"
    return Target(workload, spelled, folder_to_ship(module), name, source_of(module))


def target_of(workload: Workload) -> Target:
    """The target of a workload that the user constructed in Python."""
    workload_class = type(workload)
    check_class(workload_class, workload_class.__qualname__)
    module = sys.modules.get(workload_class.__module__)
    spelled = f"{workload_class.__module__}:{workload_class.__qualname__}"
    if module is None or not is_importable(module, workload_class):
        return Target(workload, spelled, main_folder(), None, source_of(module))
    folder = folder_to_ship(module)
    if folder is not None:
        refuse_shadows(folder)
    return Target(workload, spelled, folder, workload_class.__module__, source_of(module))


def is_importable(module: ModuleType, workload_class: type[Workload]) -> bool:
    """Whether another process can import the class: not from `__main__`, a notebook, a function."""
    has_file = module.__file__ is not None and module.__name__ != "__main__"
    return has_file and vars(module).get(workload_class.__qualname__) is workload_class


def parse_arguments(settings: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """`key=value` of an option: values are Python literals, else strings."""
    arguments: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.isidentifier():
            raise WrongInput(f"{option} {setting!r} is no key=value: write {option} KEY=VALUE")
        if key in arguments:
            raise WrongInput(f"{option} {key} is given twice: {arguments[key]!r} and {value!r}")
        arguments[key] = as_literal(value)
    return arguments


def as_literal(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


def import_place(file: Path) -> tuple[Path, str]:
    """The folder that must be on sys.path, and the import name there; packages are climbed."""
    folder, names = file.parent, [file.stem]
    while (folder / "__init__.py").exists() and folder.parent != folder:
        names.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(names)


def put_first(folder: Path) -> None:
    text = str(folder)
    if text in sys.path:
        sys.path.remove(text)
    sys.path.insert(0, text)
    importlib.invalidate_caches()


def refuse_shadows(folder: Path) -> None:
    """A module of ours must not be found in the user's folder, here or on any node."""
    for name in OUR_PACKAGES:
        spec = PathFinder.find_spec(name, [str(folder), *sys.path])
        if spec is None or spec.origin is None:
            continue
        origin = Path(spec.origin).resolve()
        if not origin.is_relative_to(OUR_ROOT / name):
            raise WrongInput(
                f"{origin} shadows our package {name!r}, which the workers import: "
                "rename it, or move the target to another folder"
            )


def import_target(name: str, text: str, folder: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise WrongInput(
                f"TARGET {text!r}: there is no module {name!r} in {folder} or installed"
            ) from error
        raise WrongInput(f"TARGET {text!r}: importing it {how_failed(error, folder)}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, too
        raise WrongInput(f"TARGET {text!r}: importing it {how_failed(error, folder)}") from error


def how_failed(error: BaseException, folder: Path) -> str:
    """One line: what the user's code in `folder` raised, and its own line there."""
    what = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, SyntaxError):
        return f"failed: {what}"
    frames = extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own_file(Path(frame.filename), folder)]
    frame = (own or frames)[-1]
    return f"failed at {frame.filename}:{frame.lineno}: {what}"


def is_own_file(file: Path, folder: Path) -> bool:
    """The user's, where a virtual environment may lie in the folder as well."""
    return file.is_relative_to(folder) and "site-packages" not in file.parts


def is_file_of(module: ModuleType, file: Path) -> bool:
    return module.__file__ is not None and Path(module.__file__).resolve() == file


def find_class(module: ModuleType, class_name: str, text: str) -> type[Workload]:
    found = vars(module).get(class_name)
    if found is None:
        classes = sorted(
            name
            for name, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, Workload) and value is not Workload
        )
        known = f"it has {', '.join(classes)}" if classes else "it has no elastic.Workload at all"
        raise WrongInput(f"TARGET {text!r}: {module.__name__} has no class {class_name}; {known}")
    return check_class(found, text)


def check_class(found: object, text: str) -> type[Workload]:
    if not (inspect.isclass(found) and issubclass(found, Workload)):
        raise WrongInput(f"{text!r} is no workload: write `class Name(elastic.Workload)`")
    for method in REQUIRED_METHODS:
        if getattr(found, method) is getattr(Workload, method):
            raise WrongInput(f"{text!r} has no method {method!r}, which every workload must define")
    return found


def construct(workload_class: type[Workload], arguments: dict[str, Any], folder: Path) -> Workload:
    name = workload_class.__name__
    signature = inspect.signature(workload_class)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        accepted = ", ".join(str(p) for p in signature.parameters.values()) or "nothing"
        raise WrongInput(f"--set does not fit {name}: {error}; it takes {accepted}") from error
    try:
        return workload_class(**arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, too
        raise WrongInput(f"constructing {name} {how_failed(error, folder)}") from error


def folder_to_ship(module: ModuleType) -> Path | None:
    """The folder on sys.path that holds the module; None for ours and for installed ones."""
    if module.__file__ is None:
        return None
    folder, _ = import_place(Path(module.__file__).resolve())
    is_installed = {"site-packages", "dist-packages"} & set(folder.parts)
    is_ours = module.__name__.split(".")[0] in OUR_PACKAGES
    return None if is_installed or is_ours else folder


def source_of(module: ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


def main_folder() -> Path | None:
    """Where a script's or notebook's own imports come from."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    return Path(file).resolve().parent if file else Path.cwd()
