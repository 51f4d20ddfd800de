"""A scenario: which faults, on whom, when. Read from YAML, checked, written back as one line.

The times that follow from it are plan.py's, carrying it out is inject.py's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from elastic.chaos.text import is_file, one_line, read_text, shown
from elastic.chaos.traces import Drop, Level, read_levels, read_trace
from elastic.protocol.errors import WrongInput
from elastic.store.files import first_line_of_yaml

SHIPPED = Path(__file__).parent / "scenarios"
TRACES = Path(__file__).parent / "traces"

What = Literal[
    "kill", "stop", "slow", "term", "drain", "cut", "lossy", "corrupt", "fill", "capacity"
]
WHATS: dict[str, str] = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP, and SIGCONT after for_s if given",
    "slow": "SIGSTOP for a part of every 0.1 s: all takes `slower` times as long, for_s seconds",
    "term": "SIGTERM, as a spot notice does",
    "drain": "a drain notice for the node in Ray, with a deadline of for_s seconds",
    "cut": "no packet passes between the node and the cluster's others, for_s seconds",
    "lossy": "the part `loss` of these packets is lost, for_s seconds",
    "corrupt": "bits flip in a file of the newest checkpoint",
    "fill": "a file takes all room of the run's disk, for_s seconds",
    "capacity": "a trace's machines: slots that it lacks are taken from the run, and given back",
}
LASTING = ("stop", "slow", "drain", "cut", "lossy", "fill")
"""What `for_s` goes with..."""
BOUNDED = ("cut", "lossy", "fill")
"""...and what there is not without it: nobody would undo them."""
OF_NODES = ("drain", "cut", "lossy")
PLACES: dict[str, Literal["checkpoint", "storage", "cluster"]] = {
    "corrupt": "checkpoint",
    "fill": "storage",
    "capacity": "cluster",
}
"""What hits no process but this."""
PHASES = ("waiting", "forming", "running", "pausing", "suspending", "ending")
"""The phases of journal.jsonl during which something can be done to a run."""
MAX_DEPTH = 16
"""Of lists and mappings in each other; a scenario has four."""
MAX_WHOLE = 2**63 - 1
MAX_SLOWER = 10.0
MAX_FILL_GB = 64.0
MIN_NUMBER, MAX_NUMBER = 1e-9, 1e9
"""In seconds: up to thirty years."""
OPTIONS: dict[str, tuple[What, float, float, str]] = {
    "slower": ("slow", 1.0, MAX_SLOWER, "how many times as long everything takes"),
    "loss": ("lossy", 0.0, 1.0, "the part of the packets that is lost"),
    "at_most_gb": ("fill", 0.0, MAX_FILL_GB, "a disk with more room is left alone"),
}
"""Field -> the fault that it belongs to, what it must be above, what it is at most, its meaning."""


@dataclass(frozen=True, slots=True)
class Whom:
    """`rank` (-1: a random one), all on the `node_of` such a rank, the controller, the driver; or
    no process (PLACES)."""

    kind: Literal["rank", "node_of", "controller", "driver", "checkpoint", "storage", "cluster"]
    rank: int = -1

    def __str__(self) -> str:
        name = "a random rank" if self.rank < 0 else f"rank {self.rank}"
        return {"rank": name, "node_of": f"the node of {name}"}.get(self.kind, f"the {self.kind}")


@dataclass(frozen=True, slots=True)
class After:
    """So many seconds after the start; the start is the first look at a run that has a step, or
    the fault that `Fault.after_fault` names."""

    seconds: float


@dataclass(frozen=True, slots=True)
class AtStep:
    """When so many steps are committed, counted from the start where there is `after_fault`."""

    step: int


@dataclass(frozen=True, slots=True)
class InPhase:
    """When the journal says that the run has entered this phase."""

    phase: str


@dataclass(frozen=True, slots=True)
class Every:
    seconds: float
    times: int


@dataclass(frozen=True, slots=True)
class Rate:
    """Random instants (a Poisson process)."""

    per_minute: float
    for_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """An availability trace, `faster` times as fast: its losses, as parts of the run's size; or,
    for capacity, what there is."""

    name: str
    faster: float
    drops: tuple[Drop, ...] = ()
    levels: tuple[Level, ...] = ()


When = After | AtStep | InPhase | Every | Rate | Trace


@dataclass(frozen=True, slots=True)
class Fault:
    what: What
    whom: Whom
    when: When
    for_s: float | None = None
    slower: float = 2.0
    """Of slow: how many times as long everything takes."""
    loss: float = 0.1
    """Of lossy: the part of the packets that is lost."""
    at_most_gb: float = 1.0
    """Of fill: a disk with more room (GB) is left alone."""
    after_fault: int = 0
    """Position in the scenario, from 1, of the fault that must have happened first; 0: none."""


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    about: str
    seed: int
    faults: tuple[Fault, ...]


def find_scenario(name: str) -> Path:
    """A shipped scenario by its name, or a file. WrongInput if there is neither."""
    shipped = SHIPPED / f"{name}.yaml"
    path = shipped if "/" not in name and is_file(shipped) else Path(name)
    if not is_file(path):
        raise WrongInput(
            f"there is no scenario {name!r}: give a YAML file or one of "
            f"{', '.join(shipped_names())} (see `elastic chaos list`)"
        )
    return path


def shipped_names() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def read_scenario(name: str) -> Scenario:
    """The scenario of that name or file. WrongInput says what in it is wrong."""
    path = find_scenario(name)
    return parse_scenario(read_yaml(read_text(path), str(path)), str(path), path.parent)


def read_yaml(text: str, place: str) -> object:
    """The values of a YAML text. WrongInput if it is none, or one that might never end."""
    import yaml  # here, because no other command needs it

    try:
        depth = 0
        for event in cast(Any, yaml).parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):  # a few lines of which can mean gigabytes
                raise WrongInput(f"{place}: *{event.anchor} is an alias: write it out")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise WrongInput(f"{place}: lists and mappings are more than {MAX_DEPTH} deep")
        return yaml.safe_load(text)
    except WrongInput:
        raise
    except Exception as error:  # PyYAML lets through what the constructor of a value raises
        why = one_line(first_line_of_yaml(error))
        raise WrongInput(f"{place} is no YAML: {why}") from error


def parse_scenario(values: object, place: str, folder: Path) -> Scenario:
    """`folder` is where trace files are looked for first, then the shipped ones."""
    fields = mapping(values, place, {"name", "about", "seed", "faults"})
    faults: object = fields.get("faults")
    if not isinstance(faults, list) or not faults:
        raise WrongInput(f"{place}: faults must be a list with at least one fault")
    seed = whole(fields.get("seed", 0), f"{place}: seed", at_least=0)
    parsed = tuple(
        parse_fault(fault, f"{place}: fault {number}", number, folder)
        for number, fault in enumerate(cast(list[object], faults), start=1)
    )
    name = text_of(fields.get("name", ""), f"{place}: name") or Path(place).stem
    about = text_of(fields.get("about", ""), f"{place}: about").strip()
    return Scenario(name, about, seed, parsed)


def parse_fault(values: object, place: str, number: int, folder: Path) -> Fault:
    keys = {"what", "whom", "when", "for_s", *OPTIONS}
    fields = mapping(values, place, keys)
    what: object = fields.get("what")
    if what not in get_args(What):
        known = ", ".join(get_args(What))
        raise WrongInput(f"{place}: what is {shown(what)}, must be one of {known}")
    for_s = number_of(fields["for_s"], f"{place}: for_s") if "for_s" in fields else None
    if for_s is not None and what not in LASTING:
        listed = f"{', '.join(LASTING[:-1])} and {LASTING[-1]}"
        raise WrongInput(f"{place}: for_s goes with {listed}, not with {what}")
    if for_s is None and what in BOUNDED:
        raise WrongInput(f"{place}: {what} needs for_s: the seconds until it is undone")
    options = parse_options(cast(What, what), fields, place)
    whom = parse_whom_of(cast(What, what), fields.get("whom"), place)
    is_capacity = what == "capacity"
    when, after_fault = parse_when(
        fields.get("when"), f"{place}: when", number, folder, has_gains=is_capacity
    )
    if is_capacity and not isinstance(when, Trace):
        raise WrongInput(f"{place}: capacity follows a trace: write when: {{trace: NAME}}")
    return Fault(cast(What, what), whom, when, for_s, after_fault=after_fault, **options)


def parse_options(what: What, fields: dict[str, object], place: str) -> dict[str, float]:
    """What says how strong the fault is, as far as it is given."""
    options: dict[str, float] = {}
    for name, (of, above, most, meaning) in OPTIONS.items():
        if name not in fields:
            continue
        if what != of:
            raise WrongInput(f"{place}: {name} goes with {of}, not with {what}")
        options[name] = number_of(fields[name], f"{place}: {name}")
        if not above < options[name] <= most:
            raise WrongInput(
                f"{place}: {name} is {options[name]:g}, must be above {above:g}, and at most "
                f"{most:g}: {meaning}"
            )
    return options


def parse_whom_of(what: What, value: object, place: str) -> Whom:
    """Whom a fault of that kind can hit."""
    if what in PLACES:
        kind = PLACES[what]
        if value not in (None, kind):
            raise WrongInput(f"{place}: {what} hits the {kind}, not {shown(value)}: leave whom out")
        return Whom(kind)
    if value is None:
        value = {"node_of": "random"} if what in ("cut", "lossy") else "random"
    whom = parse_whom(value, f"{place}: whom")
    if what in OF_NODES and whom.kind != "node_of":
        raise WrongInput(
            f"{place}: {what} is of a node: write whom: {{node_of: 0}} or node_of: random"
        )
    return whom


def parse_whom(value: object, place: str) -> Whom:
    if value in ("controller", "driver"):
        return Whom(cast(Any, value))
    if value == "random":
        return Whom("rank")
    fields = mapping(value, place, {"rank", "node_of"})
    if len(fields) != 1:
        raise WrongInput(
            f"{place}: give one of random, controller, driver, {{rank: N}}, {{node_of: N}}"
        )
    [(kind, rank)] = fields.items()
    chosen = -1 if rank == "random" else whole(rank, f"{place}: {kind}", at_least=0)
    return Whom(cast(Any, kind), chosen)


def parse_when(
    value: object, place: str, number: int, folder: Path, *, has_gains: bool = False
) -> tuple[When, int]:
    """has_gains: all of a trace is meant, else its losses."""
    known = {"after_s", "step", "phase", "every_s", "times", "per_minute", "for_s", "trace"}
    fields = mapping(value, place, known | {"faster", "after_fault"})
    after_fault = whole(fields.pop("after_fault", 0), f"{place}: after_fault", at_least=0)
    if after_fault >= number:
        raise WrongInput(f"{place}: after_fault must name an earlier fault than {number}")
    match sorted(fields):
        case ["after_s"]:
            return After(number_of(fields["after_s"], f"{place}: after_s", 0.0)), after_fault
        case ["step"]:
            return AtStep(whole(fields["step"], f"{place}: step", at_least=1)), after_fault
        case ["phase"]:
            return InPhase(phase_of(fields["phase"], place)), after_fault
        case ["every_s", "times"]:
            times = whole(fields["times"], f"{place}: times", at_least=1)
            return Every(number_of(fields["every_s"], f"{place}: every_s"), times), after_fault
        case ["for_s", "per_minute"]:
            per_minute = number_of(fields["per_minute"], f"{place}: per_minute")
            return Rate(per_minute, number_of(fields["for_s"], f"{place}: for_s")), after_fault
        case ["trace"] | ["faster", "trace"]:
            faster = number_of(fields.get("faster", 1.0), f"{place}: faster")
            name = text_of(fields["trace"], f"{place}: trace")
            path = find_trace(name, folder, place)
            if has_gains:
                return Trace(name, faster, levels=read_levels(path)), after_fault
            return Trace(name, faster, read_trace(path)), after_fault
        case found:
            raise WrongInput(
                f"{place} has {', '.join(found) or 'nothing'}: give one of after_s; step; phase; "
                "every_s and times; per_minute and for_s; trace and faster"
            )


def phase_of(value: object, place: str) -> str:
    if value not in PHASES:
        raise WrongInput(f"{place}: phase is {shown(value)}, must be one of {', '.join(PHASES)}")
    return cast(str, value)


def find_trace(name: str, folder: Path, place: str) -> Path:
    for path in (folder / name, TRACES / f"{name}.csv", TRACES / name):
        if is_file(path):
            return path
    shipped = ", ".join(sorted(path.stem for path in TRACES.glob("*.csv")))
    raise WrongInput(f"{place}: there is no trace {shown(name)}; shipped are {shipped}")


# --- values --------------------------------------------------------------------
def mapping(value: object, place: str, known: set[str]) -> dict[str, object]:
    words = ", ".join(sorted(known))
    if not isinstance(value, Mapping):
        raise WrongInput(f"{place} is {shown(value)}, must be a mapping of {words}")
    fields = cast(Mapping[object, object], value)
    for key in fields:
        if key not in known:
            raise WrongInput(f"{place}: {shown(key)} is none of {words}")
    return {str(key): item for key, item in fields.items()}


def text_of(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise WrongInput(f"{place} is {shown(value)}, must be text: put it in quotes")
    return value


def whole(value: object, place: str, *, at_least: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= MAX_WHOLE:
        return value
    raise WrongInput(
        f"{place} is {shown(value)}, must be a whole number from {at_least}, below 2**63"
    )


def number_of(value: object, place: str, at_least: float | None = None) -> float:
    """A number above 0, or from `at_least`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_known = MIN_NUMBER <= value <= MAX_NUMBER or value == at_least
        if is_known:
            return float(value)
    raise WrongInput(
        f"{place} is {shown(value)}, must be a number above 0, from {MIN_NUMBER:g} to "
        f"{MAX_NUMBER:g}"
    )
