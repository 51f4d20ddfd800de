"""Faults that hit no process: a checkpoint's bits, a full disk, the room on a cluster, packets."""

import os
import random
import signal
import time
from math import inf

import pytest

from elastic.chaos.capacity import AGAIN_S, SETTLE_S, Capacity, need_of
from elastic.chaos.inject import Injector
from elastic.chaos.plan import make_plan
from elastic.chaos.record import read_done
from elastic.chaos.scenario import parse_scenario
from elastic.chaos.storage_faults import BALLAST, Ballast, choose_part, flip_bits
from elastic.chaos.traces import Level, read_levels
from elastic.cli.chaos import refuse_impossible
from elastic.on_ray.driver.packet_loss import lose_here, rules
from elastic.on_ray.driver.placeholders import MOST, Placeholders, places_on
from elastic.protocol.errors import WrongInput
from elastic.protocol.placing import Machine, Need
from elastic.store.files import open_folder
from tests.cli.test_chaos_inject import FakeRun
from tests.small_disk import small_disk


# --- a checkpoint ----------------------------------------------------------------
@pytest.fixture
def checkpointed(tmp_path):
    """A run whose step 20 is not whole yet."""
    for step, is_whole in ((10, True), (20, False)):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "part.safetensors").write_bytes(bytes(1000))
        if is_whole:
            (folder / "manifest.json").write_text("{}")
    return tmp_path / "run"


def test_bits_flip_in_a_part_of_the_newest_whole_checkpoint_and_nowhere_else(checkpointed):
    run = open_folder(str(checkpointed))
    part = choose_part(run, random.Random(0))
    assert part == "step-00000010/part.safetensors"
    flip_bits(run, part, random.Random(0))
    content = (checkpointed / "checkpoints" / part).read_bytes()
    assert len(content) == 1000
    assert sum(byte.bit_count() for byte in content) == 4
    torn = checkpointed / "checkpoints" / "step-00000020" / "part.safetensors"
    assert torn.read_bytes() == bytes(1000)


def test_a_corruption_says_which_file_it_has_hit(checkpointed, tmp_path):
    (tmp_path / "faked").mkdir()
    run = FakeRun(tmp_path / "faked" / "run", [], num_faults=1)
    (checkpointed / "checkpoints").rename(run.directory / "checkpoints")
    assert run.suffer({"what": "corrupt", "when": {"step": 1}}) == [
        ("1.1", "corrupt", None, None, "")
    ]
    assert run.told == ["step 7: corrupt step-00000010/part.safetensors"]


# --- the disk ---------------------------------------------------------------------
@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    with small_disk(tmp_path / "disk", size_mb=2) as found:
        yield found


def free_bytes(folder) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_bsize


def test_a_disk_is_full_until_its_time_is_over_whatever_becomes_free(disk):
    (disk / "other").write_bytes(bytes(500_000))
    told = []
    ballast = Ballast(told.append)
    ballast.fill(open_folder(str(disk)), 1.0, now=10.0, until=12.0)
    assert free_bytes(disk) == 0
    (disk / "other").unlink()
    assert free_bytes(disk) > 0
    ballast.look(11.0)
    assert free_bytes(disk) == 0
    ballast.look(12.0)
    assert free_bytes(disk) > 1_900_000
    assert told == [f"the ballast is gone: {disk / BALLAST}"]
    ballast.look(inf)
    assert len(told) == 1


def test_the_record_of_a_full_disk_is_written_when_there_is_room(disk):
    run = FakeRun(disk / "run", [], num_faults=99)
    scenario = parse_scenario(
        {"faults": [{"what": "fill", "for_s": 0.2, "when": {"step": 1}}]}, "s", disk
    )

    def tell(line):
        run.told.append(line)
        if "ballast" in line:
            run.write("result.json", {})

    folder = open_folder(str(run.directory))
    Injector(folder, scenario, make_plan(scenario, 1), tell=tell).run()
    assert [(d.what, d.whom, d.for_s, d.note) for d in read_done(folder)] == [
        ("fill", str(run.directory), 0.2, "")
    ]


