"""What a cloud does to a run, and what a run says of it: the rows of submit, spot and autoscaling.

    python -m tests.bench.clouds [--only spot,wish,bare,autoscaler,resubmit] [--times 5]

spot: a notice of the machine of rank 0, from a metadata server, needs namespaces (root).
wish: workers that no kind of node of the autoscaler can hold. bare: a cluster without a slot.
autoscaler: from the command to the first step, on nodes that are not there yet; their workers are
forked from a process that has imported torch. resubmit: the same submit again, whose cluster was
lost or whose job's comment was edited. Those with steps end with the weights of the undisturbed
run.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

from tests.bench.harness import REPOSITORY, console, machine, record, storage_directory
from tests.bench.harness import environment as bench_environment
from tests.cluster.fake_cloud import FakeCloud
from tests.cluster.fork_client import ADDRESS
from tests.cluster.fork_server import ForkServer
from tests.cluster.hosts import Hosts, sh
from tests.cluster.job_cluster import JobCluster
from tests.cluster.live import JOBS, LiveRun, environment
from tests.cluster.terminal import Terminal
from tests.cluster.test_submit import STEPS as SUBMITTED_STEPS
from tests.cluster.test_submit import Laptop

TOY = f"{JOBS / 'toy.py'}:Toy"
METADATA, PORT, NOTICE_S = "169.254.169.254", 80, 120.0
STEPS = 100
PATIENCE_S = 120.0
LACK = "waiting for a place for 2 workers"
Row = dict[str, str]


def seconds(values: list[float]) -> str:
    return f"{median(values):.2f} s (worst {max(values):.2f})"


def hash_of(steps: int, folder: Path) -> str:
    """Of the undisturbed run."""
    name = f"calm-{steps}"
    with LiveRun(TOY, folder, name, folder / "ray", workers=1, steps=steps) as run:
        return run.finish()["result"]["weights_sha256"]


def said_of(hashes: list[str], expected: str) -> str:
    return f"{sum(found == expected for found in hashes)} of {len(hashes)}"


# --- spot ------------------------------------------------------------------------
def spot(times: int, folder: Path) -> Row:
    drained, gaps, hashes, lost = list[float](), list[float](), list[str](), 0
    for number in range(times):
        with Hosts(4, head_cpus=0) as hosts, metadata(hosts, folder / str(number)) as notices:
            hosts.start_ray()
            options = {"workers": 2, "standby": 1, "steps": STEPS, "spot": "auto"}
            slow = {"set": ["sleep=0.1"], "max_failures": 0}
            with hosts.run(TOY, folder, f"spot-{number}", **options, **slow) as run:
                status = run.wait_for(is_full_with_standby)
                leaver, at = status["workers"][0], time.time()
                notices[hosts.host_of(leaver["node_ip"])].write_text(str(NOTICE_S))
                gone = leaver["id"]
                run.wait_for(lambda s, g=gone: g not in [w["id"] for w in s["workers"]])
                drained.append(time.time() - at)
                result = run.finish()["result"]
            gaps.append(longest_gap_s(run, at))
            hashes.append(result["weights_sha256"])
            lost += result["lost_steps"]
    return {
        "to drained": seconds(drained),
        "longest gap": seconds(gaps),
        "lost steps": str(lost),
        "equal hashes": said_of(hashes, hash_of(STEPS, folder)),
    }


def is_full_with_standby(status: dict) -> bool:
    states = [w["state"] for w in status["standby"]]
    return status["world_size"] == 2 and status["step"] > 5 and states == ["standby"]


def longest_gap_s(run: LiveRun, since: float) -> float:
    """Between two commits after that, the median step taken off."""
    stamps = [m["time"] for m in run.lines("metrics.jsonl")]
    gaps = [b - a for a, b in itertools.pairwise(stamps) if b > since]
    return max(gaps) - median(gaps)


@contextmanager
def metadata(hosts: Hosts, folder: Path) -> Generator[dict[int, Path]]:
    """On each host but the head; the file by which each gives notice."""
    folder.mkdir()
    servers, files = list[subprocess.Popen[str]](), dict[int, Path]()
    try:
        for host in range(1, hosts.count):
            sh("ip", "-n", hosts.name(host), "address", "add", f"{METADATA}/32", "dev", "lo")
            files[host] = folder / f"notice-{host}"
            command = [sys.executable, "-m", "tests.metadata_server", "aws", METADATA, str(PORT)]
            server = subprocess.Popen(
                hosts.inside(host, *command, str(files[host])),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            servers.append(server)
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
        yield files
    finally:
        for server in servers:
            server.communicate(timeout=10)


# --- the autoscaler -----------------------------------------------------------------
@contextmanager
def cloud() -> Generator[FakeCloud]:
    """Its nodes' workers are forked; what is started here is not."""
    server = ForkServer()
    os.environ[ADDRESS] = server.address
    try:
        found = FakeCloud()
    finally:
        del os.environ[ADDRESS]
    try:
        yield found
    finally:
        found.close()
        server.close()


