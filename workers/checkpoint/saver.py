"""This rank's part of checkpoints: copied while the next step computes, written in a thread.

What is not cut the ranks divide evenly, by rows; of what is each writes its own box. What a
checkpoint is made of is elastic/protocol/manifest.py's; loading is in load.py.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from elastic.protocol.layout import Box, Position, TensorLayout, whole
from elastic.protocol.manifest import SavedPart
from elastic.protocol.messages.to_controller import PartFailed, PartSaved
from elastic.protocol.worker_spec import WorkerSpec
from elastic.store.catalogue import Catalogue, file_name, launch_of
from elastic.store.checkpoint_files import SavedBox, write_part
from elastic.store.files import reach_folder
from elastic.store.remote import patiently
from workers.distributed.device_errors import is_gone
from workers.tensors.local import as_bytes, check_shard, layout_of, local, part_of
from workers.train_state.owner import StateOwner
from workers.train_state.snapshot import Arena, Snapshot
from workers.train_state.train_state import TrainState

log = logging.getLogger(__name__)
_POLL_S = 0.05


class Link(Protocol):
    """To the controller: `ControllerLink`."""

    concluded_saves: dict[int, bool]

    def send(self, report: PartSaved | PartFailed) -> None: ...


class _GivenUp(Exception):
    """The save's generation is over."""


@dataclass(eq=False)
class _Job:
    generation: int
    step: int
    rank: int
    world_size: int
    boxes: list[SavedBox]
    snapshot: Snapshot
    is_pinned: bool
    is_given_up: bool = False
    progress: int = 0
    """Tensors copied and blocks written so far."""

    def copy(self) -> dict[str, Tensor]:
        """Everything, before anything is written: the disk must not hold up the next step."""
        copies: dict[str, Tensor] = {}
        for box in self.boxes:
            copies[box.name] = self.snapshot.take(box.name)
            self.advance()
        return copies

    def advance(self) -> None:
        self.progress += 1

    def contents(self, copies: Mapping[str, Tensor]) -> Iterator[memoryview]:
        for box in self.boxes:
            if self.is_given_up:
                raise _GivenUp
            tensor = copies[box.name]
            yield as_bytes(tensor) if tensor.numel() else memoryview(b"")


class Saving:
    """A checkpoint on its way, asked for by `session.save`."""

    def __init__(self, step: int, link: Link, is_over: Callable[[], bool]) -> None:
        self.step = step
        self._link, self._is_over = link, is_over

    @property
    def is_durable(self) -> bool:
        """Its manifest is published: every rank's part is safe."""
        return self._link.concluded_saves.get(self.step, False)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it is durable; False once it cannot be any more (a lost worker, a full disk), or
        after `timeout_s`. The other ranks wait for this one at their next step."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self.step not in self._link.concluded_saves:
            if self._is_over() or time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return self.is_durable


