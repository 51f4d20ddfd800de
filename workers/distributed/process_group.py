"""The process group of one generation: reducing over it, and walking away from it.

A group is a `torch.distributed.ProcessGroup`: torch's meshes, functional collectives, tensor
parallelism and pipeline stages take it as it is (c10d.py). gloo.py and nccl.py are the groups over
torch's backends. What is reduced lives in workers/reduction.

Whatever is decided is decided over `Group.control`, whose tensors are in host memory and whose
waits raise. Where data travels by NCCL that is another group; else it is the group itself.

A gloo operation whose peer is frozen cannot be aborted (measured, torch 2.13), so a survivor
abandons it: waiting ends at once, the group is kept until its threads have come back, and nobody
reuses a buffer that an abandoned operation may still write.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from traceback import clear_frames
from typing import Any

import torch.distributed as dist
from torch import Tensor

from elastic.protocol.errors import PeerLost
from elastic.protocol.messages.to_worker import Form
from elastic.protocol.worker_spec import WorkerSpec
from workers.distributed import registry
from workers.distributed.c10d import CollectiveGroup, Copies
from workers.distributed.device_wait import to_host
from workers.distributed.group_spec import GroupSpec, name_of
from workers.distributed.pending import (
    Abandonable,
    Aside,
    OnWait,
    Pending,
    Settling,
    Waitable,
    Waits,
    What,
    failure_of,
    forming_failure_of,
)
from workers.distributed.store import StoreClient

UNNAMED = "unnamed"


class Group(CollectiveGroup):
    """Collectives among the members of one generation, over one of torch's backends.

    What our own code calls is here, and returns what is in flight; sums are over ranks. Tensors
    live on the backend's device.
    """

    backend_name = ""
    has_tags = True
    """They tell messages between two ranks apart (`send`, `recv`)."""

    def __init__(
        self, backend: Any, rank: int, world_size: int, name: str = UNNAMED, store: Any = None
    ) -> None:
        """backend: torch's own. name: carries run and generation. store: what the backend was
        formed over, kept as long as it may ask it."""
        super().__init__(backend, rank, world_size)
        self.name_of_group, self._store = name, store
        self._rank, self._size = rank, world_size
        self.changed = threading.Condition()
        self.is_abandoned = self._is_registered = False
        self._control: Group | None = None
        self.on_wait: OnWait = lambda number, name, size, part: None
        """Told before a wait: which collective of the group, its name, its elements (0 where
        ranks may differ), and the name of the part whose it is, or the one peer."""
        self.on_stuck: Callable[[str], None] = lambda why: None
        """Told, in a thread of its own, that the device does not let go of the group."""
        self.waiting_for: Aside = lambda phase: nullcontext()
        """Entered in waits: the host's for its device ("compute") or peers ("gather"); "stream"."""
        self._num_launched: Counter[str] = Counter()
        self._pending: deque[Pending] = deque()
        self._parts: list[Abandonable] = []
        """Given up with it; the groups among them are left with it, too."""
        self.form_part: Callable[[str, int, int], Formation] | None = None
        """(name, rank, world size): forms another group over the same store; None: this group has
        no parts."""

    # --- what a backend's own group answers -------------------------------------------------
    def finish(self, pending: Pending) -> None:
        """Wait for it. Raises PeerLost."""
        raise NotImplementedError

    def failure_of(self, error: RuntimeError) -> PeerLost:
        """What it raises; an error of this device as it is."""
        return failure_of(error)

    def refusal_of(self, error: RuntimeError) -> PeerLost:
        """What a launch has raised."""
        return self.failure_of(error)

    def abort(self) -> None:
        """Torch's name for `abandon`."""
        self.abandon()

    # --- who belongs to it ------------------------------------------------------------------
    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getGroupName(self) -> str:
        return self.name_of_group

    getGroupDesc = getGroupName

    def getBackendName(self) -> str:
        return self.backend_name

    def part(
        self, name: str, ranks: Sequence[int], timeout_s: float, *, is_apart: bool = False
    ) -> "Group":
        """The group of some of the ranks, this one among them, in that order; it is given up with
        this one. All of them must ask for it by the same name. is_apart: another group also where
        these are all. Raises PeerLost."""
        if len(ranks) == 1:
            part: Group = Alone(f"{self.name_of_group}/{name}")
        elif list(ranks) == list(range(self._size)) and not is_apart:
            return self
        else:
            assert self.form_part is not None
            formation = self.form_part(name, list(ranks).index(self._rank), len(ranks))
            self.adopt(formation)
            part = formation.wait(timeout_s)
            part.on_wait = lambda number, what, size, _: self.on_wait(number, what, size, name)
            part.on_stuck = lambda why: self.on_stuck(why)
            part.waiting_for = lambda phase: self.waiting_for(phase)
        part.register(ranks)
        self.adopt(part)
        return part

    def register(self, ranks: Sequence[int]) -> None:
        """Torch finds it by its name from now on, until it is left; once is enough. ranks: of its
        members in the generation."""
        if not self._is_registered:
            self._is_registered = True
            self.name_of_group = registry.unused(self.name_of_group)
            registry.register(self, self.backend_name, ranks)

    @property
    def control(self) -> "Group":
        """Of the same members in the same order; without one of its own, the group itself."""
        return self._control or self

    def take_control(self, control: "Group") -> None:
        """Decide over this one from now on; it is given up and left with this one."""
        self._control = control
        control.on_wait = lambda number, what, size, part: self.on_wait(number, what, size, part)
        self.adopt(control)

    def read(self, result: Tensor) -> Tensor:
        """In host memory, what comes of the group's data: nothing else may look at it there. Raises
        PeerLost: an aborted collective leaves garbage and no error."""
        found = result if result.device.type == "cpu" else to_host(result, self.device_waits_in)
        self.check()
        return found

    def device_waits_in(self) -> What | None:
        """The collective in which the device waits for its peers; None: it has its own to do, or
        nothing. Raises PeerLost if it is known that they will not come."""
        self.check()
        return None

    def check(self) -> None:
        """PeerLost once it is given up."""
        if self.is_abandoned:
            raise PeerLost("the generation was given up")

    def adopt(self, part: Abandonable) -> None:
        with self.changed:
            self._parts.append(part)
            is_late = self.is_abandoned
        if is_late:
            part.abandon()

    # --- what is in flight ------------------------------------------------------------------
    def _launch(
        self,
        what: tuple[str, int],
        launch: Callable[[], dist.Work],
        unpack: Callable[[], None] | None = None,
    ) -> Settling:
        self.check()
        try:
            work = launch()
        except RuntimeError as error:
            raise self.refusal_of(error) from error
        self._num_launched["all"] += 1
        return self._in_flight(work, (self._num_launched["all"], *what, ""), unpack)

    def _in_flight(
        self, work: Waitable, what: What, unpack: Callable[[], None] | None = None
    ) -> Pending:
        self._end_settled()
        pending = Pending(self, work, unpack, what)
        self._pending.append(pending)
        return pending

    def _end_settled(self) -> None:
        """Of what is in flight, all that is over; the oldest settle first, mostly."""
        while self._pending and self._pending[0].is_settled:
            self._pending.popleft()

    def _exchange(self, what: tuple[str, int, int], launch: Callable[[], dist.Work]) -> Settling:
        """Between two ranks. Not counted among the collectives, which all ranks make alike."""
        self.check()
        name, size, peer = what
        try:
            work = self._waitable(launch(), name)
        except RuntimeError as error:
            raise self.failure_of(error) from error
        self._num_launched["two"] += 1
        return self._in_flight(work, (self._num_launched["two"], name, size, f"peer{peer}"))

    # --- walking away -----------------------------------------------------------------------
    def abandon(self) -> None:
        """Wake whoever waits; from now on every operation raises PeerLost. Any thread may call."""
        with self.changed:
            self.is_abandoned = True
            self.changed.notify_all()
            parts = list(self._parts)
        for part in parts:
            part.abandon()

    def forget(self) -> None:
        """Torch finds neither it nor its parts by name any more, and keeps nothing of it alive."""
        if self._is_registered:
            registry.unregister(self)
        self._drop()
        for group in self._groups():
            group.forget()

    @property
    def is_settled(self) -> bool:
        return all(part.is_settled for part in (*self._pending, *self._groups()))

    def free(self) -> None:
        """Once it was left and has settled: its threads, connections and buffers, whoever still
        knows it. The backend joins its threads, and would wait for what is under way."""
        for group in self._groups():
            group.free()
        self._pending.clear()
        super().free()
        self._store = None  # the backend's destructor may be the last to ask it

    def _groups(self) -> "list[Group | Formation]":
        return [part for part in self._parts if isinstance(part, Group | Formation)]