def wish(times: int, folder: Path) -> Row:
    """Until the run says that no node can hold a worker, and what there is."""
    told = list[float]()
    with cloud() as found:
        for number in range(times):
            begun = time.monotonic()
            options = {"address": found.address, "workers": 2, "cpus_per_worker": 64}
            with LiveRun(TOY, folder, f"wish-{number}", folder / "ray", **options) as run:
                run.wait_for(lambda s: "has no kind of node for that" in s.get("reason", ""))
                told.append(time.monotonic() - begun)
                assert "of 64 CPUs; the cluster has 1 node" in run.status()["reason"]
    return {"told with what there is": seconds(told)}


def autoscaler(times: int, folder: Path) -> Row:
    first, full, gone, theirs = (list[float]() for _ in range(4))
    hashes, lost = list[str](), 0
    with cloud() as found:
        for number in range(times):
            begun = time.monotonic()
            options = {"workers": "1..3", "steps": STEPS, "set": ["sleep=0.2"]}
            name = f"grown-{number}"
            there = {"address": found.address}
            with LiveRun(TOY, folder, name, folder / "ray", **options, **there) as run:
                run.wait_for(lambda s: s["step"] > 0)
                first.append(time.monotonic() - begun)
                run.wait_for_step(lambda s: s["world_size"] == 3)
                full.append(time.monotonic() - begun)
                result = run.finish()["result"]
            gone.append(found.wait_until_empty(PATIENCE_S))
            theirs.append(ray_train_s(found.address))
            found.wait_until_empty(PATIENCE_S)
            hashes.append(result["weights_sha256"])
            lost += result["lost_steps"]
    return {
        "submit to first step": seconds(first),
        "to three workers": seconds(full),
        "Ray Train with three": seconds(theirs),
        "no node left after the end": seconds(gone),
        "lost steps": str(lost),
        "equal hashes": said_of(hashes, hash_of(STEPS, folder)),
    }


def ray_train_s(address: str) -> float:
    """From the process's start to the first step, on the same cluster."""
    command = [sys.executable, "-m", "tests.bench.ray_train", "--workers", "3", "--steps", "5"]
    begun = time.time()
    done = subprocess.run(
        [*command, "--address", address],
        **{"capture_output": True, "text": True, "check": True},
        env=bench_environment(),
        cwd=REPOSITORY,
        timeout=2 * PATIENCE_S,
    )
    return json.loads(done.stdout.splitlines()[-1])["first_step_at"] - begun


# --- nothing there --------------------------------------------------------------------
@contextmanager
def bare_cluster() -> Generator[tuple[str, dict[str, str]]]:
    """A head without slots: its address, and the environment of who uses it."""
    from ray.cluster_utils import Cluster

    temp = Path(tempfile.mkdtemp(prefix="ec-", dir="/tmp"))
    env = environment(temp)
    os.environ.update(env)
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 10**8}
    found = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield found.address, env
    finally:
        found.shutdown()
        shutil.rmtree(temp, ignore_errors=True)


def bare(times: int, folder: Path) -> Row:
    """What somebody sees who starts a run on it, and how soon."""
    first, status, left = list[float](), list[float](), list[float]()
    with bare_cluster() as (address, env):
        for number in range(times):
            command = [sys.executable, "-m", "elastic", "run", TOY, "--workers", "2"]
            command += ["--steps", "10", "--global-batch", "48", "--micro-batch", "6"]
            command += ["--storage", str(folder), "--address", address]
            shown, detached = f"shown-{number}", f"detached-{number}"
            with Terminal([*command, "--name", shown], env) as terminal:
                until(lambda s=shown: (folder / s / "status.json").exists())
                status.append(time.monotonic() - terminal.begun_at)
                until(lambda t=terminal: any(LACK in line for line in t.lines()))
                assert terminal.first_s is not None
                first.append(terminal.first_s)
            begun = time.monotonic()
            words = [*command, "--name", detached, "--detach"]
            subprocess.run(words, env=env, check=True, capture_output=True, timeout=PATIENCE_S)
            left.append(time.monotonic() - begun)
            stop = [sys.executable, "-m", "elastic", "stop", str(folder / detached)]
            subprocess.run(stop, env=env, check=True, capture_output=True, timeout=PATIENCE_S)
    return {
        "first line": seconds(first),
        "status.json": seconds(status),
        "--detach returns": seconds(left),
    }


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, f"not in {PATIENCE_S} s"
        time.sleep(0.01)  # polling, bounded by the deadline