class Saver:
    """At most one save at a time; reports its part's end to the controller."""

    def __init__(self, link: Link, spec: WorkerSpec) -> None:
        self._link, self._spec = link, spec
        self.catalogue: Catalogue | None = None
        self._memory = Arena(is_pinned=spec.device == "cuda")
        self._prepared = 0  # generation
        self._job: _Job | None = None
        self._thread: threading.Thread | None = None
        self._saved = (0, 0)  # generation, step
        self._said: PartSaved | PartFailed | None = None
        self._fault: Exception | None = None
        """Of the device, which can do nothing more."""

    def open(self, place: str) -> None:
        """place: the run directory."""
        folder = patiently(partial(reach_folder, place)).at("checkpoints")
        self.catalogue = Catalogue(folder, launch_of(self._spec.run_id))

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def is_due(self, step: int) -> bool:
        """After `step` committed ones. The last state is saved when the loop has returned."""
        every = self._spec.checkpoint_every
        return every is not None and step % every == 0 and step < self._spec.steps

    def has_begun(self, generation: int, step: int) -> bool:
        """A save of this step or a later one."""
        return self._saved[0] == generation and self._saved[1] >= step

    def after_step(self, train_state: TrainState, by: StateOwner, *, is_asked: bool) -> None:
        """Nobody is saving: begin if it is time, else see that memory for it is ready by then.

        is_asked: by the controller, of all ranks. RuntimeError if the device has failed in a
        save."""
        self._check_device()
        if self.is_due(train_state.step) or (is_asked and train_state.step < self._spec.steps):
            self.begin(train_state, by)
        elif self._prepared != by.generation and self._spec.checkpoint_every is not None:
            mine = [
                (t.dtype, t.shape) for _, t in share(train_state.tensors(), by.position, by.layout)
            ]
            touch = threading.Thread(target=self._memory.reserve, args=(mine,), daemon=True)
            touch.start()
            self._prepared = by.generation

    def save(
        self,
        train_state: TrainState,
        by: StateOwner,
        is_over: Callable[[], bool],
        *,
        is_pinned: bool,
    ) -> Saving:
        """Begin once an earlier save has been written, unless that was of this step: then it is
        only pinned, if need be. It has failed at once where the storage hangs in the earlier one,
        or when this generation is over."""
        if not self._wait_moving(is_over=is_over):
            self._say_stuck(by, train_state.step)
        elif is_over():
            pass
        elif self._saved != (by.generation, train_state.step):
            self.begin(train_state, by, is_pinned=is_pinned)
        elif is_pinned and isinstance(self._said, PartSaved):
            self._link.concluded_saves.pop(train_state.step, None)
            pinned = replace(SavedPart.unpack(self._said.payload), is_pinned=True)
            self._say(replace(self._said, payload=pinned.pack()))
        return Saving(train_state.step, self._link, lambda: is_over() or self._fault is not None)

    def begin(self, train_state: TrainState, by: StateOwner, *, is_pinned: bool = False) -> None:
        """Save the state of the last committed step, between steps. The saver must not be busy."""
        generation, rank, step = by.generation, by.rank, train_state.step
        assert self.catalogue is not None
        assert not self.is_busy
        boxes: list[SavedBox] = []

        def mine(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            pieces = share(tensors, by.position, by.layout)
            boxes.extend(box for box, _ in pieces)
            return {box.name: piece for box, piece in pieces}

        self._link.concluded_saves.pop(step, None)
        snapshot = train_state.snapshot(mine, self._memory)
        job = _Job(generation, step, rank, by.world_size, boxes, snapshot, is_pinned=is_pinned)
        self._job, self._saved = job, (generation, step)
        self._thread = threading.Thread(target=self._write, args=(job,), name="saver", daemon=True)
        self._thread.start()

    def repeat(self) -> None:
        """Say again how the last save went, to a controller that may not know."""
        if self._said is not None and self._said.step not in self._link.concluded_saves:
            self._say(self._said)

    def _say(self, report: PartSaved | PartFailed) -> None:
        self._said = report
        self._link.send(report)

    def give_up(self, generation: int) -> None:
        """Generations up to this one are over; what they write is removed by the controller."""
        if self._job is not None and self._job.generation <= generation:
            self._job.is_given_up = True

    def save_now(
        self, train_state: TrainState, by: StateOwner, tell: Callable[[], None] = lambda: None
    ) -> None:
        """Return once this state's part is written or has failed; an older save ends first. It has
        failed, too, where the storage hangs. RuntimeError if the device has failed in it.

        tell: called now and then while it gets further.
        """
        is_over = self._wait_moving(tell)
        if (
            is_over
            and self._spec.has_checkpoints
            and self._saved != (by.generation, train_state.step)
        ):
            self.begin(train_state, by)
            is_over = self._wait_moving(tell)
        if not is_over:
            self._say_stuck(by, train_state.step)
        self._check_device()

    def _check_device(self) -> None:
        """RuntimeError if it has failed in a save: its worker is lost, and the checkpoint with it,
        which is no fault of the storage."""
        if self._fault is not None:
            raise RuntimeError("this rank's part could not be copied") from self._fault

    def _say_stuck(self, by: StateOwner, step: int) -> None:
        """The storage hangs in a job, so that the save of `step` has failed."""
        assert self._job is not None
        self._job.is_given_up = True
        stuck = f"step {self._job.step}: nothing was written for {self._spec.timeouts.stall_s:g} s"
        log.warning('generation=%d save gave up reason="%s"', by.generation, stuck)
        self._say(PartFailed(by.generation, by.rank, step, f"the storage hangs in {stuck}"))

    def _wait_moving(
        self,
        tell: Callable[[], None] = lambda: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> bool:
        """False where the saver gets no further. In an object store it always does: there every
        request has a limit of its own, and how far they have come cannot be seen."""
        is_remote = self.catalogue is not None and self.catalogue.folder.local is None
        seen, moved_at, told_at = -1, time.monotonic(), time.monotonic()
        while self._job is not None and self.is_busy and not is_over():
            assert self._thread is not None
            self._thread.join(_POLL_S)
            now, progress = time.monotonic(), self._job.progress
            if is_remote or progress != seen:
                seen, moved_at = progress, now
            if now - moved_at > self._spec.timeouts.stall_s:
                return False
            if now - told_at > self._spec.timeouts.lease_s and moved_at > told_at:
                told_at = now
                tell()
        return True

    def _write(self, job: _Job) -> None:
        assert self.catalogue is not None
        copies: dict[str, Tensor] = {}
        try:
            copies = job.copy()
            folder = self.catalogue.prepare(job.step)
            name = file_name(job.generation, job.rank, job.world_size, self.catalogue.launch)
            contents = job.contents(copies)
            part = write_part(folder, name, job.boxes, contents, on_block=job.advance)
            if job.is_given_up:
                raise _GivenUp
            state = job.snapshot.header if job.rank == 0 else None
            said = SavedPart(part, state, job.is_pinned)
            self._say(PartSaved(job.generation, job.rank, job.step, said.pack()))
        except _GivenUp:
            log.info("generation=%d step=%d save given up", job.generation, job.step)
        except Exception as error:  # whatever it is: a checkpoint fails, and the run is told
            self._fail(job, error)
        finally:
            self._memory.give(copies)

    def _fail(self, job: _Job, error: Exception) -> None:
        """What a device that can do nothing more has raised is told by the main thread instead."""
        message = f"{type(error).__name__}: {error}"
        what = 'generation=%d step=%d save failed reason="%s"'
        log.warning(what, job.generation, job.step, message)
        if is_gone(error):
            self._fault = error
        else:
            self._say(PartFailed(job.generation, job.rank, job.step, message))


def share(
    tensors: Mapping[str, Tensor],
    at: Position,
    layout_of: Callable[[str, Tensor], TensorLayout] = layout_of,
) -> list[tuple[SavedBox, Tensor]]:
    """What a position writes of the state: its own box of what is cut, and of what is not about as
    many bytes as every other one."""
    layouts = [layout_of(name, tensor) for name, tensor in tensors.items()]
    pieces: list[tuple[SavedBox, Tensor]] = []
    for layout in (layout for layout in layouts if layout.is_cut):
        own = layout.own(at)
        if own is not None:
            shard = local(tensors[layout.name])
            check_shard(shard, layout, own)
            pieces.append((SavedBox(layout.name, layout.dtype, layout.shape, own), shard))
    uncut = [(layout, tensors[layout.name]) for layout in layouts if not layout.is_cut]
    return pieces + _even_share(uncut, at)


def _even_share(
    tensors: Sequence[tuple[TensorLayout, Tensor]], at: Position
) -> list[tuple[SavedBox, Tensor]]:
    """The bytes of all tensors, in their order, are cut into equal stretches, one per rank; a row
    of a tensor (an element of dim 0) belongs to the stretch that it begins in."""
    world_size = at.mesh.world_size
    total = sum(t.nbytes for _, t in tensors)
    low, high = (total * r // world_size for r in (at.rank, at.rank + 1))
    if at.rank == world_size - 1:
        high = total + 1  # empty tensors at the end, too
    pieces: list[tuple[SavedBox, Tensor]] = []
    begin = 0
    for layout, tensor in tensors:
        shape = layout.shape
        first, last = 0, 1
        if not shape or not tensor.numel():
            box, last = whole(shape), int(low <= begin < high)
        else:
            row = tensor.nbytes // shape[0]
            first, last = (min(max(-((begin - edge) // row), 0), shape[0]) for edge in (low, high))
            box = Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
        if first < last:
            saved = SavedBox(layout.name, layout.dtype, shape, box)
            pieces.append((saved, part_of(tensor, box)))
        begin += tensor.nbytes
    return pieces