def test_a_status_that_is_old_because_the_disk_was_full_ends_no_scenario(disk):
    run = FakeRun(disk / "run", [], num_faults=99)
    old = time.time() - 60
    faults = [{"what": "fill", "for_s": 0.2, "when": {"step": 1}}]
    faults += [{"what": "fill", "for_s": 0.1, "when": {"after_s": 0.4}}]

    def tell(line):
        os.utime(run.directory / "status.json", (old, old))
        run.told += ["gone"] if "ballast" in line else []
        if run.told == ["gone"] * 2:
            run.write("result.json", {})

    folder = open_folder(str(run.directory))
    scenario = parse_scenario({"faults": faults}, "s", disk)
    Injector(folder, scenario, make_plan(scenario, 1), tell=tell).run()
    assert [(d.what, d.for_s, d.note) for d in read_done(folder)] == [
        ("fill", 0.2, ""), ("fill", 0.1, ""),
    ]  # fmt: skip


def test_a_large_disk_is_left_alone_before_anything_is_done(tmp_path):
    fault = {"what": "fill", "for_s": 1, "at_most_gb": 1e-6, "when": {"step": 1}}
    plan = make_plan(parse_scenario({"faults": [fault]}, "s", tmp_path), 2)
    with pytest.raises(WrongInput, match=r"fill is for a small disk: [0-9.]+ GB are free"):
        refuse_impossible(plan, None, open_folder(str(tmp_path)), None)
    assert list(tmp_path.iterdir()) == []


# --- room on the cluster -------------------------------------------------------------
def test_the_levels_of_a_trace_are_what_there_is_from_its_first_machine_on(tmp_path):
    (tmp_path / "t.csv").write_text("0,0\n50,0\n50,2\n60,2\n60,4\n90,4\n95,1\n95,3\n")
    assert read_levels(tmp_path / "t.csv") == (
        Level(0.0, 0.5), Level(10.0, 1.0), Level(45.0, 0.75),
    )  # fmt: skip
    (tmp_path / "empty.csv").write_text("0,0\n9,0\n")
    with pytest.raises(WrongInput, match="the trace has no machine"):
        read_levels(tmp_path / "empty.csv")


def test_a_plan_of_capacity_has_a_strike_for_each_change_of_the_room(tmp_path):
    (tmp_path / "t.csv").write_text("0,10\n20,9\n40,5\n60,10\n")
    fault = {"what": "capacity", "when": {"trace": "t.csv", "faster": 10}}
    plan = make_plan(parse_scenario({"faults": [fault]}, "s", tmp_path), 4)
    assert [str(strike) for strike in plan] == [
        "1.1 capacity the cluster: room for 4 workers, after 0.00 s",
        "1.2 capacity the cluster: room for 2 workers, after 4.00 s",
        "1.3 capacity the cluster: room for 4 workers, after 6.00 s",
    ]


class FakeHolders:
    """Of a cluster that has six slots."""

    def __init__(self):
        self.held = 0

    def total(self):
        return 6

    def hold(self, count):
        if count > MOST:
            raise WrongInput("too many")
        self.held = count


def test_who_has_no_room_goes_once_the_slots_are_asked_for_and_again_if_it_comes_back():
    holders = FakeHolders()
    capacity = Capacity(lambda: holders)
    assert capacity.num_excess(4, 0.0) == 0
    capacity.make_room(3, now=0.0)
    assert holders.held == 3
    assert capacity.num_excess(4, SETTLE_S / 2) == 0
    assert capacity.num_excess(4, SETTLE_S) == 1
    assert capacity.num_excess(4, SETTLE_S + AGAIN_S / 2) == 0
    assert capacity.num_excess(4, SETTLE_S + AGAIN_S) == 1
    assert capacity.num_excess(3, 100.0) == 0
    capacity.make_room(4, now=101.0)
    assert holders.held == 2
    with pytest.raises(WrongInput):  # it stays as it was
        capacity.make_room(-MOST, now=102.0)
    assert capacity.num_excess(4, 150.0) == 0
    capacity.end()
    assert holders.held == 0
    assert capacity.num_excess(9, 200.0) == 0


