"""What a script finds undone when it is called again in its process."""

import multiprocessing
import sys
from types import ModuleType

from workers.scripts.afresh import forget_accelerate, no_start_method


def test_a_script_may_choose_a_start_method_in_each_call():
    before = multiprocessing.get_start_method(allow_none=True)
    for method in ("spawn", "forkserver"):
        with no_start_method():
            multiprocessing.set_start_method(method)
    assert multiprocessing.get_start_method(allow_none=True) == before


def test_accelerate_forgets_ranks_and_group(monkeypatch):
    """Its classes keep what they hold in themselves; of Accelerate 1.15."""

    held = {"partial": 3, "whole": 3, "gradients": 2}

    class AcceleratorState:
        @staticmethod
        def _reset_state(reset_partial_state: bool = False) -> None:
            del held["whole"]
            if reset_partial_state:
                del held["partial"]

    class GradientState:
        @staticmethod
        def _reset_state() -> None:
            del held["gradients"]

    forget_accelerate()
    state = ModuleType("accelerate.state")
    vars(state).update(AcceleratorState=AcceleratorState, GradientState=GradientState)
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    forget_accelerate()
    assert held == {}
