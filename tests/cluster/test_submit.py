"""`elastic submit` to a job server, from a folder that no node sees, with requirements; the run is
followed, stopped and resumed from outside, and survives the loss of its cluster."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.cluster.job_cluster import JobCluster
from tests.cluster.live import JOBS, Ended, elastic, environment

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STEPS, SAVED_EVERY = 100, 5
JOB = """
import os

import tiny  # of the requirements
from toy import Toy


class Job(Toy):
    def __init__(self, **options):
        assert (tiny.ANSWER, os.environ["TINY"]) == (42, "a b")
        super().__init__(**options)
"""
EDITED = JOB.replace("import tiny  # of the requirements\n", "").replace("tiny.ANSWER", "42")
"""It needs none: to install them once shows all of it, and takes as long as the rest of a run."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with JobCluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


def wheel(folder: Path) -> Path:
    """A package of one module, which pip installs without asking anybody."""
    path, info = folder / "tiny-1.0-py3-none-any.whl", "tiny-1.0.dist-info"
    files = {
        "tiny.py": "ANSWER = 42\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in [*files.items(), (f"{info}/RECORD", record)]:
            archive.writestr(name, text)
    return path


class Laptop:
    """A folder with a job, and the command line."""

    def __init__(self, tmp_path: Path, ray_temp: Path, cluster: JobCluster) -> None:
        self._tmp_path, self._cluster = tmp_path, cluster
        self.folder, self.env = tmp_path / "laptop" / "job", environment(ray_temp)
        self.storage, self.until = tmp_path / "storage", tmp_path / "fast"
        self.place = self.storage / "run"

    def write_job(self, **sections: dict) -> Path:
        self.folder.mkdir(parents=True)
        shutil.copy(JOBS / "toy.py", self.folder)
        (self.folder / "job.py").write_text(JOB)
        requirements = f"--no-index\n{wheel(self._tmp_path)}  # ours\n"
        (self.folder / "requirements.txt").write_text(requirements)
        job = {
            "resources": {"workers": 2},
            "setup": {"pip": "requirements.txt", "env": {"TINY": "a b"}},
            "run": {
                "target": "job.py:Job",
                "arguments": {"sleep": 0.3, "until": str(self.until)},
                **{"steps": STEPS, "global_batch": 48, "micro_batch": 6, "reduction": "bitwise"},
            },
            "storage": {"place": str(self.storage), "name": "run", "checkpoint_every": SAVED_EVERY},
        }
        path = self.folder / "elastic.yaml"
        path.write_text(yaml.safe_dump(job | sections))
        return path

    def start(self, *words: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "elastic", *words, "--cluster", self._cluster.address],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
            env=self.env,
        )

    def say(self, *words: str) -> Ended:
        where = ("--cluster", self._cluster.address)
        return elastic(self.env, *words, *where, with_ray=False)

    def submit(self) -> tuple[subprocess.Popen, str]:
        """Submits the job, whose folder goes once it is sent; the process and the job's id."""
        process = self.start("submit", str(self.write_job()))
        line = process.stdout.readline()
        assert "is submitted to" in line, process.communicate()
        shutil.rmtree(self.folder)
        return process, line.split()[1]

    def step(self) -> int:
        """Of the run, where a laptop cannot look: to ask the cluster takes a job, and seconds."""
        path = self.place / "status.json"
        return json.loads(path.read_text())["step"] if path.exists() else 0

    def until_step(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while self.step() < step:
            assert time.monotonic() < deadline, self.step()
            time.sleep(0.05)  # polling, bounded by the deadline


@pytest.fixture
def laptop(tmp_path, ray_temp, cluster, fork_server):
    return Laptop(tmp_path, ray_temp, cluster)


def test_a_job_is_followed_left_stopped_lost_with_its_cluster_and_resumed_from_outside(
    laptop, cluster, reference
):
    """While it runs, Prometheus reads it where it reads Ray."""
    process, job = laptop.submit()
    laptop.until_step(3)
    asked = laptop.say("status", job, "--json")
    assert asked.returncode == 0, asked
    status = json.loads(asked.stdout.splitlines()[-1])
    assert (status["world_size"], status["steps"], status["step"] >= 3) == (2, STEPS, True)
    assert_is_metered(cluster)
    log = laptop.say("logs", job)
    assert (log.returncode, "step=" in log.stdout, "job_manager" in log.stdout) == (0, True, False)
    assert laptop.say("logs", job, "w0", "--tail", "5").returncode == 0

    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert [line for line in err.splitlines() if not line.startswith("elastic: ")] == []
    assert f"no longer following; the run goes on: `elastic watch {job}" in out
    laptop.until_step(laptop.step() + 3)

    stopped = laptop.say("stop", job)
    assert (stopped.returncode, stopped.stderr) == (0, "")
    found = re.search(r"stopped after (\d+)", stopped.stdout)
    assert found, stopped.stdout

    process, job = laptop.submit()
    laptop.until_step(int(found[1]) + 6)  # it has saved once more
    cluster.lose()
    cluster.start()
    process.kill()
    out, _ = process.communicate()
    assert "the run was started again" in out
    laptop.until.touch()
    laptop.write_job(setup={"env": {"TINY": "a b"}})
    (laptop.folder / "job.py").write_text(EDITED)
    process = laptop.start("submit", str(laptop.folder / "elastic.yaml"), "--json")
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out.count("\n")) == (0, 1), (out, err)
    assert json.loads(out)["weights_sha256"] == reference(steps=STEPS)[0]
    assert json.loads(out)["lost_steps"] < 2 * SAVED_EVERY, "it did not begin again"
    seen = laptop.say("watch", str(laptop.place))
    assert (seen.returncode, f"succeeded: {STEPS} of {STEPS} steps" in seen.stdout) == (0, True)


def test_requirements_that_do_not_install_are_one_line(laptop):
    path = laptop.write_job()
    (laptop.folder / "requirements.txt").write_text("--no-index\nno-such-package-of-ours==3\n")
    done = laptop.say("submit", str(path))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
    assert "the cluster cannot install what job " in done.stderr
    assert "ERROR: No matching distribution found for no-such-package-of-ours==3" in done.stderr
    assert not laptop.place.exists()


def test_what_the_run_refuses_is_its_line_and_exit_status(laptop):
    path = laptop.write_job(setup={})
    done = laptop.say("submit", str(path))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
    assert "No module named 'tiny'" in done.stderr


def assert_is_metered(cluster) -> None:
    """That Prometheus finds the run, which has two workers."""
    deadline, size = time.monotonic() + 120, re.compile(r"^ray_elastic_world_size{.*} 2\.0$", re.M)
    while (found := size.search(metrics := read(f"{cluster.metrics}/metrics"))) is None:
        assert time.monotonic() < deadline, [x for x in metrics.splitlines() if "elastic" in x]
        time.sleep(0.2)  # polling, bounded by the deadline
    assert 'run="run"' in found[0]
    assert 'run_id="' in found[0]
    assert "\nray_elastic_step{" in metrics


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()
