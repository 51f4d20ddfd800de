"""Whole numbers among the attributes of a block's modules, such as a block's place: two
blocks may differ in those that their code does not read.

Only Python can read them: a module's class tells of it while the code runs.
"""

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import nn

from workers.torch_private.modules import attributes_of

Place: TypeAlias = tuple[int, str]
"""Which of the block's modules has it, and its name."""


def numbers_of(modules: Sequence[nn.Module]) -> dict[Place, int]:
    """modules: all of a block's."""
    return {
        (place, name): value
        for place, module in enumerate(modules)
        for name, value in attributes_of(module)
        if may_differ(module, value)
    }


def may_differ(module: nn.Module, value: object) -> bool:
    """Whether it would be seen if this attribute of the module was read."""
    return type(value) is int and _tells(type(module))


def _tells(kind: type[nn.Module]) -> bool:
    is_torchs = kind.__module__.partition(".")[0] == "torch"
    return not is_torchs and kind.__getattribute__ is object.__getattribute__


class NumbersRead:
    """Which of a block's numbers are read or written meanwhile, in `found`."""

    def __init__(self, modules: Sequence[nn.Module], numbers: dict[Place, int]) -> None:
        """numbers: as `numbers_of` these modules."""
        self.found: set[Place] = set()
        self._numbers = numbers
        self._places = {id(module): place for place, module in enumerate(modules)}
        self._kinds = {type(modules[place]) for place, _ in numbers}

    def __enter__(self) -> None:
        def get(module: nn.Module, name: str) -> Any:
            if name != "__dict__":
                self._note(module, name)
            elif (asking := sys._getframe(1)).f_globals.get("__name__") != nn.Module.__module__:
                self._note_all(module)
            elif asking.f_code.co_name == "__setattr__":
                self._note(module, asking.f_locals["name"])
            return object.__getattribute__(module, name)

        for kind in self._kinds:
            type.__setattr__(kind, "__getattribute__", get)

    def __exit__(self, *_: object) -> None:
        for kind in self._kinds:
            type.__delattr__(kind, "__getattribute__")

    def _note(self, module: nn.Module, name: str) -> None:
        at = (self._places.get(id(module), -1), name)
        if at in self._numbers:
            self.found.add(at)

    def _note_all(self, module: nn.Module) -> None:
        place = self._places.get(id(module), -1)
        self.found |= {at for at in self._numbers if at[0] == place}
