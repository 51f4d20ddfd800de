"""Pieces of work between collectives: what a member shows meanwhile, and whether all meet."""

import time
from threading import Lock
from typing import Any

import pyarrow.fs
import pytest
import torch
from torch import nn

from elastic.store.catalogue import Catalogue
from elastic.store.files import Folder
from tests.workers.ranks import run_ranks
from tests.workers.session_rig import Tiny
from tests.workers.sharded_rig import build, formed, sha256
from tests.workers.test_restoring import ReadBy, publish
from workers.distributed.gloo import GlooGroup
from workers.distributed.pieces import Pieces
from workers.health.vitals import Vitals
from workers.parallel.shards import Ownership

CPU = torch.device("cpu")


class Launched:
    """A collective that is done already."""

    def is_completed(self):
        return True

    def wait(self):
        return True


class Backend:
    """All members have said that they are done."""

    def allreduce(self, tensors):
        tensors[0].fill_(2)
        return Launched()

    def abort(self):
        pass


def test_who_begins_a_piece_is_at_work_also_when_a_round_has_just_ended():
    vitals, group, now = Vitals(), GlooGroup(Backend(), 0, 2), [0.0]
    group.on_wait = vitals.waits_in
    pieces = Pieces(group, lambda: vitals.enter("restore"), 1.0, lambda: now[0])
    phases = []
    for at in (0.0, 1.5, 2.0, 2.1):  # a round begins in the second, and ends in the third
        now[0] = at
        pieces.begin_apart()
        phases.append(vitals.phase)
    assert phases == ["restore"] * 4


LIMIT_S = 6.0
"""Of the backend, for one collective. A rank that is late by less is no loss."""
NUM_LAYERS = 28
PIECE_S = {"initial": 0.25, "checkpoint": 1.8}
"""Of the slowest rank."""


class Layers(Tiny):
    """Initialised module by module, which takes its time."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    def build_model(self):
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(NUM_LAYERS)), nn.Linear(4, 1))

    def init_weights(self, module, name):
        if isinstance(module, nn.Linear):
            time.sleep(self._pause_s)  # this is the work
            nn.init.normal_(module.weight)


class OneByOne:
    """A storage that reads one block at a time, and slowly; as Folder asks pyarrow's."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s, self._lock = pause_s, Lock()
        self._local = pyarrow.fs.LocalFileSystem()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)

    def open_input_file(self, path: str) -> Any:
        stream = self._local.open_input_file(path)

        def read_at(size_bytes, offset):
            with self._lock:
                time.sleep(self._pause_s)  # this is the work
            return stream.read_at(size_bytes, offset)

        return ReadBy(stream, read_at)


@pytest.mark.usefixtures("place_slowly")
def test_ranks_that_get_their_part_at_different_speeds_begin_together(tmp_path):
    """The slowest takes longer for it than the backend lets a collective wait."""
    place = str(tmp_path)
    expected = [sha256(build("ddp", workload=Layers(0))), publish(place, Layers(0))]

    def body(ranks):
        found, taken_s = [], []
        share = (0.0, 0.3, 1.0)[ranks.index]
        replicas = {kind: build("fsdp", workload=Layers(share * s)) for kind, s in PIECE_S.items()}
        for generation, (kind, strategy) in enumerate(replicas.items()):
            group = ranks.form(generation, [0, 1, 2], operation_timeout_s=LIMIT_S)
            strategy.shards.holding = Ownership(kind)
            catalogue = Catalogue(Folder(OneByOne(share * PIECE_S[kind]), f"{place}/checkpoints"))
            pieces = Pieces(group, lambda: None, round_s=0.05)
            began = time.monotonic()
            strategy.enter(formed(group, 0, catalogue, generation, pieces))
            taken_s.append(time.monotonic() - began)
            found.append(strategy.weights_sha256())
        return found, taken_s

    told = run_ranks(3, body)
    assert [found for found, _ in told] == [expected] * 3
    *_, of_the_slowest = told[-1]
    assert min(of_the_slowest) > LIMIT_S, "else this shows nothing"
