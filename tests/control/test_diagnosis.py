"""What happens between suspicion and loss: everybody is asked, nobody is waited for in vain."""

import asyncio
import socket
from concurrent.futures import Future
from dataclasses import replace

import pytest

from elastic.control.detection.hang import Watch, watch
from elastic.control.detection.patience import Costly, PhaseOfStep
from elastic.control.events import CollectiveFailed
from elastic.on_ray.detection.diagnosis import Diagnosis
from elastic.on_ray.slots import Slot
from elastic.protocol.membership import Membership, NumberSet
from elastic.protocol.messages.pulse import (
    KILLED,
    Heartbeat,
    Question,
    ReachAsked,
    Reached,
    Stacks,
)
from elastic.protocol.messages.to_controller import CollectiveFailed as FailureReport
from elastic.protocol.messages.to_controller import Diverged
from elastic.protocol.timeouts import MAX_DETECT_S, MIN_DETECT_S, timeouts_of
from tests.control import virtual_time
from workers.health.vitals import PHASES, WAITING

HUNG = Heartbeat(1, 4, 9, "compute", 6.0, 0.1, False, "R")
WAITS = replace(HUNG, worker=2, phase="reduce", phase_s=5.0, waits_for_peers=True)
WHY = "others have waited for it for 5.0 s; 6.0 s in compute of step 10 (usually under 0.10 s)"


class Cluster:
    """The controller's process, as far as a diagnosis sees it. Its time stands at 20 s."""

    detect_s = 3.0

    def __init__(
        self,
        *beats: Heartbeat,
        answering: tuple[int, ...],
        deaf: tuple[int, ...] = (),
        reached: dict[int, list[str]] | None = None,
    ):
        self.workers = {
            b.worker: Slot(
                Future(), watch=Watch(b, 20.0), node_ip=f"h{b.worker}", peer_address=("h", b.worker)
            )
            for b in beats
        }
        self.reached, self.time = reached or {}, 20.0
        self.recorded_step = 9
        self.answering, self.deaf = answering, deaf
        self.links = self.host = self.record = self
        self.diagnosis = Diagnosis(self)  # pyright: ignore[reportArgumentType]
        self.places: tuple[Costly, ...] = ()
        self.stages: dict[int, str] = {}
        self.happened: list = []
        self.work: list[asyncio.Task] = []

    def now(self) -> float:
        return self.time

    def in_background(self, work) -> None:
        self.work.append(asyncio.ensure_future(work))

    def ask_pulse(self, worker: int, question: Question) -> bool:
        assert question.timeout_s < 0.5
        if worker in self.answering:
            stacks = Stacks(f"stacks of {worker}".encode())
            is_reach = isinstance(question, ReachAsked)
            answer = Reached(tuple(self.reached[worker])) if is_reach else stacks
            asyncio.get_running_loop().call_soon(self.diagnosis.hear, worker, answer)
        return worker not in self.deaf

    def keep_stacks(self, texts: dict[str, str]) -> Future:
        self.happened.append({name: text.splitlines()[1:] for name, text in texts.items()})
        done = Future()
        done.set_result(None)
        return done

    def costly(self) -> tuple[Costly, ...]:
        return self.places

    def stage_of(self, worker: int) -> str:
        return self.stages.get(worker, "")

    def note(self, kind: str, fields: dict) -> None:
        self.happened.append(fields)

    def say(self, event) -> None:
        self.happened.append(event)

    def lost(self, *what) -> None:
        self.happened.append(what)

    def look(self) -> list:
        async def run() -> None:
            self.diagnosis.look()
            self.diagnosis.look()  # the next tick: one diagnosis at a time
            assert len(self.work) <= 1
            for work in self.work:
                await asyncio.wait_for(work, 5)
            self.work.clear()

        virtual_time.run(run())
        return self.happened


def stood(worker: int, where: str, stacks: str) -> list[str]:
    return [f"# this is w{worker}: {where}, process state R", stacks]


def test_everybodys_stacks_are_saved_before_the_suspect_is_lost():
    other = replace(WAITS, worker=7, generation=3, phase_s=0.1)
    cluster = Cluster(HUNG, WAITS, other, answering=(1, 2, 7))
    assert cluster.look() == [
        {
            "stacks-g4-w1.txt": stood(1, "6.0 s in compute of step 10", "stacks of 1"),
            "stacks-g4-w2.txt": stood(2, "5.0 s in reduce of step 10", "stacks of 2"),
        },
        (1, "hung", f"{WHY}; stacks in logs/stacks-g4-*.txt", 14.0, PhaseOfStep(9, "compute")),
    ]


