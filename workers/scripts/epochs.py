"""What of a script goes on with it when it is called again at an epoch, for `elastic.torch`.

Models in DistributedDataParallel, optimizers, schedules and scalers are known as the script makes
them; whatever else is to go on is named by `keep`. It is kept in the run directory at the end of
each epoch, and newcomers enter then.
"""

import gc
import hashlib
import io
import json
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR

from elastic.store.files import write_json
from workers.scripts.in_place.course import Course
from workers.scripts.reports import EPOCHS, MANIFESTS, Reports, Trained
from workers.torch_private.modules import has_child
from workers.train_state.digest import weights_sha256

log = logging.getLogger(__name__)

KINDS: dict[str, tuple[type, ...]] = {
    "model": (DistributedDataParallel,),
    "optimizer": (Optimizer,),
    "schedule": (LRScheduler, SequentialLR, ChainedScheduler),
    "scaler": (GradScaler,),
}


class Running(Protocol):
    """A call of the script."""

    @property
    def rank(self) -> int: ...
    @property
    def reports(self) -> Reports: ...
    @property
    def generation(self) -> int: ...
    @property
    def course(self) -> Course | None: ...
    @property
    def trained(self) -> Trained: ...
    def commit(self, publish: Callable[[], None]) -> None: ...
    def broadcast(self, value: Any) -> Any: ...


class Epochs:
    """Of one call of the script."""

    def __init__(self, call: Running) -> None:
        self._call = call
        self._made: list[weakref.ref[Any]] = []
        """What the script has made of the known kinds, in its order."""
        self._named: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}
        """What goes on, by name, from where `epochs` has begun; the same on all ranks."""
        self.has_begun = False
        """The script counts its epochs by ours."""
        self._has_told_late = False
        self._newest_model: nn.Module | None = None
        """It is there when the script has returned."""

    @contextmanager
    def at_hand(self) -> Iterator["Epochs"]:
        """Within, `elastic.torch` answers from this call, and what the script makes is known."""
        _at_hand.append(self)
        with ExitStack() as stack:
            for owner in [owner for kind in KINDS.values() for owner in kind]:
                stack.enter_context(told(owner, self._hear))
            try:
                yield self
            finally:
                _at_hand.pop()

    def weights_sha256(self) -> str:
        """Of the model that was put into DistributedDataParallel last; empty: none was."""
        model = self._newest_model
        if model is None or not has_child(model, "module"):  # torch has refused to make it
            return ""
        return weights_sha256(model)

    def _hear(self, made: Any) -> None:
        if isinstance(made, DistributedDataParallel):
            self._newest_model = made
        if all(ref() is not made for ref in self._made):
            self._made.append(weakref.ref(made))

    def keep(self, objects: dict[str, Any]) -> None:
        if self.has_begun:
            raise RuntimeError("keep() after epochs() has begun; call it before")
        for name, value in objects.items():
            state_of(name, value)
        self._named |= objects

    def go_on_missing(self, sums: str | None, samples: str | None) -> None:
        """None: as before."""
        if self._call.course is not None:
            operations = self._call.course.operations
            operations.sums = sums or operations.sums
            operations.samples = samples or operations.samples

    def iterate(self, num: int) -> Iterator[int]:
        """The epochs that are left of so many."""
        if self.has_begun:
            raise RuntimeError("epochs() a second time in one call of the script; use range()")
        self.has_begun = True
        self._kept = self._objects()
        self._compare()
        first = self._load()
        for epoch in range(first, num):
            yield epoch
            if epoch + 1 < num:
                self._save(epoch + 1)

    # --- states -------------------------------------------------------------------------------
    def _objects(self) -> dict[str, Any]:
        """What goes on, by name: the kind and the number in it, or what the script calls it."""
        found: dict[str, Any] = {}
        gc.collect()  # what nothing but a cycle holds is found on some ranks, and on others not
        alive = [made for ref in self._made if (made := ref()) is not None]
        for kind, types in KINDS.items():
            of_kind = [made for made in alive if isinstance(made, types)]
            found |= {f"{kind} {number}": made for number, made in enumerate(of_kind, 1)}
        return found | {f"{name} of keep()": value for name, value in self._named.items()}

    def _compare(self) -> None:
        """RuntimeError if this rank has made other objects than rank 0."""
        of_lowest = set(self._call.broadcast(sorted(self._kept)))
        if differing := ", ".join(sorted(of_lowest ^ self._kept.keys())):
            raise RuntimeError(
                "epochs(): ranks have made different objects, which differ in: "
                f"{differing}; make the same ones on all ranks before epochs()"
            )

    def _save(self, epoch: int) -> None:
        """All ranks call it alike."""
        call = self._call
        content = io.BytesIO()
        if call.rank == 0:
            states = {name: state_of(name, value) for name, value in self._kept.items()}
            torch.save(states | dict.fromkeys(self._late()), content)

        def publish() -> None:
            if call.rank == 0 and content.tell():
                publish_state(call, epoch, content.getvalue())

        call.commit(publish)

    def _late(self) -> list[str]:
        """What was made too late to go on, told once: a call from this epoch on is refused."""
        late = [name for name in self._objects() if name not in self._kept]
        if late and not self._has_told_late:
            self._has_told_late = True
            log.warning(
                "epochs(): made after it had begun and not kept: %s; after a loss the script "
                "cannot go on; make it before epochs()",
                ", ".join(late),
            )
        return late

    def _load(self) -> int:
        """The state of the newest epoch that has ended, if one has; and which one is next."""
        call = self._call
        folder = call.reports.folder.at(MANIFESTS)
        newest = None
        if call.rank == 0 and folder.exists(EPOCHS):
            newest = json.loads(folder.read(EPOCHS))
        newest = call.broadcast(newest)
        if newest is None:
            return 0
        content = folder.read(newest["file"])
        if hashlib.sha256(content).hexdigest() != newest["sha256"]:
            raise RuntimeError(f"epochs(): {newest['file']} is not what was kept")
        states, objects = torch.load(io.BytesIO(content), weights_only=True), self._kept
        if states.keys() != objects.keys():
            differing = ", ".join(sorted(states.keys() ^ objects.keys()))
            raise RuntimeError(
                "epochs(): the script has made other objects than before, which differ in: "
                f"{differing}; make all of them before epochs()"
            )
        for name, value in objects.items():
            take_state(value, states[name])
        return newest["epoch"]


