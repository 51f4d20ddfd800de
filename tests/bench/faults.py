"""From a fault to the next committed step: the table of what clusters do, 4 workers, detect_s 3.

    python -m tests.bench.faults --repeats 9 [--only stop,hang,collective,term,controller,cut,...]

Seconds are from the fault itself, detection included. For notices (term, drain) and for the death
of the controller it is the longest gap between two commits, less the median step. The last four
need namespaces (root): one host per worker and one for the head. All runs must end with the
weights of the uninterrupted one and lose no step.
"""

import argparse
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench.harness import console, machine, percentile, record, report, storage_directory
from tests.cluster.hosts import Hosts, command_of
from tests.cluster.live import JOBS, LiveRun

WORKERS = 4
CALM_STEPS = 15
"""With all workers before the next fault; a phase has a usual time after 8."""
OPTIONS = {"workers": f"2..{WORKERS}", "detect_s": 3.0, "max_failures": 99}
SLEEP_S = 0.05
PATIENCE_S = 300.0
Hit = Callable[[LiveRun, int], float]
"""Do it to the worker with this rank; the Unix time of it."""


def victim(run: LiveRun, rank: int) -> dict:
    return next(w for w in run.status()["workers"] if w["rank"] == rank)


def by_signal(number: signal.Signals) -> Hit:
    def hit(run: LiveRun, rank: int) -> float:
        pid, at = victim(run, rank)["pid"], time.time()
        os.kill(pid, number)
        return at

    return hit


def kill_controller(run: LiveRun, _: int) -> float:
    pid, at = run.status()["controller"]["pid"], time.time()
    os.kill(pid, signal.SIGKILL)
    run.wait_for(lambda s: s["controller"]["pid"] != pid, PATIENCE_S)
    return at


