"""The checkpoints of a run: published, found, verified, retired.

One is a folder `<run>/checkpoints/step-00000100/`.

A checkpoint exists once its manifest does; the manifest is the last file written, by one writer,
the controller. What is in the files is checkpoint_files.py's.
"""

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from elastic.protocol.errors import DamagedCheckpoint
from elastic.protocol.manifest import MANIFEST, Manifest, Part, decode, merge
from elastic.store.block_format import SAFETENSORS_DTYPES
from elastic.store.checkpoint_reading import PartReader, raise_unless_missing
from elastic.store.files import Folder, first_line, sync_directory

log = logging.getLogger(__name__)

NEVER_DELETED = 2
"""So many of the newest good checkpoints stay, whatever retention says."""
_NAME = re.compile(r"step-(\d{8,})")
_PART = re.compile(r"generation-(\d+)-(\w+)-part-")
PINNED = "is_pinned"
"""In a manifest's `about`: retention never deletes it."""
ASIDE = ".damaged"
"""Appended to the folder of a checkpoint that was found damaged; nobody reads it any more."""


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_named(name: str) -> int | None:
    """The inverse of `folder_name`; None if it is the name of something else."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def file_name(generation: int, rank: int, world_size: int, launch: str = "0") -> str:
    """A part's file: of another generation, or of the same run launched again, it is another file,
    so that no zombie writes into it and no published one is ever written again."""
    return f"{prefix_of(generation, launch)}{rank:05d}-of-{world_size:05d}.safetensors"


def launch_of(run_id: str) -> str:
    """What tells this launch of a run from others, in file names."""
    return re.sub(r"\W", "", run_id)[-8:]


def prefix_of(generation: int, launch: str) -> str:
    return f"generation-{generation:06d}-{launch}-part-"


@dataclass(frozen=True, slots=True)
class Damage:
    """A checkpoint that cannot be used, and why."""

    step: int
    what: str


@dataclass(frozen=True)
class Catalogue:
    """The folder `checkpoints` of a run."""

    folder: Folder
    launch: str = "0"
    """Tells this launch of the run from others, for whoever writes."""

    def of_step(self, step: int) -> Folder:
        return self.folder.at(folder_name(step))

    # --- reading ----------------------------------------------------------------
    def steps(self) -> list[int]:
        """Steps of the published checkpoints, ascending, whether they are good or not."""
        found = [step_named(name) for name in self.folder.folders()]
        steps = sorted(step for step in found if step is not None)
        return [step for step in steps if self.of_step(step).exists(MANIFEST)]

    def manifest(self, step: int) -> Manifest:
        """Raises DamagedCheckpoint, OSError if the store does not answer; its files are looked at
        only when they are read."""
        folder = self.of_step(step)
        place = f"{folder}/{MANIFEST}"
        try:
            content = folder.read(MANIFEST)
        except OSError as error:
            raise_unless_missing(error)
            raise DamagedCheckpoint(place, f"cannot be read: {error}") from error
        manifest = decode(content, place)
        check_bytes(manifest, place)
        if manifest.step != step:
            raise DamagedCheckpoint(place, f"it is of step {manifest.step}: a foreign file")
        return manifest

    def verify(self, step: int) -> Iterator[int]:
        """Read every byte again; yields the sizes of the blocks. Raises DamagedCheckpoint, OSError
        if the store does not answer."""
        folder = self.of_step(step)
        for file in self.manifest(step).files:
            with PartReader(folder, file) as reader:
                yield from reader.verify()

    def strangers(self, step: int) -> list[str]:
        """Files in the folder that the manifest does not name: torn saves, or not ours."""
        known = {MANIFEST, *(file.name for file in self.manifest(step).files)}
        return [name for name in self.of_step(step).names() if name not in known]

    # --- writing: the controller only ---------------------------------------------
    def prepare(self, step: int) -> Folder:
        """The folder that ranks write their parts to."""
        folder = self.of_step(step)
        folder.create()
        return folder

    def publish(
        self,
        step: int,
        generation: int,
        parts: Sequence[Part],
        state: object,
        about: Mapping[str, Any],
    ) -> Manifest:
        """The checkpoint exists once this returns. ValueError if the parts do not make a whole,
        OSError if it cannot be written.

        A sound one of the same step stays as it is, but is pinned if `about` says so.
        """
        files, tensors = merge(parts)
        folder = self.of_step(step)
        there = folder.sizes()
        missing = [file.name for file in files if there.get(file.name) != file.size_bytes]
        if missing:
            raise OSError(f"{folder}/{missing[0]} is not there as it was written")
        earlier = self._sound_manifest(step, there)
        if earlier is not None and earlier.files != files:
            return self._keep(earlier, generation, about)
        manifest = Manifest(step, generation, files, tensors, state, dict(about))
        folder.write(MANIFEST, manifest.encode())
        if self.folder.local is not None:
            sync_directory(self.folder.local)
        try:
            self._remove_torn(step, generation, {file.name for file in files})
            self.sweep(before=step)
        except OSError as error:  # they do no harm, and go with the checkpoint
            log.warning('checkpoint=%d torn files stay reason="%s"', step, first_line(error))
        return manifest

    def _keep(self, manifest: Manifest, generation: int, about: Mapping[str, Any]) -> Manifest:
        """`manifest` stands; the files of the later save of its step go."""
        folder = self.of_step(manifest.step)
        if about.get(PINNED) and not manifest.about.get(PINNED):
            manifest = replace(manifest, about={**manifest.about, PINNED: True})
            folder.write(MANIFEST, manifest.encode())
        log.info("checkpoint=%d reason=%s", manifest.step, '"it exists and is not written again"')
        self._remove_torn(manifest.step, generation, {file.name for file in manifest.files})
        return manifest

    def discard(self, step: int, generation: int) -> None:
        """Remove what a save that will not be whole has written."""
        folder = self.of_step(step)
        if folder.exists(MANIFEST):
            return
        for name in folder.names():
            if name.startswith(prefix_of(generation, self.launch)):
                folder.delete(name)
        if folder.local is not None:
            with suppress(OSError):  # another generation has begun to write here
                folder.local.rmdir()
        elif not folder.names():
            folder.delete_all()

    def set_aside(self, step: int) -> str:
        """Keep a damaged checkpoint under another name; gives that name. Done again it ends what an
        outage has broken off."""
        there, is_local = set(self.folder.folders()), self.folder.local is not None
        names = [f"{folder_name(step)}{ASIDE}{n or ''}" for n in range(len(there) + 1)]
        taken = [n for n in names if n in there and (is_local or self._has_manifest(n))]
        if taken and self._is_copied(folder_name(step), taken[-1]):
            self.of_step(step).delete(MANIFEST)
            self.of_step(step).delete_all()
            return taken[-1]
        name = next(n for n in names if n not in taken)
        self.folder.move_folder(folder_name(step), name, last=MANIFEST)
        return name

    def _has_manifest(self, name: str) -> bool:
        return self.folder.at(name).exists(MANIFEST)

    def _is_copied(self, name: str, aside: str) -> bool:
        """The manifest is the last file to arrive there, and the first to go here."""
        if not self._has_manifest(name):
            return True
        return self.folder.at(name).read(MANIFEST) == self.folder.at(aside).read(MANIFEST)

    def sweep(self, before: int | None = None) -> list[str]:
        """Remove folders without a manifest: saves that a crash left. When nobody writes to them,
        which is true of those `before` a step that was published."""
        torn = [
            name
            for name in self.folder.folders()
            if (match := _NAME.fullmatch(name))
            and (before is None or int(match[1]) < before)
            and not self.folder.at(name).exists(MANIFEST)
        ]
        for name in torn:
            self.folder.at(name).delete_all()
        return torn

    def retire(self, last: int, every: int | None) -> list[int]:
        """Delete all but the newest `last`, those at multiples of `every`, and pinned ones.

        The newest two good ones always stay. Gives the deleted steps.
        """
        steps = self.steps()
        good = [s for s in steps if self._sound_manifest(s, self.of_step(s).sizes()) is not None]
        kept = set(good[-max(last, NEVER_DELETED) :])
        gone = [s for s in good if s not in kept and not (every and s % every == 0)]
        gone = [s for s in gone if not self.manifest(s).about.get(PINNED)]
        for step in gone:
            folder = self.of_step(step)
            folder.delete(MANIFEST)  # first: half a checkpoint never looks like one
            folder.delete_all()
        return gone

    def _sound_manifest(self, step: int, there: Mapping[str, int]) -> Manifest | None:
        """As far as names and sizes tell; None if there is none. there: the folder's file sizes."""
        if MANIFEST not in there:
            return None
        try:
            manifest = self.manifest(step)
        except DamagedCheckpoint:
            return None
        is_sound = all(there.get(file.name) == file.size_bytes for file in manifest.files)
        return manifest if is_sound else None

    def _remove_torn(self, step: int, generation: int, kept: set[str]) -> None:
        """What earlier generations and launches have left; a later one may be at work."""
        folder = self.of_step(step)
        for name in folder.names():
            found = _PART.match(name)
            is_later = found and found[2] == self.launch and int(found[1]) > generation
            if found and not is_later and name not in kept:
                folder.delete(name)


def check_bytes(manifest: Manifest, place: str) -> None:
    """DamagedCheckpoint if a tensor is more than its file holds: nobody makes room for it then."""
    sizes = {file.name: file.size_bytes for file in manifest.files}
    for tensor in manifest.tensors:
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise DamagedCheckpoint(place, f"{tensor.name!r} is of no dtype: {tensor.dtype!r}")
        element = SAFETENSORS_DTYPES[tensor.dtype][1]
        for chunk in tensor.chunks:
            if chunk.offset + math.prod(chunk.shape) * element > sizes[chunk.file]:
                what = f"a chunk of {tensor.name!r} is longer than {chunk.file!r}"
                raise DamagedCheckpoint(place, what)