# --- submitted again ----------------------------------------------------------------
def resubmit(times: int, folder: Path) -> Row:
    """A run that is submitted once and then `times` times again: its cluster was lost, or it was
    stopped and its job edited."""
    server = ForkServer()
    os.environ[ADDRESS] = server.address
    try:
        with JobCluster(folder / "cluster") as cluster:
            laptop = Laptop(folder, folder / "ray", cluster)
            before, begun_at = 0, list[bool]()
            for number in range(times):
                process, job = submit(laptop, edit=number // 2)
                until(lambda b=before: saved(laptop) > b)
                begun_at.append(first_of_launch(laptop) == before)
                if number % 2:
                    assert laptop.say("stop", job).returncode == 0
                else:
                    cluster.lose()
                    cluster.start()
                process.kill()
                process.communicate()
                before = saved(laptop)
            laptop.until.touch()
            process, job = submit(laptop, edit=times // 2)
            _, err = process.communicate(timeout=2 * PATIENCE_S)
            assert process.returncode == 0, err
            begun_at.append(first_of_launch(laptop) == before)
    finally:
        del os.environ[ADDRESS]
        server.close()
    lines = (laptop.place / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    found = json.loads((laptop.place / "result.json").read_text())["weights_sha256"]
    return {
        "resumed": f"{sum(begun_at[1:])} of {times}",
        "equal hash": said_of([found], hash_of(SUBMITTED_STEPS, folder)),
        "gapless": "yes" if steps == list(range(1, SUBMITTED_STEPS + 1)) else "NO",
    }


def submit(laptop: Laptop, edit: int) -> tuple[subprocess.Popen[str], str]:
    """The job of the toys; the process and the job's id. edit: what its comment says."""
    laptop.write_job(setup={})
    text = f"# Edit {edit}.\nfrom toy import Toy\n\n\nclass Job(Toy):\n    pass\n"
    (laptop.folder / "job.py").write_text(text)
    process = laptop.start("submit", str(laptop.folder / "elastic.yaml"))
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "is submitted to" in line, process.communicate()
    shutil.rmtree(laptop.folder)
    return process, line.split()[1]


def saved(laptop: Laptop) -> int:
    """The step of the newest checkpoint."""
    steps = [int(p.parent.name[5:]) for p in laptop.place.glob("checkpoints/step-*/manifest.json")]
    return max(steps, default=0)


def first_of_launch(laptop: Laptop) -> int:
    """The step that the run was at when it was launched last."""
    lines = (laptop.place / "journal.jsonl").read_text().splitlines()
    loaded = 0
    for line in lines:
        with suppress(ValueError, KeyError):
            entry = json.loads(line)["entry"]
            if entry["type"] == "Started":
                loaded = 0
            elif (entry.get("event") or {}).get("type") == "Loaded":
                loaded = entry["event"]["step"]
    return loaded


ROWS: dict[str, tuple[Callable[[int, Path], Row], int, str]] = {
    "spot": (spot, 2, "notice of rank 0's machine, 2 workers and a standby on 3 hosts"),
    "wish": (wish, 2, "2 workers of 64 CPUs, autoscaler v2 with nodes of one"),
    "bare": (bare, 2, "2 workers, a cluster without a slot"),
    "autoscaler": (autoscaler, 3, "0 to 3 fake nodes, autoscaler v2, workers forked"),
    "resubmit": (resubmit, 2, "cluster lost, or job stopped and its comment edited, in turn"),
}
"""Name -> what measures it, with how many ranks, the setting."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--times", type=int, default=5, help="resubmit: twice as often")
    given = parser.parse_args()
    failed = False
    for name in given.only.split(","):
        measure, ranks, setting = ROWS[name]
        times = given.times * (2 if name == "resubmit" else 1)
        about = machine(ranks)
        with storage_directory() as folder:
            (folder / "ray").mkdir()
            row = measure(times, folder)
        console.print(row)
        record(f"clouds: {name}", about=about, setting=f"{setting}, {times} times", results=row)
        failed |= "NO" in row.values() or not is_whole(row)
    return int(failed)


def is_whole(row: Row) -> bool:
    """All of how many."""
    counts = [value.split(" of ") for value in row.values() if " of " in value]
    return all(found == wanted for found, wanted in counts)


if __name__ == "__main__":
    sys.exit(main())