def test_a_suspect_that_dies_while_stacks_are_taken_is_lost_by_what_it_was_accused_of():
    cluster = Cluster(HUNG, WAITS, answering=(1, 2))
    suspect = cluster.workers[1]
    cluster.look()
    assert (suspect.last_cause, suspect.last_words) == ("hung", WHY)
    assert cluster.workers[2].last_cause == ""


def test_a_suspects_own_last_words_stand():
    slot = Slot(Future(), last_words="loader process 7 exited with status 9")
    slot.accuse("hung", WHY)
    assert (slot.last_words, slot.last_cause) == ("loader process 7 exited with status 9", "")


def test_a_suspects_stage_is_told_with_it():
    cluster = Cluster(HUNG, WAITS, answering=(1, 2))
    cluster.stages = {1: "; it has stage 1 of pipeline 0, blocks 3 to 5"}
    why = f"{WHY}; it has stage 1 of pipeline 0, blocks 3 to 5; stacks in logs/stacks-g4-*.txt"
    assert cluster.look()[1] == (1, "hung", why, 14.0, PhaseOfStep(9, "compute"))


def test_who_is_slow_where_its_predecessor_was_ended_is_told_of_once_and_waited_for():
    cluster = Cluster(HUNG, WAITS, answering=(1, 2))
    cluster.places = (Costly(PhaseOfStep(9, "compute"), NumberSet.of((0,))),)
    told = {"step": 9, "phase": "compute", "worker": "w1", "lost": ["w0"], "patience_s": 300.0}
    assert cluster.look() == [{**told, "why": WHY}]


def test_the_next_look_after_a_loss_is_patient_though_the_ledger_has_not_heard_of_it():
    cluster = Cluster(HUNG, replace(HUNG, worker=3), WAITS, answering=(1, 2, 3))
    assert [lost[0] for lost in cluster.look()[1:]] == [1]
    del cluster.workers[1]
    cluster.happened = []
    assert [fields["worker"] for fields in cluster.look()] == ["w3"]


def test_a_suspect_without_a_pulse_or_with_a_deaf_one_is_lost_all_the_same():
    for deaf, why in (((1,), "has no connection"), ((), "has not answered in 0.4 s")):
        found, lost = Cluster(HUNG, WAITS, answering=(2,), deaf=deaf).look()
        silence = f"its pulse {why}, last heard 0.0 s ago"
        assert found["stacks-g4-w1.txt"] == stood(1, "6.0 s in compute of step 10", silence)
        assert found["stacks-g4-w2.txt"][-1] == "stacks of 2"
        assert lost[:2] == (1, "hung")


def test_whose_pulse_is_silent_is_not_waited_for_and_said_to_be():
    cluster = Cluster(HUNG, WAITS, answering=(2,))
    cluster.workers[1].watch = Watch(HUNG, 13.9)
    cluster.workers[1].peer_address = None
    found, lost = cluster.look()
    silence = "its pulse is silent, last heard 6.1 s ago"
    assert found["stacks-g4-w1.txt"] == stood(1, "12.1 s in compute of step 10", silence)
    assert lost[:2] == (1, "heartbeat_silent")


@pytest.mark.parametrize("detect_s", [MIN_DETECT_S, 3.0, MAX_DETECT_S, None])
def test_an_answer_takes_as_long_as_a_busy_machine_needs_whatever_detect_s_is(detect_s):
    assert timeouts_of(detect_s).diagnosis_s == 0.5


def test_a_pulse_that_has_just_lost_its_connection_is_asked_once_it_is_back():
    cluster = Cluster(HUNG, WAITS, answering=(1, 2), deaf=(2,))
    ask = cluster.ask_pulse

    def ask_then_return(worker: int, header: dict) -> bool:
        if worker != 2 or not cluster.deaf:
            return ask(worker, header)
        cluster.deaf = ()  # its next heartbeat comes over another connection
        asyncio.get_running_loop().call_soon(cluster.diagnosis.hear_beat, worker)
        return False

    cluster.ask_pulse = ask_then_return
    found, _ = cluster.look()
    assert found["stacks-g4-w2.txt"][-1] == "stacks of 2"
    cluster.diagnosis._unasked, asked = {2}, list[int]()
    cluster.ask_pulse = lambda worker, header: asked.append(worker) is None
    cluster.diagnosis.hear_beat(2)
    assert asked == [], "the diagnosis is over"


def test_a_worker_whose_pulse_says_that_it_was_killed_is_lost_before_its_connection_ends():
    cluster = Cluster(HUNG, replace(WAITS, process_state=KILLED), answering=())
    for worker in (1, 2, 3):  # the third one is not known
        cluster.diagnosis.hear_beat(worker)
    assert cluster.happened == [(2, "process_died")]


