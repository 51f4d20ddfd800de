"""A sharded member between its rendezvous and its first step: its work is done in pieces."""

import time
from dataclasses import replace
from mmap import PROT_READ, mmap
from threading import Lock
from typing import Any

import pyarrow.fs
import pytest
import torch
from torch import nn

from elastic.store.catalogue import Catalogue
from elastic.store.files import Folder
from tests.workers.fake_groups import ThreadGroup
from tests.workers.session_rig import Rig, Tiny, abort, form, obey
from tests.workers.sharded_rig import build, catalogue_in, save_part, sha256
from workers.health.vitals import LAYOUT, PHASES
from workers.membership.state import Holding
from workers.parallel.shards import Ownership
from workers.train_state.digest import weights_sha256

pytestmark = pytest.mark.usefixtures("place")
ABORT = abort(1)
FILES = 12
READ_S = 0.1


class Watched:
    """Counts the pieces of a member's work, and has something happen at the third."""

    def __init__(self) -> None:
        self.num_pieces = 0
        self.happens = lambda: None
        self._lock = Lock()

    def piece(self) -> None:
        with self._lock:  # several threads read
            self.num_pieces += 1
            if self.num_pieces == 3:
                self.happens()


class Layers(Tiny):
    """Initialised module by module."""

    def __init__(self, watched: Watched):
        self.watched = watched

    def build_model(self):
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)), nn.Linear(4, 1))

    def init_weights(self, module, name):
        if isinstance(module, nn.Linear):
            self.watched.piece()
            nn.init.normal_(module.weight)


class Slow:
    """A storage whose reads take their time; as Folder asks pyarrow's."""

    def __init__(self, watched: Watched) -> None:
        self._watched, self._local = watched, pyarrow.fs.LocalFileSystem()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)

    def open_input_file(self, path: str) -> Any:
        stream = self._local.open_input_file(path)

        def read_at(size_bytes, offset):
            self._watched.piece()
            time.sleep(READ_S)  # this is the fault
            return stream.read_at(size_bytes, offset)

        return ReadBy(stream, read_at)


class ReadBy:
    def __init__(self, stream: Any, read_at: Any) -> None:
        self.size, self.close, self.read_at = stream.size, stream.close, read_at

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def publish(place: str, workload: Tiny) -> str:
    """A checkpoint of step 0 in many files, of other weights than the initial ones; their hash."""
    strategy = build("ddp", workload=workload)
    with torch.no_grad():
        for parameter in strategy.train_state.parameters.values():
            parameter.add_(1)
    groups_of = [ThreadGroup(r, [[]] * FILES) for r in range(FILES)]
    saved = [save_part(strategy, group, place, 1) for group in groups_of]
    catalogue_in(place).publish(0, 1, [part for part, _ in saved], saved[0][1], {})
    return weights_sha256(strategy.train_state.model)


@pytest.fixture(params=["initial", "checkpoint"])
def restoring(request, tmp_path):
    """A lone member that stands for a state, its pieces, and the hash of the state's weights."""
    torch.set_num_threads(1)
    watched = Watched()
    workload = Layers(Watched())
    expected = sha256(build("ddp", workload=workload))
    if request.param == "checkpoint":
        expected = publish(str(tmp_path), workload)
    else:
        workload.watched = watched
    rig = Rig("bitwise", workload, parallel="fsdp")
    folder = Folder(Slow(watched), str(tmp_path / "checkpoints"))
    rig.member.saver.catalogue = Catalogue(folder)
    rig.strategy.shards.holding = Ownership(request.param)
    rig.member.machine = replace(rig.member.machine, holding=Holding.STATE)
    watched.num_pieces = 0
    yield rig, watched, expected
    rig.loader.close()


def test_an_abort_between_two_pieces_is_obeyed_and_the_state_is_not_lost(restoring):
    rig, watched, expected = restoring
    watched.happens = lambda: rig.member.hear(ABORT)
    assert not obey(rig.member, form(1, 0))
    num_done = watched.num_pieces
    assert [kind for kind, _, _ in rig.link.sent] == ["connected"]
    obey(rig.member, ABORT)
    ((suspended, _),) = rig.link.of("suspended")
    assert suspended["step"] == 0, "it stands for the state, as before"
    watched.num_pieces = 0
    assert obey(rig.member, form(2, 0))
    assert num_done < watched.num_pieces
    assert rig.strategy.weights_sha256() == expected


def test_each_piece_is_a_sign_of_life(restoring):
    rig, watched, _ = restoring
    seen = []
    memory = mmap(rig.member.vitals.fd, 4096, prot=PROT_READ)

    def look():
        _, generation, _, phase, since, *_ = LAYOUT.unpack_from(memory, 0)
        seen.append((generation, PHASES[phase], since))

    watched.happens = look
    assert obey(rig.member, form(1, 0))
    look()
    (first, _) = seen
    assert first[:2] == (1, "restore")
    assert seen[0][2] < seen[1][2], "the last piece began later"