def publish_state(call: Running, epoch: int, content: bytes) -> None:
    folder = call.reports.folder.at(MANIFESTS)
    folder.create()
    file = f"epoch-{epoch}-{call.generation}.pt"
    before = [n for n in folder.names() if n.startswith("epoch-") and n != file]
    folder.write(file, content)
    sha256 = hashlib.sha256(content).hexdigest()
    newest = {"epoch": epoch, "file": file, "sha256": sha256, "trained": asdict(call.trained)}
    write_json(folder, EPOCHS, newest)
    for name in before:
        folder.delete(name)


def state_of(name: str, value: Any) -> Any:
    """ValueError for what has none."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, DistributedDataParallel):
        return value.module.state_dict()
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return value.state_dict()
    raise ValueError(
        f"keep({name}=...): {type(value).__name__} has no state_dict() and load_state_dict(); "
        "modules, optimizers, tensors and torch.Generators are kept"
    )


@torch.no_grad()
def take_state(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, Tensor):
        value.copy_(state)
    elif isinstance(value, DistributedDataParallel):
        value.module.load_state_dict(state)
    else:
        value.load_state_dict(state)


_at_hand: list[Epochs] = []
"""Of the call that is running in this process."""


def current() -> Epochs | None:
    """None: no script's run is under way in this process."""
    return _at_hand[-1] if _at_hand else None


@contextmanager
def told(owner: Any, hear: Callable[[Any], None]) -> Iterator[None]:
    """Within, what is made of this class is heard of."""
    torchs_own = owner.__init__

    @wraps(torchs_own)
    def make(self: Any, *args: Any, **named: Any) -> None:
        hear(self)
        torchs_own(self, *args, **named)

    owner.__init__ = make
    try:
        yield
    finally:
        owner.__init__ = torchs_own