def test_who_does_not_answer_an_abort_is_asked_for_its_stacks_too():
    alone = Cluster(HUNG, answering=(1,))
    assert alone.look() == [], "nobody waits for it"
    alone.diagnosis.expect_answers(Membership(4, (1, 2)))
    alone.now = lambda: 23.5
    alone.workers[1].watch = Watch(HUNG, 23.5)
    assert alone.look()[-1][:2] == (1, "hung")
    alone.diagnosis.hear_answer(1)
    alone.happened, alone.work = [], []
    assert alone.look() == []


@pytest.mark.parametrize("phase", PHASES)
def test_whoever_was_asked_is_watched_in_every_phase_by_its_own_usual_time(phase: str):
    """Nothing else ends the wait for its answer, and no member may wait for it."""
    beat = replace(HUNG, phase=phase, waits_for_peers=phase in WAITING, is_new_there=True)
    for usual_s, limit_s in ((None, 300.0), (0.1, 30.0), (60.0, 300.0)):
        for phase_s, lost in ((limit_s - 1, []), (limit_s + 1, [(1, "hung")])):
            alone = asked(replace(beat, phase_s=phase_s, p95_s=usual_s), at=20.0 + phase_s)
            assert [lost[:2] for lost in alone.look()[-1:]] == lost


def test_whoever_was_asked_and_is_frozen_or_silent_is_lost_wherever_it_is():
    beat = replace(HUNG, phase_s=1.0, p95_s=60.0)
    stopped = replace(beat, process_state="T", stopped_s=3.1)
    for watched, cause in (
        (watch(None, stopped, 20.0), "hung"),
        (Watch(beat, 13.9), "heartbeat_silent"),
    ):
        both = asked(beat, replace(HUNG, worker=2, phase="pool", p95_s=None), at=20.0)
        both.workers[1].watch, both.workers[1].peer_address = watched, None
        assert both.look()[-1][:2] == (1, cause)


def asked(*beats: Heartbeat, at: float) -> Cluster:
    """To give their generation up, at 20 s."""
    cluster = Cluster(*beats, answering=(1, 2))
    cluster.diagnosis.expect_answers(Membership(4, (1, 2)))
    cluster.time = at
    for slot in cluster.workers.values():
        slot.watch = replace(slot.watch, heard_at=at)
    return cluster


def test_a_diverged_worker_is_lost_by_anybodys_word():
    cluster = Cluster(answering=())
    cluster.diagnosis.hear_diverged(Diverged(4, (5,), "why"))
    assert cluster.happened == [(5, "diverged", "why")]


def test_where_everybody_waits_is_saved_and_the_generation_is_given_up_once():
    stuck = replace(WAITS, phase_s=70.0, p95_s=0.1, collective=(3, "all_reduce", 9))
    cluster = Cluster(stuck, replace(stuck, worker=5), answering=(2, 5))
    for slot in cluster.workers.values():
        slot.watch = replace(slot.watch, stuck_since=-50.0)
    texts, said = cluster.look()
    assert texts["stacks-g4-w5.txt"] == stood(5, "70.0 s in reduce of step 10", "stacks of 5")
    assert sorted(texts) == ["stacks-g4-w2.txt", "stacks-g4-w5.txt"]
    why = (
        "all 2 members have waited for 70.0 s or more, in reduce of step 10, and none gets on: w2 "
        "in all_reduce 3, w5 in all_reduce 3; a network path between two of them may be cut, or "
        "one has skipped a collective; stacks in logs/stacks-g4-*.txt"
    )
    assert said == CollectiveFailed(4, 0, why, 20.0, is_stall=True)
    cluster.happened, cluster.work = [], []
    assert cluster.look() == [], "it is being given up"


def test_whose_path_to_a_peer_is_cut_is_unreachable_if_a_dial_says_so():
    timeouts = replace(WAITS, unanswered=(("h1", 3.5),))
    one, three = replace(WAITS, worker=1), replace(WAITS, worker=3)
    members = one, timeouts, three
    reached = {1: ["h1", "h2"], 2: ["h2"], 3: ["h1", "h2"]}
    *_, lost = Cluster(*members, answering=(1, 2, 3), reached=reached).look()
    assert lost[:2] == (2, "unreachable")
    assert lost[2].startswith("h1 cannot be reached from h2, and both are heard")
    silent = Cluster(*members, answering=(2, 3), reached=reached)  # w1's own link is cut
    assert silent.look() == []


