"""The controller's side of checkpoints: it publishes, retires, and sets damaged ones aside.

`Publisher` is the event loop's side; `Checkpoints` works in the writer's thread, as a decision
never waits for storage. Who writes the parts is workers/checkpoint/saver.py; which save is whole is
elastic/control/checkpointing.py's.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from elastic.control.commands import Discard, Publish
from elastic.controller.storage_health import Unpublished
from elastic.controller.writer import Writer
from elastic.protocol.manifest import SavedPart
from elastic.protocol.messages.to_controller import PartSaved
from elastic.store.catalogue import PINNED, Catalogue, Damage, launch_of
from elastic.store.files import first_line
from elastic.store.remote import patiently
from elastic.store.run_directory import RunDirectory

log = logging.getLogger(__name__)

Ask = Callable[[Callable[[], Any]], Any]
"""Gives what the function gives, as `patiently`."""


class Publisher:
    """What ranks report of their parts, until their save is whole or given up."""

    def __init__(self, writer: Writer, tell: Callable[[int, bool], None]) -> None:
        """tell: the workers learn whether the checkpoint of a step is published."""
        self._writer, self._tell = writer, tell
        self.checkpoints: Checkpoints | None = None
        """Once the run directory is open."""
        self._parts: dict[tuple[int, int], dict[int, bytes]] = {}
        """Per generation and step, by rank: each a `SavedPart`, packed."""

    def hear(self, report: PartSaved) -> None:
        """It may be said again."""
        save = report.generation, report.step
        self._parts.setdefault(save, {})[report.rank] = report.payload

    def conclude(self, command: Publish | Discard) -> None:
        """Publish a save, or remove what it has written."""
        assert self.checkpoints is not None
        generation, step = command.generation, command.step
        parts = list(self._parts.pop((generation, step), {}).values())
        if isinstance(command, Discard):
            self._writer.write(self.checkpoints.discard, generation, step)
            self._tell(step, self.checkpoints.committed == step)  # repeated parts
            return
        publishing = self._writer.write(self.checkpoints.publish, generation, step, parts)
        publishing.add_done_callback(partial(self._on_published, step))

    def _on_published(self, step: int, publishing: "Future[Any]") -> None:
        error = publishing.exception()
        self._writer.trouble.hear_published(step, "" if error is None else first_line(error))
        self._writer.loop.call_soon_threadsafe(self._tell, step, error is None)


class Checkpoints:
    """The checkpoints of a run, in the hands of its only publisher."""

    def __init__(
        self,
        directory: RunDirectory,
        *,
        keep: tuple[int, int | None],
        about: dict[str, Any],
        run_id: str,
        journal: Callable[[dict[str, Any]], None],
    ) -> None:
        """about: goes into every manifest. journal: takes a line's fields."""
        self._directory = directory
        self._catalogue = Catalogue(directory.folder.at("checkpoints"), launch_of(run_id))
        self.is_open = False
        """No leftovers of a crash are in it but those of a save that may be on its way."""
        self._keep, self._about, self._journal = keep, about, journal
        self.committed: int | None = None
        """Step of the newest good checkpoint."""
        self._known: set[int] = set()
        """Steps of all that are published."""
        self._leftovers: set[tuple[int, int]] = set()  # generation, step of saves to be removed

    def open(self, step: int, damaged: list[Damage], ask: Ask = patiently) -> None:
        """The run stands at `step`, after these newer checkpoints could not be used: at its start,
        or later, when all who held its state were lost. ask: of a store that may be away."""
        for damage in damaged:
            name = ask(partial(self._catalogue.set_aside, damage.step))
            self._known.discard(damage.step)
            log.warning('checkpoint=%d damaged reason="%s" kept=%s', damage.step, damage.what, name)
            self._journal({"damaged": damage.step, "reason": damage.what, "kept": name})
        if not self.is_open:  # later a save may be on its way
            for name in ask(self._catalogue.sweep):
                self._journal({"removed": name, "reason": "a save that was never whole"})
            ask(partial(self.take_over, is_open=True))
        self.stand_at(step)

    def take_over(self, *, is_open: bool) -> None:
        """is_open: another controller has opened them; a save of it may still be on its way."""
        self._known = set(self._catalogue.steps())
        self.committed = max(self._known, default=None)
        self.is_open = is_open

    def stand_at(self, step: int) -> None:
        """The run has gone back to `step`; no store is asked."""
        self.committed = max((s for s in self._known if 0 < s <= step), default=None)

    def publish(self, generation: int, step: int, packed: list[bytes]) -> None:
        """packed: of each rank its `SavedPart`. Raises Unpublished; its files are removed with the
        next one that is published."""
        began = time.monotonic()
        saved = [SavedPart.unpack(each) for each in packed]
        state = next(s.state for s in saved if s.state is not None)
        about = {**self._about, PINNED: any(s.is_pinned for s in saved)}
        try:
            self._directory.sync()  # the records of its steps are not less durable than it is
            manifest = self._catalogue.publish(
                step, generation, [s.part for s in saved], state, about
            )
        except OSError as error:
            self._leftovers.add((generation, step))
            raise Unpublished(first_line(error)) from error
        self.committed = max(step, self.committed or 0)
        retired = self._clean_up()
        self._known = {*self._known, step}.difference(retired)
        self._journal(
            {
                "published": step,
                "size_bytes": manifest.size_bytes,
                "publish_s": time.monotonic() - began,
                "retired": retired,
            }
        )

    def _clean_up(self) -> list[int]:
        """Old checkpoints, and what could not be removed before. It can wait for the next one."""
        retired: list[int] = []
        try:
            retired = self._catalogue.retire(*self._keep)
        except OSError as error:
            log.warning('old checkpoints stay reason="%s"', first_line(error))
        for left in sorted(self._leftovers):
            self.discard(*left)
        return retired

    def discard(self, generation: int, step: int) -> None:
        """Remove what a save that will not be whole has written. Where that fails it is tried
        again with the next checkpoint that is published."""
        self._leftovers.add((generation, step))
        try:
            self._catalogue.discard(step, generation)
        except OSError as error:
            log.warning('checkpoint=%d leftovers stay reason="%s"', step, first_line(error))
            return
        self._leftovers.discard((generation, step))
