"""Two sharded members form a generation: what the one that comes learns, and what it forgets."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from elastic.protocol.messages.to_worker import Form, Load, Sync
from elastic.protocol.step_record import KnownSteps, VoteHead
from elastic.store.catalogue import Catalogue
from elastic.store.files import open_folder
from tests.control.fake_record import step_record
from tests.workers import session_rig, where
from tests.workers.ranks import Ranks, run_ranks
from tests.workers.session_rig import FakeLink, obey
from tests.workers.sharded_rig import Work, spec, train
from workers.checkpoint.saver import Saver
from workers.health.vitals import Vitals
from workers.membership import member as member_module
from workers.membership.member import Member
from workers.membership.state_stream import PeerServer
from workers.parallel.build import build_strategy

pytestmark = pytest.mark.usefixtures("place_slowly")


class Looking(Work):
    """Its scheduler sees the phase in which it is given its state."""

    def __init__(self) -> None:
        self.vitals, self.phases = Vitals(), []

    def build_scheduler(self, optimizer):
        return Looks(self, optimizer)


class Looks(StepLR):
    def __init__(self, work: Looking, optimizer) -> None:
        super().__init__(optimizer, 1, 0.9)
        self._look = lambda: work.phases.append(work.vitals.phase)

    def state_dict(self):
        return {k: v for k, v in super().state_dict().items() if k != "_look"}

    def load_state_dict(self, state_dict):
        self._look()
        super().load_state_dict(state_dict)


def member_of(ranks: Ranks, work: Looking, place: str) -> Member:
    member_module.connect_for = lambda device, host: ranks.connect_here()
    settings = spec("fsdp")
    strategy, link = build_strategy(work, settings, where.HERE), FakeLink()
    catalogue = Catalogue(open_folder(place).at("checkpoints"))
    peers = PeerServer("127.0.0.1", "t", lambda: None, 3.0)
    return Member(
        settings, strategy, link, peers,
        saver=Saver(link, settings), vitals=work.vitals, device=where.HERE,
        on_load=lambda place, step: strategy.load(catalogue, 0, 0, lambda: None),
        on_log_to=lambda place: None, on_finish=lambda member, place: "",
    )  # fmt: skip


def known(generation: int, *steps: int) -> KnownSteps:
    """Of steps that are not on record."""
    said = tuple(step_record(step, generation) for step in steps)
    return KnownSteps(said, VoteHead(steps[-1], ()))


def form(generation: int, rank: int, world_size: int, store: Any, step: int) -> Form:
    where = {"rank": rank, "world_size": world_size, "store": store}
    return session_rig.form(generation, step, **where)


def test_who_comes_back_from_the_pool_knows_what_the_lowest_rank_knows_and_nothing_else(tmp_path):
    """It may be the last one who can report those steps. What it knew is of steps that were done
    again since, or never will be."""

    def body(ranks):
        torch.set_num_threads(1)
        work = Looking()
        member = member_of(ranks, work, str(tmp_path))
        if ranks.index == 0:
            obey(member, Load("", 0))
            assert obey(member, form(1, 0, 1, None, 0))
            train(member.strategy, member.group, "fsdp", 2, work=work)
            member.records.take(known(1, 1, 2))
            obey(member, session_rig.abort(1))
        else:
            member.records.take(known(0, 1, 2))
            obey(member, Sync(0, None))
        before = member.records.known()
        assert obey(member, form(2, ranks.index, 2, ranks.address, 2))
        return before, member.step, member.records.known(), work.phases[-1]

    told = run_ranks(2, body)
    assert [before.steps for before, *_ in told] == [known(1, 1, 2).steps, ()]
    for _, step, frame, phase in told:
        assert (step, frame) == (2, known(1, 1, 2))
        assert phase == "restore", "its own work, for which nobody is waited"


def test_what_is_on_record_counts_although_the_lowest_rank_has_heard_nothing_of_it(tmp_path):
    """It is a newcomer; the other member has the state, and knows that it is on record."""

    def body(ranks):
        torch.set_num_threads(1)
        work = Looking()
        member = member_of(ranks, work, str(tmp_path))
        if ranks.index == 1:
            obey(member, Load("", 0))
            assert obey(member, form(1, 0, 1, None, 0))
            train(member.strategy, member.group, "fsdp", 2, work=work)
            member.link.recorded_step = 2
            obey(member, session_rig.abort(1))
        else:
            obey(member, Sync(0, None))
        before = member.link.recorded_step
        told = replace(form(2, ranks.index, 2, ranks.address, 2), recorded_step=2)
        is_at_work = obey(member, told)
        return before, is_at_work, member.step

    assert run_ranks(2, body) == [(0, True, 2), (2, True, 2)]