class HasHolders(Injector):
    """Has no Ray."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.holders = FakeHolders()
        self._lasting.capacity = Capacity(lambda: self.holders)


def test_a_loss_of_capacity_takes_as_many_workers_as_have_no_room(process, tmp_path):
    workers = [process("ray::WorkerActor.run") for _ in range(3)]
    run = FakeRun(tmp_path / "run", workers, num_faults=3)
    (run.directory / "t.csv").write_text("0,3\n1,2\n")
    fault = {"what": "capacity", "when": {"trace": "t.csv", "faster": 100}}
    scenario = parse_scenario({"name": "s", "faults": [fault]}, "s", run.directory)
    folder = open_folder(str(run.directory))
    injector = HasHolders(folder, scenario, make_plan(scenario, 3), tell=run.tell)
    injector.run()
    done = read_done(folder)
    assert [(d.strike, d.whom) for d in done[:2]] == [
        ("1.1", "room for 3 workers"), ("1.2", "room for 2 workers"),
    ]  # fmt: skip
    assert (done[2].strike, done[2].what, done[2].note) == ("1.2", "capacity", "")
    hit = next(w for w in workers if w.pid == done[2].pid)
    assert hit.wait(60) == -signal.SIGKILL
    assert injector.holders.held == 0, "given back at the end"


def test_as_many_places_are_held_as_workers_fit_and_no_thousands():
    need = Need(2, 0, others={"disk": 1.0})
    machine = Machine("n", "ip", {"CPU": 9.0, "disk": 3.0})
    assert places_on(machine, need) == 3
    assert places_on(Machine("n", "ip", {"CPU": 9.0}), need) == 0
    with pytest.raises(WrongInput, match="257 slots would have to be held"):
        Placeholders(need).hold(MOST + 1)


def test_a_place_is_as_large_as_the_runs_workers():
    config = {"cpus_per_worker": 3, "labels": None, "worker_resources": "disk=2", "steps": 4}
    assert need_of(config, "cuda:0") == Need(3, 1, (), "", {"disk": 2.0})
    with pytest.raises(WrongInput, match=r"config\.json is damaged"):
        need_of({"cpus_per_worker": "many"}, "cpu")


# --- packets -----------------------------------------------------------------------
def test_only_packets_of_the_clusters_other_hosts_are_lost():
    make, begin, end = rules("iptables", "chain", ["10.0.0.2"], 0.25)
    lost = ["-m", "statistic", "--mode", "random", "--probability", "0.25", "-j", "DROP"]
    assert make == [
        ["iptables", "-w", "-N", "chain"],
        ["iptables", "-w", "-A", "chain", "-s", "10.0.0.2", *lost],
        ["iptables", "-w", "-A", "chain", "-d", "10.0.0.2", *lost],
    ]
    assert begin == [["iptables", "-w", "-I", way, "-j", "chain"] for way in ("INPUT", "OUTPUT")]
    assert [words[2:4] for words in end] == [
        ["-D", "INPUT"], ["-D", "OUTPUT"], ["-F", "chain"], ["-X", "chain"],
    ]  # fmt: skip
    cut, _, _ = rules("iptables", "chain", ["10.0.0.2"], 1.0)
    assert cut[1][5:] == ["10.0.0.2", "-j", "DROP"]


def test_where_iptables_may_not_or_is_not_it_is_one_line(monkeypatch, tmp_path):
    tool = tmp_path / "iptables"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="iptables is not installed there"):
        lose_here(["10.0.0.2"], 1.0, 1.0)
    tool.write_text("#!/bin/sh\necho 'Permission denied (you must be root)' >&2\nexit 4\n")
    tool.chmod(0o755)
    with pytest.raises(OSError, match=r"iptables refuses, .* Permission denied \(you must be root"):
        lose_here(["10.0.0.2"], 1.0, 1.0)


def test_a_node_undoes_its_loss_by_itself(monkeypatch, tmp_path):
    tool, said = tmp_path / "iptables", tmp_path / "said"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {said}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert lose_here(["10.0.0.2"], 1.0, 0.1) > time.time()
    deadline = time.monotonic() + 60
    while " -X " not in said.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)  # polling, bounded by the deadline
    ways = [line.split()[1] for line in said.read_text().splitlines()]
    assert ways == ["-N", "-A", "-A", "-I", "-I", "-D", "-D", "-F", "-X"]
