"""What is said of a step that broke before its vote, and of one that is rolled forward."""

from dataclasses import replace

import pytest
import torch

from elastic.protocol.errors import PeerLost
from elastic.protocol.messages.to_worker import Load
from elastic.protocol.step_record import StepMetrics
from elastic.store.catalogue import Catalogue
from elastic.store.files import open_folder
from tests.workers import where
from tests.workers.session_rig import FakeLink, Tiny, abort, spec
from tests.workers.test_member import LosesVote
from tests.workers.test_rolled_back import form
from workers.checkpoint.saver import Saver
from workers.data.loader import Loader
from workers.health.vitals import Vitals
from workers.membership.member import Member
from workers.membership.state_stream import PeerServer
from workers.parallel.build import build_strategy
from workers.session import Session

pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture(params=["ddp", "fsdp"])
def made(request, tmp_path):
    """A session whose replica has the initial state, and no generation yet."""
    torch.set_num_threads(1)
    settings = spec(parallel=request.param)
    strategy, link = build_strategy(Tiny(), settings, where.HERE), FakeLink()
    catalogue = Catalogue(open_folder(str(tmp_path)).at("checkpoints"))

    def load(place, step):
        return strategy.load(catalogue, 0, 0, lambda: None)

    member = Member(
        settings, strategy, link, PeerServer("127.0.0.1", "t", lambda: None, 3.0),
        saver=Saver(link, settings), vitals=Vitals(), device=where.HERE, on_load=load,
        on_log_to=lambda place: None, on_finish=lambda member, place: "",
    )  # fmt: skip
    link.commands.hear = member.hear
    loader = Loader(Tiny(), 3, 12, 3)
    for command in (Load("", 0), form(1, 0)):
        link.commands.put(command)
    yield Session(settings, Tiny(), member, loader), member, link
    loader.close()


def step(session: Session) -> bool:
    with session.next_step() as attempt:
        for batch in attempt.microbatches():
            attempt.backward(session.workload.loss(session.model, batch))
        attempt.commit()
    return attempt.committed


def lines_of(link) -> list[dict]:
    return [step.metrics for fields, _ in link.of("committed") for step in fields["steps"]]


def told(metrics: StepMetrics) -> tuple[int, int]:
    return metrics.step, metrics.generation


def test_a_step_that_broke_before_its_vote_is_not_said_to_be_committed(made):
    """The rows' squares, which ranks exchange where they are sharded, lost a peer."""
    session, member, link = made
    assert step(session)
    before_vote = member.strategy.before_vote

    def lose_a_peer(*_):
        member.strategy.before_vote = before_vote
        raise PeerLost("connection closed by peer")

    member.strategy.before_vote = lose_a_peer
    link.commands.put(abort(1))
    link.commands.put(form(2, 1))
    assert not step(session)
    assert [told(line) for line in lines_of(link)] == [(1, 1), (1, 1)], "the first said again"
    assert step(session)
    assert told(lines_of(link)[-1]) == (2, 2)
    assert len(member.records.known().steps) == 2


def test_a_step_that_broke_in_its_apply_leaves_no_vote_of_another_step(made):
    session, member, link = made
    assert step(session)
    train_state = member.train_state
    apply = train_state.apply

    def in_vain(update, *_):
        train_state.apply = apply
        raise PeerLost("connection closed by peer")

    train_state.apply = in_vain
    link.commands.put(abort(1))
    link.commands.put(form(2, 1))
    assert not step(session)
    suspended, payload = link.of("suspended")[-1]
    assert (suspended["step"], suspended["vote"], payload) == (1, None, b"")


def roll_forward(made, **other) -> Session:
    """A step whose vote was lost here is to be rolled forward with that of the step before, some of
    which is said otherwise."""
    session, member, link = made
    assert step(session)
    member.own.group = LosesVote()
    session._reducer_of = (0, ())  # the reducer of the group that fails
    vote, payload = member.records.vote_of(1)
    link.commands.put(abort(1))
    link.commands.put(form(2, 2, vote=replace(vote, **other), payload=payload))
    return session


only_whole = pytest.mark.parametrize("made", ["ddp"], indirect=True)
"""A sharded member goes back instead."""


@only_whole
def test_a_vote_of_another_step_rolls_nobody_forward(made):
    session = roll_forward(made)
    with pytest.raises(AssertionError, match=r"\(1, 1\)"):
        step(session)
    assert session.step == 1


@only_whole
def test_a_step_that_is_rolled_forward_is_of_those_who_computed_it(made):
    session = roll_forward(made, step=2)  # its numbers are as good as any
    assert step(session)
    assert told(lines_of(made[2])[-1]) == (2, 1)