class Alone(Group):
    """The group of a single member: nothing to exchange, so it cannot fail."""

    backend_name = "gloo"

    def __init__(self, name: str = UNNAMED) -> None:
        super().__init__(Copies(), 0, 1, name)

    def part(
        self, name: str, ranks: Sequence[int], timeout_s: float, *, is_apart: bool = False
    ) -> "Alone":
        return self

    def all_reduce(self, tensor: Tensor) -> Settling:
        return self

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Settling:
        outputs[0].copy_(tensor)
        return self

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Settling:
        outputs[0].copy_(inputs[0])
        return self

    def all_gather_flat(self, output: Tensor, tensor: Tensor) -> Settling:
        output.copy_(tensor)
        return self

    def all_to_all_flat(
        self,
        output: Tensor,
        tensor: Tensor,
        out_sizes: Sequence[int] = (),
        in_sizes: Sequence[int] = (),
    ) -> Settling:
        output.copy_(tensor)
        return self

    def _launch(
        self,
        what: tuple[str, int],
        launch: Callable[[], Any],
        unpack: Callable[[], None] | None = None,
    ) -> Settling:
        self.check()
        launch()
        return self

    def wait(self) -> None:
        self.check()


AnyGroup = Group
Connect = Callable[[GroupSpec], Group]
"""A backend's: the group, once all its members are here."""


