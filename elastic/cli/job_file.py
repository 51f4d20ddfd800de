"""The job file, `elastic run|submit elastic.yaml`: options by section, so that a file tells all.

It becomes the options of the command and is checked as these are; options on the command line
come after it and prevail. `job.schema.json` is for editors, made from the sections here.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from elastic.protocol.errors import WrongInput
from elastic.store.files import first_line_of_yaml

ENDINGS = (".yaml", ".yml")
NUMBER, WHOLE, TEXT, SWITCH, MAPPING = "number", "integer", "string", "boolean", "object"
SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "resources": {
        "workers": (WHOLE, TEXT),
        "standby": (WHOLE,),
        "device": (TEXT,),
        "cpus_per_worker": (WHOLE,),
        "numa_binding": (TEXT,),
        "labels": (TEXT,),
        "accelerator_type": (TEXT,),
        "worker_resources": (TEXT,),
        "spot": (TEXT,),
        "address": (TEXT,),
        "cluster": (TEXT,),
    },
    "setup": {
        "pip": (TEXT,),
        "uv": (TEXT,),
        "env": (MAPPING,),
    },
    "run": {
        "target": (TEXT,),
        "arguments": (MAPPING,),
        "steps": (WHOLE,),
        "global_batch": (WHOLE,),
        "micro_batch": (WHOLE,),
        "parallel": (TEXT,),
        "reduction": (TEXT,),
        "precision": (TEXT,),
        "clip_norm": (NUMBER,),
        "activation_checkpointing": (SWITCH,),
        "offload": (SWITCH,),
        "seed": (WHOLE,),
        "eval_every": (WHOLE,),
    },
    "storage": {
        "place": (TEXT,),
        "name": (TEXT,),
        "checkpoint_every": (WHOLE,),
        "keep": (WHOLE, TEXT),
        "snapshot_every": (WHOLE,),
        "on_storage_error": (TEXT,),
    },
    "elastic": {
        "detect_s": (NUMBER, TEXT),
        "max_failures": (WHOLE,),
        "faults": (MAPPING,),
    },
}
"""Kinds of values, in JSON schema's words, by section and key."""
OPTIONS = {"place": "--storage", "arguments": "--set"}
"""Where the option is not called as the key."""
OF_COMMAND = {
    **dict.fromkeys(("cluster", "pip", "uv", "env"), "submit"),
    "address": "run",
}
"""Keys that the other command leaves alone: a run takes the environment that it is started in."""
COMMANDS = ("run", "submit")
PYTHON: dict[str, tuple[type, ...]] = {
    WHOLE: (int,),
    NUMBER: (int, float),
    TEXT: (str,),
    SWITCH: (bool,),
    MAPPING: (dict,),
}


def expanded(arguments: Sequence[str]) -> list[str]:
    """The command line with a job file's options in its place; as it is where it names none.

    WrongInput for neither a class nor a job file, and for one that cannot be read, has an unknown
    key or a value of another kind.
    """
    if len(arguments) < 2 or arguments[0] not in COMMANDS:
        return list(arguments)
    command, path, *given = arguments
    if not path.endswith(ENDINGS):
        if ":" not in path and not path.startswith("-"):  # before options are missed
            raise WrongInput(
                f"TARGET {path!r} names no class and no job file: write package.module:Class, "
                "path/to/file.py:Class or path/to/elastic.yaml"
            )
        return list(arguments)
    return [command, *options_of(Path(path), command, given), *given]


def options_of(path: Path, command: str, given: Sequence[str] = ()) -> list[str]:
    """TARGET and its options. given: those of the command line, whose KEY=VALUEs prevail."""
    found: list[str] = []
    for values in read_job(path).values():
        for key, value in values.items():
            if key == "target":
                found.insert(0, beside(path, value))
            elif OF_COMMAND.get(key, command) == command:
                found += option(key, on_this_machine(path, command, key, value), given)
    if not found or found[0].startswith("--"):
        raise WrongInput(f"{path}: run.target is missing: package.module:Class or file.py:Class")
    return found


def option(key: str, value: Any, given: Sequence[str]) -> list[str]:
    """One key as an option; none for a switch that is off."""
    name = OPTIONS.get(key, f"--{key.replace('_', '-')}")
    if isinstance(value, bool):
        return [name] if value else []
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value).items()
        overridden = {text.partition("=")[0] for text in given}
        chosen = ((str(k), v) for k, v in pairs)
        shown = str if key == "env" else repr
        return [t for k, v in chosen if k not in overridden for t in (name, f"{k}={shown(v)}")]
    return [name, str(value)]


def on_this_machine(path: Path, command: str, key: str, value: Any) -> Any:
    """The value, with paths of this machine relative to the job file's folder. A storage to submit
    to is elsewhere."""
    is_place = key == "place" and "://" not in value and command == "run"
    file = path.absolute().parent / Path(value).expanduser() if isinstance(value, str) else path
    is_file = key in ("pip", "uv") or (key == "cluster" and file.is_file())
    return str(file) if is_place or is_file else value


def beside(path: Path, target: str) -> str:
    """TARGET, whose file is relative to the job file's folder."""
    place, colon, name = target.rpartition(":")
    is_file = place.endswith(".py") or "/" in place
    file = path.absolute().parent / Path(place).expanduser()
    return f"{file}{colon}{name}" if is_file else target


def read_job(path: Path) -> dict[str, dict[str, Any]]:
    """Its sections, without what is null. Raises WrongInput."""
    import yaml  # here, for commands that read no job file

    try:
        content: object = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise WrongInput(f"job file {path} cannot be read: {first_line_of_yaml(error)}") from error
    sections = checked_keys(content, list(SECTIONS), f"{path}: ")
    found: dict[str, dict[str, Any]] = {}
    for section, values in sections.items():
        kinds = SECTIONS[section]
        keys = checked_keys(values, list(kinds), f"{path}: {section}.") if values else {}
        found[section] = {key: value for key, value in keys.items() if value is not None}
        for key, value in found[section].items():
            if not is_of(value, kinds[key]):
                wanted = " or ".join(kinds[key])
                raise WrongInput(f"{path}: {section}.{key} must be {wanted}, got {value!r}")
    return found


def checked_keys(content: object, known: list[str], place: str) -> dict[str, Any]:
    """`content` as a mapping of known keys; WrongInput names the nearest one."""
    if not isinstance(content, dict):
        what = place.rstrip(". ")
        raise WrongInput(f"{what.rstrip(':')} must be a mapping of {', '.join(known)}")
    for key in cast("dict[object, Any]", content):
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"do you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
            raise WrongInput(f"{place}{key} is unknown: {hint}")
    return cast("dict[str, Any]", content)


def is_of(value: object, kinds: tuple[str, ...]) -> bool:
    if isinstance(value, bool):
        return SWITCH in kinds
    return any(isinstance(value, PYTHON[kind]) for kind in kinds)


def schema() -> dict[str, Any]:
    """What job.schema.json holds."""
    sections: dict[str, Any] = {}
    for section, kinds in SECTIONS.items():
        values = {key: {"type": [*kind, "null"]} for key, kind in kinds.items()}
        closed = {"type": ["object", "null"], "additionalProperties": False}
        sections[section] = {**closed, "properties": values}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A job of elastic",
        "type": "object",
        "additionalProperties": False,
        "required": ["run"],
        "properties": sections,
    }
