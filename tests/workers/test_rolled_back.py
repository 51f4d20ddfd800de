"""A sharded run that loses rows outside of a step: the user's loop begins again further back."""

import pytest
import torch

from elastic.protocol.messages.to_worker import Finish, Load
from elastic.store.catalogue import Catalogue
from elastic.store.files import open_folder
from tests.workers import where
from tests.workers.session_rig import FakeLink, Tiny, abort, form, spec
from workers.checkpoint.saver import Saver
from workers.data.loader import Loader
from workers.health.vitals import Vitals
from workers.membership.member import Member, RunEnded
from workers.membership.state_stream import PeerServer
from workers.parallel.build import build_strategy
from workers.session import Session
from workers.worker import Built, Worker

pytestmark = pytest.mark.usefixtures("place")
STEPS = 4


class Losing:
    """A loop that evaluates after step 2; the first time, the peers are lost in the middle."""

    def __init__(self, member: Member, *, loses: bool) -> None:
        self._member, self._has_lost = member, not loses
        self.begun_at: list[int] = []
        self.evaluated: list[float] = []

    def __call__(self, session: Session) -> None:
        self.begun_at.append(session.step)
        while session.step < STEPS:
            with session.next_step() as step:
                for batch in step.microbatches():
                    step.backward(session.workload.loss(session.model, batch))
                step.commit()
            if session.step == 2:
                samples = session.workload.dataset()
                self.evaluated.append(session.evaluate(samples, self._evaluate))

    def _evaluate(self, model, batch) -> float:
        if not self._has_lost:
            self._has_lost = True
            self._member.hear(abort(1))
        return float(model(batch[0]).mean())


def ended(place: str, *, loses: bool) -> tuple[Losing, Member]:
    settings = spec(parallel="fsdp", steps=STEPS)
    strategy, link, vitals = build_strategy(Tiny(), settings, where.HERE), FakeLink(), Vitals()
    catalogue = Catalogue(open_folder(place).at("checkpoints"))
    member = Member(
        settings, strategy, link, PeerServer("127.0.0.1", "t", lambda: None, 3.0),
        saver=Saver(link, settings), vitals=vitals, device=where.HERE,
        on_load=lambda place, step: strategy.load(catalogue, 0, 0, lambda: None),
        on_log_to=lambda place: None, on_finish=lambda member, place: strategy.weights_sha256(),
    )  # fmt: skip
    link.commands.hear = member.hear
    work = Tiny()
    loader = Loader(work, 3, 12, 3)
    worker = object.__new__(Worker)  # its loop alone, without the process around it
    worker._spec, worker._link, worker._vitals = settings, link, vitals
    worker._returned_at = STEPS
    load = Load(place, 0)
    finish = Finish(2, 0, 1, "succeeded", None, STEPS)
    again = (abort(1), load, form(2, 0)) if loses else ()
    for command in (load, form(1, 0), *again, finish):
        link.commands.put(command)
    loop = Losing(member, loses=loses)
    try:
        session = Session(settings, work, member, loader)
        worker._loop(Built(work, strategy, member.peers, member.saver, member, session, loop))
    except RunEnded:
        return loop, member
    finally:
        loader.close()
    raise AssertionError("the loop went on after the end")


def test_rows_lost_in_an_evaluation_send_the_loop_back_to_the_checkpoint(tmp_path):
    torch.set_num_threads(1)
    calm = ended(str(tmp_path), loses=False)
    loop, member = ended(str(tmp_path), loses=True)
    link = member.link
    assert (loop.begun_at, member.step) == ([0, 0], STEPS)
    (value,) = loop.evaluated  # the first one never ended
    assert [fields["evaluation"].values for fields, _ in link.of("evaluated")] == [{"value": value}]
    assert [fields["step"] for fields, _ in link.of("loaded")] == [0, 0]
    (done,) = link.of("done")
    assert done[0]["step"] == STEPS
    hashes = [link.of("ended")[0][0]["weights_sha256"] for link in (calm[1].link, link)]
    assert hashes[0] == hashes[1]
    assert calm[0].evaluated == loop.evaluated