class Formation:
    """A group being formed in a thread, so that forming can be given up as well."""

    def __init__(self, form: Callable[[threading.Event], Group]) -> None:
        """form: ends soon once the event is set."""
        self.changed = threading.Condition()
        self._group: Group | None = None
        self._error: Exception | None = None
        self._is_over = False
        self._given_up = threading.Event()
        thread = threading.Thread(target=self._run, args=(form,), name="form", daemon=True)
        thread.start()

    def _run(self, form: Callable[[threading.Event], Group]) -> None:
        group, error = _outcome(form, self._given_up)
        with self.changed:
            self._group, self._error, self._is_over = group, error, True
            self.changed.notify_all()
        if group is not None and self._given_up.is_set():
            group.abandon()

    def abandon(self) -> None:
        with self.changed:
            self._given_up.set()
            self.changed.notify_all()
            group = self._group
        if group is not None:
            group.abandon()

    def forget(self) -> None:
        """See Group, as below."""
        if self._group is not None:
            self._group.forget()

    @property
    def is_settled(self) -> bool:
        return self._is_over and (self._group is None or self._group.is_settled)

    def free(self) -> None:
        if self._group is not None:
            self._group.free()

    def wait(self, timeout_s: float) -> Group:
        """The group; PeerLost if not formed in `timeout_s` or given up; UnfitNode; the device's."""
        with self.changed:
            self.changed.wait_for(
                lambda: self._group or self._error or self._given_up.is_set(), timeout_s
            )
            if self._given_up.is_set():
                raise PeerLost("the generation was given up while it formed")
            if self._group is not None:
                return self._group
            if self._error is not None:
                self._raise()
        self.abandon()
        raise PeerLost(f"forming did not finish in {timeout_s:g} s")

    def _raise(self) -> None:
        assert self._error is not None
        try:
            raise self._error
        finally:
            self._error = None  # its traceback has frames of this object: they kept each other