def on_hosts(hosts: Hosts) -> dict[str, Hit]:
    """Faults of whole hosts; what was broken is whole again when the survivors have gone on."""

    def broken(run: LiveRun, rank: int, fault: Callable[[int], float], mend: Callable[[int], None]):
        generation = run.status()["generation"]
        host = hosts.host_of(victim(run, rank)["node_ip"])
        at = fault(host)
        run.wait_for(lambda s: s["generation"] > generation and s["phase"] == "running", PATIENCE_S)
        mend(host)
        return at

    def start_again(host: int) -> None:
        hosts.crash(host)
        hosts.start_raylet(host)

    def kill_raylet(host: int) -> float:
        pids = [pid for pid in hosts.pids(host) if "/raylet" in command_of(pid).split(" ")[0]]
        at = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return at

    def drain(run: LiveRun, rank: int) -> float:
        row = victim(run, rank)
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--node-id"]
        command += [row["node_id"], "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        command += ["--address", f"{hosts.address(0)}:6379", "--reason-message", "bench"]
        command += ["--deadline-remaining-seconds", "8"]
        at = time.time()
        subprocess.run(hosts.inside(0, *command), env=run.env, check=True, capture_output=True)
        gone = row["node_id"]
        run.wait_for(lambda s: gone not in [w["node_id"] for w in s["workers"]], PATIENCE_S)
        start_again(hosts.host_of(row["node_ip"]))
        return at

    return {
        "cut": lambda run, rank: broken(run, rank, hosts.cut, hosts.mend),
        "crash": lambda run, rank: broken(run, rank, hosts.crash, start_again),
        "raylet": lambda run, rank: broken(run, rank, kill_raylet, start_again),
        "drain": drain,
    }


def hit_often(run: LiveRun, hit: Hit, repeats: int, dice: random.Random) -> list[float]:
    """The times of the faults, each with all workers back before the next."""
    times: list[float] = []
    generation = 0
    for _ in range(repeats):
        run.wait_for(lambda s, g=generation: is_full(s) and s["generation"] > g, PATIENCE_S)
        calm = run.status()["step"] + CALM_STEPS
        run.wait_for(lambda s, c=calm: is_full(s) and s["step"] >= c, PATIENCE_S)
        if hit is not kill_controller:
            generation = run.status()["generation"]
        times.append(hit(run, dice.randrange(WORKERS)))
    run.wait_for(lambda s, g=generation: is_full(s) and s["generation"] > g, PATIENCE_S)
    return times


def is_full(status: dict) -> bool:
    return status["world_size"] == WORKERS and status["phase"] == "running"


def seconds_after(run: LiveRun, times: list[float]) -> list[float]:
    """From each fault to the first commit of a later generation."""
    lines = run.lines("metrics.jsonl")
    found: list[float] = []
    for at in times:
        before = max((m["generation"] for m in lines if m["time"] <= at), default=0)
        found.append(next(m for m in lines if m["generation"] > before)["time"] - at)
    return found


def gaps_after(run: LiveRun, times: list[float], window_s: float = 15.0) -> list[float]:
    """The longest gap between commits that begins within the window, less the median step."""
    stamps = [m["time"] for m in run.lines("metrics.jsonl")]
    pairs = list(itertools.pairwise(stamps))
    usual = statistics.median(b - a for a, b in pairs)
    return [
        max((b - a for a, b in pairs if at < b and a < at + window_s), default=0.0) - usual
        for at in times
    ]


def measure(name: str, hit: Hit, start, repeats: int, dice: random.Random) -> dict[str, str]:
    """One run, hit `repeats` times, then stopped."""
    with start(name, f"{JOBS / 'toy.py'}:Toy", steps=100_000, set=[f"sleep={SLEEP_S}"]) as run:
        times = hit_often(run, hit, repeats, dice)
        run.process.send_signal(signal.SIGINT)
        end = run.finish()
    return row_of(name, run, times, end["result"])


def measure_hangs(name: str, start, storage: Path, repeats: int) -> dict[str, str]:
    """What the workload itself does, in one run."""
    struck = storage / f"struck-{name}"
    struck.mkdir()
    faults = [(*HANGS[name], 40 * (i + 1)) for i in range(repeats)]
    settings = [f"sleep={SLEEP_S}", f"folder={str(struck)!r}", f"faults={faults!r}"]
    target = f"{JOBS / 'faulty.py'}:Faulty"
    with start(name, target, steps=40 * (repeats + 1), set=settings) as run:
        end = run.finish(PATIENCE_S + 30 * repeats)
    times = [path.stat().st_mtime for path in sorted(struck.iterdir(), key=lambda p: int(p.name))]
    return row_of(name, run, times, end["result"])


def row_of(name: str, run: LiveRun, times: list[float], result: dict) -> dict[str, str]:
    is_planned = name in ("term", "drain", "controller")
    seconds = (gaps_after if is_planned else seconds_after)(run, times)
    kept = [m["step"] for m in run.lines("metrics.jsonl")]
    row = {
        "fault": name,
        "median": f"{statistics.median(seconds):.3f} s",
        "p90": f"{percentile(seconds, 90):.3f} s",
        "worst": f"{max(seconds):.3f} s",
        "lost steps": str(result["lost_steps"]),
        "gapless": "yes" if kept == list(range(1, len(kept) + 1)) else "NO",
        "equal": "yes" if is_equal(run, result) else "NO",
    }
    console.print(row)
    return row


def is_equal(run: LiveRun, result: dict) -> bool:
    """To the uninterrupted run of one worker over the same steps."""
    options = {"steps": result["steps"], "workers": 1}
    temp = Path(run.env["RAY_TMPDIR"])
    name = f"{run.directory.name}-calm"
    with LiveRun(f"{JOBS / 'toy.py'}:Toy", run.directory.parent, name, temp, **options) as calm:
        found = calm.finish(PATIENCE_S)["result"]["weights_sha256"]
    return found == result["weights_sha256"]


LOCAL: dict[str, Hit] = {
    "stop": by_signal(signal.SIGSTOP),
    "term": by_signal(signal.SIGTERM),
    "controller": kill_controller,
}
HANGS = {"hang": ("hang", "forward"), "collective": ("alone", "boundary")}
"""A loss that never returns; a rank that makes a collective alone. What, and where in a step."""
HOSTS = ("cut", "crash", "raylet", "drain")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join((*LOCAL, *HANGS, *HOSTS)))
    arguments = parser.parse_args()
    chosen, dice = arguments.only.split(","), random.Random(arguments.seed)
    about = machine(WORKERS)
    console.print(about)
    rows: list[dict[str, str]] = []
    with storage_directory() as storage, storage_directory() as temp:

        def start(name: str, target: str, **options) -> LiveRun:
            return LiveRun(target, storage, name, temp, **OPTIONS, **options)

        for name in (n for n in LOCAL if n in chosen):
            rows.append(measure(name, LOCAL[name], start, arguments.repeats, dice))
        for name in (n for n in HANGS if n in chosen):
            rows.append(measure_hangs(name, start, storage, arguments.repeats))
        for name in (n for n in HOSTS if n in chosen):
            with Hosts(WORKERS + 1, head_cpus=0) as hosts:
                hosts.start_ray()

                def start_there(name: str, target: str, hosts=hosts, **options) -> LiveRun:
                    return hosts.run(target, storage, name, **OPTIONS, **options)

                hit = on_hosts(hosts)[name]
                rows.append(measure(name, hit, start_there, arguments.repeats, dice))
    report("Faults", list(rows[0]), [list(row.values()) for row in rows])
    results = {row["fault"]: f"{row['median']} (worst {row['worst']})" for row in rows}
    is_sound = all(row["equal"] == row["gapless"] == "yes" for row in rows)
    results["equal hashes, gapless"] = "all" if is_sound else "NO"
    results["lost steps"] = "+".join(row["lost steps"] for row in rows)
    setting = f"{arguments.repeats} each, {WORKERS} workers, detect_s 3"
    record("faults", about=about, setting=setting, results=results)
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
