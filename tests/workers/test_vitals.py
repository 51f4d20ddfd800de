"""What a worker shows of itself, as its pulse reads it."""

import os
import signal
from dataclasses import asdict
from mmap import PROT_READ, mmap

import torch

from workers.health.compilation import Compilation
from workers.health.pulse import read_vitals
from workers.health.vitals import PHASES, Vitals


def shown(vitals: Vitals) -> dict:
    return asdict(read_vitals(mmap(vitals.fd, 4096, prot=PROT_READ), worker=3))


def test_a_pulse_reads_what_the_worker_shows():
    vitals = Vitals()
    vitals.generation, vitals.step = 3, 17
    vitals.enter("reduce")
    vitals.waits_in(5, "all_to_all", 1 << 40)
    seen = shown(vitals)
    assert (
        seen.items()
        >= {
            "worker": 3,
            "generation": 3,
            "step": 17,
            "phase": "reduce",
            "waits_for_peers": True,
            "p95_s": None,
            "is_new_there": True,
            "collective": (5, "all_to_all", 1 << 40),
            "part": "",
            "own": {"steps": 0, "seconds": 0.0, "data_s": 0.0},
        }.items()
    )
    vitals.waits_in(2, "all_gather", 9, "replica12")
    found = shown(vitals)
    assert (found["collective"], found["part"]) == ((2, "all_gather", 9), "replica12")
    vitals.waits_in(2, "all_gather", 9, "a part of another strategy's own")
    assert shown(vitals)["part"] == "a part of another strate", "as much as there is room for"
    vitals.enter("done")
    assert (shown(vitals)["phase"], shown(vitals)["p95_s"]) == ("done", 0.0)


def test_a_phase_has_a_usual_time_after_once_and_a_settled_one_after_eight_times():
    now = 50.0
    vitals = Vitals(lambda: now)
    found = []
    for _ in range(9):
        vitals.enter("compute")
        found.append((shown(vitals)["p95_s"], shown(vitals)["is_new_there"]))
        now += 2.0
        vitals.enter("reduce")
    assert found == [(None, True), *[(2.0, True)] * 7, (2.0, False)]


def test_what_was_given_up_and_a_few_evaluations_make_no_usual_time():
    vitals = Vitals()
    for _ in range(7):
        vitals.enter("reduce")
        vitals.enter("pool")
        vitals.enter("evaluate")
        vitals.enter("user")
    found = []
    for phase in ("reduce", "evaluate", "user", "evaluate"):
        vitals.enter(phase)
        found.append(shown(vitals)["p95_s"] is not None)
    assert found == [False, False, False, True]


def test_own_time_is_data_and_computation_and_nothing_that_waits_for_others():
    now = 50.0
    vitals = Vitals(lambda: now)
    for attempt in range(3):
        vitals.begin_step()
        for phase, seconds in (("data", 1.0), ("compute", 2.0), ("feed", 9.0), ("compute", 2.0)):
            vitals.enter(phase)
            now += seconds
        with vitals.gathering():
            now += 100.0
        now += 1.0
        vitals.enter("reduce")
        if attempt:  # the first one was given up
            vitals.end_step(num_microbatches=2)
    vitals.enter("vote")
    assert shown(vitals)["own"] == {"steps": 2, "seconds": 3.0, "data_s": 0.5}


def test_a_compilation_in_the_middle_of_a_step_is_a_phase_of_its_own():
    vitals, seen = Vitals(), []
    compilation = Compilation(vitals)
    compilation.hear()

    def backend(graph, _):
        seen.append(shown(vitals)["phase"])
        return graph.forward

    double = torch.compile(lambda x: 2 * x, backend=backend, dynamic=False)
    compilation.hear()
    vitals.enter("compute")
    for size in (3, 3, 4):
        assert double(torch.ones(size)).sum() == 2 * size
        seen.append(vitals.phase)
    assert seen == ["compile", "compute", "compute", "compile", "compute"]
    assert set(seen) <= set(PHASES)


def test_a_reader_never_sees_a_process_that_has_not_begun():
    """Read by another process all the while it is written."""
    vitals, seen = Vitals(), set()
    vitals.generation = 3
    vitals.enter("reduce")
    writer = os.fork()
    if writer == 0:
        while True:
            vitals.enter("vote")
            vitals.enter("reduce")
    try:
        with mmap(vitals.fd, 4096, prot=PROT_READ) as memory:
            for _ in range(50_000):
                read = read_vitals(memory, 3)
                seen.add((read.generation, read.phase_s < 3600))
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert seen == {(3, True)}


def test_a_script_tells_its_own_part_and_the_steps_around_it_say_nothing():
    vitals = Vitals()
    for own_s in (0.1, 0.2, 0.3):
        vitals.tell_own(own_s, own_s / 2)
        vitals.end_step(1.0)
    assert shown(vitals)["own"] == {"steps": 3, "seconds": 0.2, "data_s": 0.1}


def test_what_a_host_waits_for_in_the_middle_of_passes_is_its_devices_or_its_peers():
    now = [0.0]
    vitals = Vitals(clock=lambda: now[0])
    vitals.enter("compute")
    vitals.begin_step()

    def wait(phase, seconds):
        with vitals.waiting_for(phase):
            now[0] += seconds
            return vitals.phase, shown(vitals)["waits_for_peers"]

    assert wait("compute", 2.0) == ("compute", False)
    assert wait("gather", 5.0) == ("gather", True)
    with vitals.gathering():  # what the strategy takes for its peers may be this rank's own
        assert wait("compute", 4.0) == ("compute", False)
        assert vitals.phase == "gather"
    now[0] += 1.0
    vitals.enter("reduce")
    assert wait("compute", 9.0)[0] == "reduce", "the passes are over"
    vitals.end_step(1)
    vitals.enter("vote")
    assert shown(vitals)["own"]["seconds"] == 7.0


def test_a_script_that_tells_its_own_part_may_wait_for_its_device():
    vitals = Vitals()
    vitals.enter("compute")
    vitals.tell_own(0.5, 0.0)
    with vitals.waiting_for("compute"):
        pass
    assert shown(vitals)["own"]["seconds"] == 0.5