def test_connections_that_a_cut_has_made_slow_are_made_anew_once_the_path_is_there_again():
    timeouts = replace(WAITS, unanswered=(("h1", 3.5),))
    one, three = replace(WAITS, worker=1), replace(WAITS, worker=3)
    reached = {w: ["h1", "h2"] for w in (1, 2, 3)}
    cluster = Cluster(one, timeouts, three, answering=(1, 2, 3), reached=reached)
    *_, said = cluster.look()
    assert isinstance(said, CollectiveFailed)
    assert (said.generation, said.is_stall) == (4, True)
    assert said.message.startswith("connections between h1 and h2 are not answered, though new")
    cluster.happened, cluster.work, cluster.time = [], [], 30.0
    assert cluster.look() == [], "it is being given up"
    one_silent = Cluster(one, timeouts, three, answering=(1, 2), reached=reached)
    assert one_silent.look() == [], "perhaps it is cut off"


def test_connections_that_were_answered_during_the_dial_are_left_alone():
    timeouts = replace(WAITS, unanswered=(("h1", 3.5),))
    reached = {w: ["h1", "h2"] for w in (1, 2)}
    cluster = Cluster(replace(WAITS, worker=1), timeouts, answering=(1, 2), reached=reached)
    ask = cluster.ask_pulse

    def ask_then_hear(worker: int, question: Question) -> bool:
        cluster.workers[2].watch = Watch(WAITS, 20.0)
        return ask(worker, question)

    cluster.ask_pulse = ask_then_hear
    assert cluster.look() == []


def test_a_failure_that_nobodys_loss_explains_may_be_a_cut_paths():
    computing = [replace(HUNG, worker=w, phase_s=0.1) for w in (1, 2)]
    cluster = Cluster(*computing, answering=(1, 2), reached={1: ["h1"], 2: ["h2"]})
    cluster.diagnosis.expect_answers(Membership(4, (1, 2)))
    assert cluster.look() == []
    cluster.time = 21.5
    *_, lost = cluster.look()
    assert lost[:2] == (2, "unreachable")
    one_lost = Cluster(computing[0], answering=(1,), reached={1: ["h1"]})
    one_lost.diagnosis.expect_answers(Membership(4, (1, 2)))
    one_lost.time = 21.5
    assert one_lost.look() == []


def given_up(cluster: Cluster, generation: int, said: dict[int, str], at: float) -> list:
    """A generation of three, at that time; said: by worker, the host that NCCL got no answer from.
    Who is lost once all have dialled."""
    cluster.diagnosis.expect_answers(Membership(generation, (1, 2, 3)))
    cluster.time = at
    for worker, slot in cluster.workers.items():
        beat = replace(HUNG, worker=worker, generation=generation, phase_s=0.1)
        slot.watch = Watch(beat, at)
        if worker in said:
            failed = FailureReport(generation, 0, "", False, unanswered=said[worker])
            cluster.diagnosis.hear_report(worker, failed)
    cluster.happened = []
    return [what[:2] for what in cluster.look() if isinstance(what, tuple)]


def test_a_host_that_nccl_gets_no_answer_from_twice_at_one_step_is_left_out_though_dials_reach_it():
    beats = [replace(HUNG, worker=w, phase_s=0.1) for w in (1, 2, 3)]
    everywhere = {w: ["h1", "h2", "h3"] for w in (1, 2, 3)}
    cluster = Cluster(*beats, answering=(1, 2, 3), reached=everywhere)
    assert given_up(cluster, 4, {1: "h2", 3: "h2"}, 30.0) == [], "it may have been a moment"
    cluster.recorded_step = 10
    assert given_up(cluster, 5, {1: "h2"}, 40.0) == [], "a step was committed in between"
    assert given_up(cluster, 6, {3: "h1"}, 50.0) == [], "another path"
    assert given_up(cluster, 7, {1: "h2"}, 60.0) == []
    assert given_up(cluster, 8, {2: "h1", 3: "h2"}, 70.0) == [(2, "unreachable")]


def test_who_is_silent_and_whose_process_has_gone_is_lost_at_once():
    """As after a cut of our own link: nobody is suspect yet, and Ray has not heard of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        lives = listener.getsockname()
        with socket.create_server(("127.0.0.1", 0)) as other:
            gone = other.getsockname()
        slow = [replace(HUNG, worker=w, p95_s=None) for w in (1, 2)]
        for address, expected in ((lives, []), (gone, [(1, "process_died")])):
            cluster = Cluster(*slow, answering=())
            cluster.workers[1].watch = Watch(slow[0], 16.0)
            cluster.workers[1].peer_address = address
            assert [lost[:2] for lost in cluster.look()] == expected
            cluster = Cluster(*slow, answering=())
            for slot in cluster.workers.values():
                slot.watch, slot.peer_address = replace(slot.watch, heard_at=16.0), gone
            assert cluster.look() == [], "while all are silent it may be our own link"
