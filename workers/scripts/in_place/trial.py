"""One step of a small model in place, and one of stock DDP: where they differ, this torch is not as
we know it, and scripts run at level 0."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elastic.protocol.errors import PeerLost, in_words
from elastic.protocol.messages.to_controller import ScriptSteps
from elastic.protocol.step_record import NONE_APPLIED, AppliedRecord
from workers.distributed.process_group import Alone, Group
from workers.scripts.default_group import DefaultGroup, as_default
from workers.scripts.in_place.course import Course
from workers.scripts.in_place.loader import Loaders
from workers.scripts.in_place.seams import standing_in
from workers.scripts.randomness import untouched
from workers.torch_private.version import untested


class Nobody:
    """The call of a lone rank, which loses nobody."""

    has_changed, generation = False, 0

    def regroup(self, error: PeerLost | None) -> Group | None:
        raise AssertionError("a lone rank lost a peer")

    def deny(self, why: str) -> None:
        raise AssertionError(why)

    def say_level(self, level: int, reason: str) -> None: ...

    def tell_steps(self, said: ScriptSteps) -> AppliedRecord:
        return NONE_APPLIED

    how_it_grows = "nobody enters"

    def end_unit(self) -> None: ...

    def waited_for_data(self, seconds: float) -> None: ...

    def unwind(self) -> NoReturn:
        raise AssertionError("nobody calls it again")


@cache
def refusal() -> str:
    """Why nothing is committed in place here; empty: it is."""
    if why := untested():
        return why
    try:
        with untouched():
            stock, ours = gradients(in_place=False), gradients(in_place=True)
    except Exception as error:
        return f"the trial of DistributedDataParallel raised {in_words(error)}"
    is_equal = all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True))
    return "" if is_equal else "the trial of DistributedDataParallel gave another gradient"


def gradients(*, in_place: bool) -> list[Tensor]:
    """And buffers, after a synchronised backward behind one that was not."""
    torch.manual_seed(1)
    group = DefaultGroup(Alone("trial"))
    course = Course("trial", group, Nobody())
    installed: AbstractContextManager[None] = nullcontext()
    if in_place:
        installed = standing_in(course, Loaders(course))
    with as_default(group), installed:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model = DistributedDataParallel(net)
        with model.no_sync():
            model(torch.randn(5, 3)).square().mean().backward()
        model(torch.randn(5, 3)).square().mean().backward()
        if in_place and course.operations.result is None:
            raise RuntimeError("no callback at the end of the backward")
        found = [p.grad for p in net.parameters() if p.grad is not None]
        assert len(found) == len(list(net.parameters()))
        return [*found, *net.buffers()]