def _outcome(
    form: Callable[[threading.Event], Group], given_up: threading.Event
) -> tuple[Group | None, Exception | None]:
    try:
        return form(given_up), None
    except Exception as error:
        clear_frames(error.__traceback__)  # they hold what was half formed
        return None, forming_failure_of(error)


def form(
    *,
    store_address: Sequence[Any],
    prefix: str,
    rank: int,
    world_size: int,
    connect: Connect,
    join_timeout_s: float,
    operation_timeout_s: float,
) -> Formation:
    """Begin to form the group named `prefix` over the rendezvous store at `store_address`.

    store_address: host, port and secret. connect: of the backend (backends.py).
    """

    def build(name: str, rank: int, world_size: int, given_up: threading.Event) -> Group:
        store = StoreClient(store_address, join_timeout_s, given_up)
        limits = {"join_timeout_s": join_timeout_s, "operation_timeout_s": operation_timeout_s}
        return connect(GroupSpec(store, name, rank, world_size, given_up=given_up, **limits))

    def build_whole(given_up: threading.Event) -> Group:
        group = build(prefix, rank, world_size, given_up)
        group.form_part = lambda name, r, size: Formation(
            partial(build, f"{prefix}/{name}", r, size)
        )
        return group

    return Formation(build_whole)


_left_behind: list[Group | Formation] = []
_leaving = threading.Lock()


def leave(group: Group | Formation) -> None:
    """Give it up, and free every left group in which nothing is under way by now."""
    group.abandon()
    group.forget()
    _left_behind.append(group)
    _free_settled()


def _free_settled() -> None:
    with _leaving:
        settled = [left for left in _left_behind if left.is_settled]
        for left in settled:
            _left_behind.remove(left)
    for left in settled:
        left.free()


class OwnGroup:
    """A member's group, formed or about to be, of one generation at a time, and the way out of it
    from any thread. When it is left is workers/membership/machine.py's."""

    def __init__(
        self,
        spec: WorkerSpec,
        connect: Connect,
        is_given_up: Callable[[], bool],
        waits: Waits,
        on_stuck: Callable[[str], None],
    ) -> None:
        """is_given_up: whether the generation at hand is, by now. on_stuck: see Group."""
        self._spec, self._connect, self._is_given_up = spec, connect, is_given_up
        self._waits, self._on_stuck = waits, on_stuck
        self._generation = 0
        self._formation: Formation | None = None
        self.group: Group | None = None

    def leave(self, generation: int) -> None:
        """For the next one."""
        if (held := self.group or self._formation) is not None:
            leave(held)
        self.group = self._formation = None
        self._generation = generation

    def begin(self, asked: Form) -> None:
        """To form, in a thread, unless it is the group of one."""
        if asked.world_size > 1:
            assert asked.store is not None
            self._formation = form(
                store_address=asked.store,
                prefix=name_of(self._spec, asked.generation),
                rank=asked.rank,
                world_size=asked.world_size,
                connect=self._connect,
                join_timeout_s=self._spec.timeouts.join_s,
                operation_timeout_s=self._spec.timeouts.operation_s,
            )
            if self._is_given_up():  # `abandon` may have looked before it was there
                self._formation.abandon()

    def meet(self) -> None:
        """Wait until it has formed. Raises PeerLost."""
        if self._formation is None:
            group: Group = Alone(name_of(self._spec, self._generation))
        else:
            group = self._formation.wait(self._spec.timeouts.join_s)
        group.on_wait, group.on_stuck = self._waits.waits_in, self._on_stuck
        group.waiting_for = self._waits.waiting_for
        self.group, self._formation = group, None

    def abandon(self, generation: int) -> None:
        """Whoever waits in it is free, if it is of this generation or an earlier one."""
        if self._generation > generation:
            return
        for held in (self._formation, self.group):
            if held is not None:
                held.abandon()
