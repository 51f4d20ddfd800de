"""A sweep: which job runs under which scenarios, seeds and options. Read from YAML and checked.

Carrying it out is elastic/cli/experiment.py's.
"""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from elastic.chaos.scenario import (
    Scenario,
    mapping,
    number_of,
    read_scenario,
    read_yaml,
    text_of,
    whole,
)
from elastic.chaos.text import read_text, shown
from elastic.protocol.errors import WrongInput

NO_FAULTS = "none"
MOST_RUNS = 10_000
KEYS = {"job", "place", "scenarios", "seeds", "vary", "limit_s"}
Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Condition:
    """What runs are compared by: all of one condition differ in their seeds only."""

    scenario: str
    """As it is written in the sweep: a shipped name, a file, or `none`."""
    options: tuple[tuple[str, Value], ...] = ()
    """Keys of a job file and their values, in the order of the sweep."""

    def __str__(self) -> str:
        return ", ".join([Path(self.scenario).stem, *(f"{k}={v}" for k, v in self.options)])

    @property
    def slug(self) -> str:
        """As text, for names of files. Other conditions may have the same."""
        return re.sub(r"[^a-zA-Z0-9.]+", "-", str(self)).strip("-.")[:80] or "run"


@dataclass(frozen=True, slots=True)
class Point:
    """One run."""

    condition: Condition
    seed: int
    """Of the scenario."""
    is_alike: bool = False
    """Another condition of the sweep has the same slug."""

    @property
    def name(self) -> str:
        """Of its run directory: for people, and another one for every point of a sweep."""
        told = self.condition.slug
        if self.is_alike:
            content = repr(self.condition).encode()
            told += f"-{hashlib.blake2b(content, digest_size=3).hexdigest()}"
        return f"{told}-seed{self.seed}"


@dataclass(frozen=True, slots=True)
class Sweep:
    job: Path
    place: Path
    """Where its runs and its results are."""
    conditions: tuple[Condition, ...]
    seeds: tuple[int, ...]
    scenarios: Mapping[str, Scenario]
    """By the word in `Condition.scenario`; without `none`."""
    limit_s: float | None = None
    """A run that takes longer is stopped."""

    @property
    def points(self) -> list[Point]:
        """Seed by seed, so that whoever ends it early has some of every condition."""
        slugs = Counter(condition.slug for condition in self.conditions)
        return [
            Point(condition, seed, is_alike=slugs[condition.slug] > 1)
            for seed in self.seeds
            for condition in self.conditions
        ]


def read_sweep(path: Path) -> Sweep:
    """WrongInput says what in it is wrong. Whether a job file knows an option is not looked at."""
    place, folder = str(path), path.absolute().parent
    fields = mapping(read_yaml(read_text(path), place), place, KEYS)
    missing = [key for key in ("job", "place", "scenarios") if key not in fields]
    if missing:
        raise WrongInput(f"{place}: {missing[0]} is missing")
    limit_s = number_of(fields["limit_s"], f"{place}: limit_s") if "limit_s" in fields else None
    words = listed(fields["scenarios"], f"{place}: scenarios")
    scenarios: dict[str, Scenario] = {}
    names: list[str] = []
    for value in words:
        word = text_of(value, f"{place}: a scenario")
        is_beside = word.endswith((".yaml", ".yml"))
        word = str(folder / word) if is_beside else word
        if word in names:
            raise WrongInput(f"{place}: scenario {shown(value)} is listed twice")
        names.append(word)
        if word != NO_FAULTS:
            scenarios[word] = read_scenario(word)
    vary = vary_of(fields.get("vary", {}), f"{place}: vary")
    conditions = tuple(
        Condition(name, tuple(zip(vary, values, strict=True)))
        for name in names
        for values in itertools.product(*vary.values())
    )
    seeds = seeds_of(fields.get("seeds", 1), f"{place}: seeds")
    if len(conditions) * len(seeds) > MOST_RUNS:
        count = len(conditions) * len(seeds)
        raise WrongInput(f"{place} has {count} runs, more than {MOST_RUNS}")
    job = folder / text_of(fields["job"], f"{place}: job")
    results = (folder / Path(text_of(fields["place"], f"{place}: place")).expanduser()).resolve()
    if "://" in str(fields["place"]):
        raise WrongInput(f"{place}: place must be a folder of this machine: faults are put from it")
    return Sweep(job, results, conditions, seeds, scenarios, limit_s)


def seeds_of(value: object, place: str) -> tuple[int, ...]:
    """So many from 0 on, or a list."""
    if not isinstance(value, list):
        count = whole(value, place, at_least=1)
        if count > MOST_RUNS:
            raise WrongInput(f"{place} is {count}, more than {MOST_RUNS}")
        return tuple(range(count))
    seeds = listed(cast("list[object]", value), place)
    found = tuple(whole(seed, f"{place}: a seed", at_least=0) for seed in seeds)
    if len(set(found)) < len(found):
        raise WrongInput(f"{place}: a seed is listed twice")
    return found


def vary_of(value: object, place: str) -> dict[str, list[Value]]:
    if not isinstance(value, Mapping):
        raise WrongInput(f"{place} is {shown(value)}, must be a mapping of options to lists")
    found: dict[str, list[Value]] = {}
    for key, values in cast("Mapping[object, object]", value).items():
        chosen = listed(values, f"{place}.{key}")
        if not all(isinstance(each, str | int | float) for each in chosen):
            raise WrongInput(f"{place}.{key}: values must be text, numbers or true and false")
        if len({repr(each) for each in chosen}) < len(chosen):
            raise WrongInput(f"{place}.{key}: a value is listed twice")
        found[str(key)] = cast("list[Value]", chosen)
    return found


def listed(value: object, place: str) -> list[object]:
    """A list that is not empty."""
    found = cast("list[object]", value) if isinstance(value, list) else []
    if not found:
        raise WrongInput(f"{place} is {shown(cast(object, value))}, must be a list with an entry")
    return found
