"""`elastic submit` and `--cluster` before anything is sent: what is refused, and what is sent."""

import secrets
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import yaml
from typer.main import get_command

from elastic.cli.app import app, main
from elastic.cli.job_file import expanded
from elastic.cli.run import run
from elastic.cli.run_options import words_of
from elastic.cli.submit import packed
from elastic.on_ray.driver.job_server import (
    Environment,
    Lines,
    requirements_in,
    runtime_env_of,
    url_of,
    why_unprepared,
)
from elastic.protocol.errors import WrongInput

NEEDED = ["--steps", "4", "--global-batch", "8", "--micro-batch", "2"]
STORED = ["--storage", "/shared/runs", "--name", "first"]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The path of a TARGET's file, in the current folder; no address of Ray's around."""
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.py"
    path.write_text("class Job: ...\n")
    return path


def refused(capsys, *words: str) -> str:
    """The one line of an exit with status 2."""
    assert main([*words]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    return line


# --- options ------------------------------------------------------------------------------
def test_it_has_all_options_of_run_but_the_address():
    commands = get_command(app).commands  # pyright: ignore
    theirs = {o for p in commands["run"].params for o in p.opts}
    ours = {o for p in commands["submit"].params for o in p.opts}
    assert theirs - ours == {"--address"}
    assert ours - theirs == {"--cluster", "--pip", "--uv", "--env"}


def test_options_become_the_words_that_give_them_again():
    words = ["--workers", "2..4", *NEEDED, "--offload", "--detect-s", "none", "--set", "a=1"]
    words += ["--set", "b='x y'", "--faults", "verify_every=3", "--clip-norm", "0.5", "--json"]
    command = get_command(app).commands["run"]  # pyright: ignore
    given = command.make_context("run", ["a:B", *words]).params
    again = words_of(run, given)
    assert command.make_context("run", ["a:B", *again]).params == given
    assert "--seed" not in again
    assert "a:B" not in again


def test_a_job_file_serves_both_commands(tmp_path):
    path = tmp_path / "elastic.yaml"
    (tmp_path / "cluster.yaml").touch()
    setup = {"pip": "needs.txt", "env": {"A": "x y", "B": 3}}
    resources = {"address": "here:6379", "cluster": "cluster.yaml"}
    job = {"setup": setup, "resources": resources, "storage": {"place": "runs"}}
    path.write_text(yaml.safe_dump({"run": {"target": "job.py:Job"}, **job}))
    there = [f"{tmp_path}/job.py:Job", "--cluster", f"{tmp_path}/cluster.yaml"]
    there += ["--pip", f"{tmp_path}/needs.txt", "--env", "A=x y", "--env", "B=3"]
    assert sorted(expanded(["submit", str(path)])[1:]) == sorted([*there, "--storage", "runs"])
    here = [f"{tmp_path}/job.py:Job", "--address", "here:6379", "--storage", f"{tmp_path}/runs"]
    assert sorted(expanded(["run", str(path)])[1:]) == sorted(here)


# --- what is sent -----------------------------------------------------------------------
def test_a_target_is_known_by_its_import_name_there(job, tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").touch()
    assert packed("job.py:Job") == (tmp_path, "job:Job")
    assert packed(f"{package}/inner.py:Job") == (tmp_path, "package.inner:Job")
    assert packed("package.inner:Job") == (tmp_path, "package.inner:Job")
    assert packed("workers.workloads.charlm:CharLM") == (None, "workers.workloads.charlm:CharLM")


def test_what_a_job_brings_along(job, tmp_path):
    (tmp_path / "needs.txt").write_text("# all of it\n\none==1  # why\n--no-index\n")
    runs = tmp_path / "runs" / "first"
    runs.mkdir(parents=True)
    (runs / "config.json").touch()
    (runs / "journal.jsonl").touch()
    environment = Environment(tmp_path, str(runs), pip="needs.txt", variables={"A": "1"})
    assert runtime_env_of(environment) == {
        "working_dir": str(tmp_path),
        "excludes": ["/runs"],
        "pip": ["one==1", "--no-index"],
        "env_vars": {"A": "1"},
    }
    assert runtime_env_of(Environment(None, str(runs), uv="needs.txt")) == {
        "uv": ["one==1", "--no-index"]
    }


@pytest.mark.parametrize(
    ("text", "said"), [(None, "No such file"), ("# none\n", "names no package: leave it out")]
)
def test_requirements_that_say_nothing_are_refused(tmp_path, text, said):
    path = tmp_path / "needs.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(WrongInput, match=said):
        requirements_in(str(path), "pip")


# --- what is refused ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "submit needs --storage, a bucket's URI or a folder that every node"),
        (["--storage", "runs"], "--storage 'runs' is relative to this machine's folders"),
        ([*STORED, "--pip", "a", "--uv", "b"], "--pip and --uv are both given"),
        ([*STORED, "--env", "A"], "--env 'A' is no KEY=VALUE"),
        ([*STORED, "--pip", "none.txt"], "--pip none.txt cannot be read: "),
        (STORED, "give the cluster: --cluster http://HOST:8265"),
        ([*STORED, "--cluster", "ray://h:1"], "http://HOST:8265; ray:// is none"),
        (["--storage", "s3://a:hush@b/runs"], "--storage s3://***@b/runs has keys in it, which"),
        (["--storage", "s3://b/r?secret_key=hush"], "r?secret_key=*** has keys in it, which"),
        ([*STORED, "--set", "api_key=hush"], "--set api_key=... is a secret, which would be in"),
        ([*STORED, "--set", "a={'token': 'hush'}"], "--set a.token=... is a secret, which"),
        ([*STORED, "--set", "data='s3://a:hush@b/x'"], "--set data=... is a secret, which would"),
        ([*STORED, "--workers", "many"], "--workers 'many': give a number or MIN..MAX"),
        ([*STORED, "--global-batch", "7"], "global_batch=7 is not a multiple of micro_batch=2"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(job, capsys, words, said):
    line = refused(capsys, "submit", "job.py:Job", *NEEDED, *words)
    assert said in line
    assert "hush" not in line


def test_a_target_that_is_not_there_is_refused_here(job, capsys):
    words = [*NEEDED, *STORED]
    assert f"there is no file {job.parent}/other.py" in refused(
        capsys, "submit", "other.py:Job", *words
    )
    assert "names no class" in refused(capsys, "submit", "job.py", *words)
    (job.parent / "workers").mkdir()
    (job.parent / "workers" / "__init__.py").touch()
    assert "shadows our package 'workers'" in refused(capsys, "submit", "job.py:Job", *words)


def test_keys_in_requirements_are_refused(job, capsys):
    (job.parent / "needs.txt").write_text("one==1\n--extra-index-url https://me:hush@host/simple\n")
    words = ["submit", "job.py:Job", *NEEDED, *STORED, "--pip", "needs.txt", "--cluster", "h:1"]
    line = refused(capsys, *words)
    assert "'--extra-index-url https://***@host/simple' has keys in it" in line


@pytest.mark.parametrize("command", ["status", "watch", "stop", "logs"])
def test_a_cluster_that_is_not_reached_is_one_line(job, capsys, command):
    said = refused(capsys, command, "/shared/runs/first", "--cluster", "127.0.0.1:9")
    assert "no Ray job server answers at http://127.0.0.1:9: " in said
    assert "refused" in said
    assert "check that its head runs with the dashboard" in said


class Stranger(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_) -> None:
        pass


def test_another_server_is_no_cluster(job, capsys):
    server = HTTPServer(("127.0.0.1", 0), Stranger)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        said = refused(capsys, "status", "run", "--cluster", f"127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
    assert "what listens there is no Ray" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"kind": "RayCluster", "metadata": {"name": "mine"}}, "service/mine-head-svc 8265`"),
        ({"a": 1}, "is no cluster file of Ray: it has no provider"),
        ("[", "cannot be read: line 1: "),
        ({"cluster_name": "c", "provider": {"type": "none"}}, "the head of that cluster is not fo"),
    ],
)
def test_a_file_that_names_no_cluster_is_one_line(job, capsys, content, said):
    path = job.parent / "cluster.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    words = ["submit", "job.py:Job", *NEEDED, *STORED, "--cluster", str(path)]
    assert said in refused(capsys, *words)


def test_the_head_of_a_file_is_where_its_job_server_is(job, capsys):
    from ray.autoscaler._private.providers import (
        _get_node_provider,  # pyright: ignore[reportPrivateUsage]
    )

    name = f"test-{secrets.token_hex(4)}"
    provider = {"type": "local", "head_ip": "127.0.0.1", "worker_ips": []}
    path = job.parent / "cluster.yaml"
    path.write_text(yaml.safe_dump({"cluster_name": name, "provider": provider}))
    tags = {"ray-node-type": "head", "ray-node-status": "up-to-date"}
    _get_node_provider(provider, name).create_node({}, tags, 1)  # as `ray up` does
    capsys.readouterr()  # of Ray, where nobody has loaded it before
    said = refused(capsys, "status", "run", "--cluster", str(path))
    assert "no Ray job server answers at http://127.0.0.1:8265: " in said


# --- what the server says -----------------------------------------------------------------
def test_addresses():
    assert url_of("head") == "http://head:8265"
    assert url_of("head:80/") == "http://head:80"
    assert url_of("https://gateway/ray/") == "https://gateway/ray"


def test_each_line_is_told_once_though_all_come_again():
    told: list[str] = []
    lines = Lines(told.append)
    lines.begin()
    lines.take("2026-01-01 00:00:00,000\tINFO job_manager.py:583 -- Runtime env\none\ntw")
    lines.begin()
    lines.take("2026-01-01 00:00:00,000\tINFO job_manager.py:583 -- Runtime env\none\ntwo\nthr")
    lines.end()
    assert told == ["one", "two", "thr"]


def test_the_last_words_of_an_installer():
    message = "setup failed: x\nLast 50 lines of stdout:\n    Collecting a\n    ERROR: No a found\n"
    assert why_unprepared(f"{message}    [notice] update\n") == "ERROR: No a found"
    assert why_unprepared("a\n  \u00d7 No solution\n") == "\u00d7 No solution"
    assert why_unprepared("first\nlast\n") == "last"
    assert why_unprepared("") == "no reason was given"
