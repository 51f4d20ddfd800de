"""What a worker needs of its node, and which nodes it may be placed on, by their labels.

Ray places it; what the cluster has is elastic/on_ray/placement's.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

GROUP = "ray.io/node-group"
ACCELERATOR, OF_ACCELERATOR = "accelerator_type:", 0.001
"""How Ray spells a kind of accelerator as a resource, and what of it one worker takes."""

ANY = "any"
NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
KEY = re.compile(rf"(?:[A-Za-z0-9][A-Za-z0-9.-]*/)?{NAME}")
VALUE = re.compile(rf"!?(?:{NAME}|in\({NAME}(?:, ?{NAME})*\))")
"""Ray's, as Kubernetes' labels: a value, one of several, or, with a mark, any but these."""
AMOUNT = re.compile(r"\d+(\.\d+)?")
AT_COMMAS = re.compile(r",(?![^(]*\))")

Selector = dict[str, str]
"""By label: what its value must be."""


def parse_labels(text: str) -> tuple[Selector, ...]:
    """`KEY=VALUE,KEY=VALUE; KEY=VALUE`: choices in the order of preference. A value may be
    `!VALUE`, `in(A,B)` or `!in(A,B)`, the last choice `any`. ValueError for anything else."""
    choices = [choice.strip() for choice in text.split(";")]
    return tuple({} if choice == ANY else _selector(choice, text) for choice in choices)


def _selector(choice: str, text: str) -> Selector:
    found: Selector = {}
    for pair in AT_COMMAS.split(choice):
        key, _, value = (part.strip() for part in pair.partition("="))
        if not (KEY.fullmatch(key) and VALUE.fullmatch(value)) or key in found:
            raise ValueError(
                f"labels={text!r}: {pair.strip()!r} is no KEY=VALUE of a label: give such as "
                "ray.io/market-type=spot; ray.io/market-type=on-demand, or end with any"
            )
        found[key] = value
    return found


def matches(selector: Selector, labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels is one of them, as Ray sees it."""
    return all(_is_one(wanted, labels.get(key)) for key, wanted in selector.items())


def _is_one(wanted: str, value: str | None) -> bool:
    is_not, rest = wanted.startswith("!"), wanted.removeprefix("!")
    is_list = rest.startswith("in(")
    values = [v.strip() for v in rest[3:-1].split(",")] if is_list else [rest]
    return (value in values) != is_not


def parse_amounts(text: str) -> dict[str, float]:
    """`NAME=AMOUNT,NAME=AMOUNT`, of Ray's resources. ValueError for anything else."""
    found: dict[str, float] = {}
    for pair in text.split(","):
        name, _, amount = (part.strip() for part in pair.partition("="))
        if name in ("CPU", "GPU"):
            raise ValueError(
                f"worker_resources={text!r}: {name}s are asked for with "
                f"{'cpus_per_worker' if name == 'CPU' else 'device'}"
            )
        is_amount = AMOUNT.fullmatch(amount) and float(amount) > 0
        if not name or name in found or not is_amount:
            raise ValueError(
                f"worker_resources={text!r}: {pair.strip()!r} is no NAME=AMOUNT of a resource, "
                "such as TPU=4"
            )
        found[name] = float(amount)
    return found


@dataclass(frozen=True)
class Machine:
    """One live node, by Ray's count."""

    node_id: str
    ip: str
    resources: dict[str, float]
    """Everything that it has, whoever uses it now."""
    labels: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def group(self) -> str:
        """Its node type, where `ray up` or KubeRay has made it; else empty."""
        return self.labels.get(GROUP, "")

    @property
    def gpus(self) -> int:
        return int(self.resources.get("GPU", 0))


@dataclass(frozen=True)
class Need:
    """What Ray must give one worker."""

    cpus: int
    gpus: int
    labels: tuple[Selector, ...] = ()
    """In the order of preference; empty: on any node."""
    accelerator_type: str = ""
    others: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further resources."""

    @property
    def amounts(self) -> dict[str, float]:
        """By Ray's name, what there may be nowhere last."""
        found: dict[str, float] = {"CPU": self.cpus}
        if self.gpus:
            found["GPU"] = self.gpus
        found.update(self.others)
        if self.accelerator_type:
            found[f"{ACCELERATOR}{self.accelerator_type}"] = OF_ACCELERATOR
        return found

    @property
    def options(self) -> dict[str, object]:
        """For Ray's `options`, of an actor."""
        found: dict[str, object] = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        if self.others:
            found["resources"] = dict(self.others)
        if self.accelerator_type:
            found["accelerator_type"] = self.accelerator_type
        if self.labels:
            first, *rest = self.labels
            found["label_selector"] = first
            found["fallback_strategy"] = [{"label_selector": other} for other in rest] or None
        return found

    @property
    def is_special(self) -> bool:
        """Whether only a cluster that was made for it has it."""
        return bool(self.labels or self.accelerator_type or self.others)

    def fits(self, machine: Machine) -> bool:
        has = machine.resources
        is_large = all(has.get(kind, 0) >= amount for kind, amount in self.amounts.items())
        return is_large and self.is_on(machine)

    def is_on(self, machine: Machine) -> bool:
        """Whether the labels allow for that node."""
        return not self.labels or any(matches(choice, machine.labels) for choice in self.labels)

    def __str__(self) -> str:
        cpus = "1 CPU" if self.cpus == 1 else f"{self.cpus} CPUs"
        parts = [cpus, *([f"{self.gpus} GPU"] if self.gpus else [])]
        parts += [f"{amount:g} {name}" for name, amount in self.others.items()]
        if self.accelerator_type:
            parts.append(f"accelerator_type {self.accelerator_type}")
        text = " and ".join(parts)
        return f"{text} on a node with {labels_text(self.labels)}" if self.labels else text


def labels_text(choices: Iterable[Selector]) -> str:
    """As it is asked for."""
    texts = (",".join(f"{k}={v}" for k, v in choice.items()) for choice in choices)
    return " or else ".join(text or "any labels" for text in texts)
