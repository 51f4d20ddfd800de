"""`elastic submit`: `elastic run` on a cluster that this machine only reaches by its job server.

It packs TARGET's folder and what the job needs; the run itself is `elastic run`'s, on the head.
"""

import inspect
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic.cli import run_options
from elastic.cli.outside import OURS, conclude, open_server, tell
from elastic.cli.text import printable
from elastic.driver.redaction import redacted, shown_text
from elastic.driver.resume import plain
from elastic.driver.target import import_place, parse_arguments, refuse_shadows
from elastic.protocol.errors import WrongInput
from elastic.store.files import encode, place_of
from elastic.store.remote import shown_uri

DETACH_AFTER_S = 8.0
"""A detached submit waits so long for what cannot be installed: nobody is told later."""
VARIABLE = re.compile(r"[A-Za-z_]\w*$")
TARGET = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="package.module:Class or path/to/file.py:Class, a Workload, whose folder is sent. "
        "Or a job file, elastic.yaml, that tells it and options.",
    ),
]
HELP = """Run TARGET on a cluster from outside of it. Ctrl-C only stops following.

Its folder and requirements are sent to the cluster's job server, and the lines of the run come
back; `elastic stop` ends it. Needs --storage that the nodes see. Exit status: as `elastic run`."""


def own_options(
    *,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|ADDRESS",
            help="The cluster: http://HOST:8265, or the file that `ray up` took. "
            "Default: RAY_API_SERVER_ADDRESS.",
        ),
    ] = None,
    pip: Annotated[
        str | None, typer.Option(metavar="FILE", help="Requirements that nodes install with pip.")
    ] = None,
    uv: Annotated[
        str | None, typer.Option(metavar="FILE", help="Requirements that nodes install with uv.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Environment variable of driver and workers."),
    ] = None,
) -> None:
    """What `submit` takes besides all that `run` does."""


def command_like(run: Callable[..., Any]) -> Callable[..., int]:
    """The command: with the options of `run`, which names them once, and its own."""

    def submit(**options: Any) -> int:
        own = {name: options.pop(name) for name in inspect.signature(own_options).parameters}
        return carry_out(run, options, **own)

    ours = inspect.signature(own_options).parameters
    theirs = [p for name, p in inspect.signature(run).parameters.items() if name != "address"]
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*theirs, *ours.values())]
    keyword = [p.replace(annotation=TARGET) if p.name == "target" else p for p in keyword]
    submit.__signature__ = inspect.Signature(keyword, return_annotation=int)  # pyright: ignore
    submit.__annotations__ = {p.name: p.annotation for p in keyword} | {"return": int}
    submit.__doc__ = HELP
    return submit


def carry_out(
    run: Callable[..., Any],
    options: dict[str, Any],
    *,
    cluster: str | None,
    pip: str | None,
    uv: str | None,
    env: list[str] | None,
) -> int:
    """Check, send, follow. options: those of `run`."""
    run_options.configure({**options, "address": None})
    refuse_secrets(options)
    folder, target = packed(options["target"])
    storage = storage_for(options["storage"])
    name = options["name"] or f"{target.rpartition(':')[2].lower()}-{now_text()}"
    if pip is not None and uv is not None:
        raise WrongInput("--pip and --uv are both given: requirements are installed by one of them")
    variables = variables_in(env or [])
    from elastic.on_ray.driver.job_server import Environment, runtime_env_of  # ray loads here

    place = place_of(storage, name)
    runtime_env = runtime_env_of(Environment(folder, place, pip, uv, variables))
    refuse_keys((*runtime_env.get("pip", ()), *runtime_env.get("uv", ())))
    server = open_server(cluster)
    options = {**options, "storage": storage, "name": name}
    detach, as_json = options.pop("detach"), options["as_json"]
    words = ["run", target, *run_options.words_of(run, options)]
    job_id = server.submit(words, runtime_env, name=name, run_directory=place)
    to_follow = f"{job_id} --cluster {cluster or server.address}"
    if not as_json:
        tell_submitted(server.address, job_id, place, to_follow)
    if detach:
        job = server.await_start(job_id, DETACH_AFTER_S)
        status = conclude(job) if job.is_over else 0
        if as_json:
            found = {"outcome": "detached", "run_directory": place, "job": job_id}
            print(encode(found).decode())
        return status
    try:
        job = server.follow(job_id, tell_json if as_json else tell)
    except KeyboardInterrupt:
        print(f"no longer following; the run goes on: `elastic watch {to_follow}`", flush=True)
        return 0
    return conclude(job)


def tell_submitted(address: str, job_id: str, place: str, to_follow: str) -> None:
    print(f"job {job_id} is submitted to {address}")
    print(f"  run directory   {shown_uri(place)}")
    print(f"  from anywhere   elastic watch|status|logs {to_follow}")
    print(f"  to end it       elastic stop {to_follow}; Ctrl-C only stops following", flush=True)


def tell_json(line: str) -> None:
    """result.json goes to stdout and errors to stderr, nothing else anywhere."""
    if line.startswith(OURS):
        tell(line)
    elif line.startswith('{"') and '"outcome"' in line:
        print(line, flush=True)


def packed(text: str) -> tuple[Path | None, str]:
    """The folder to send, None where TARGET is installed on the cluster; and TARGET there."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise WrongInput(
            f"TARGET {text!r} names no class: write package.module:Class or path/to/file.py:Class"
        )
    if place.endswith(".py") or "/" in place:
        file = Path(place).expanduser().resolve()
        if not file.is_file():
            raise WrongInput(f"TARGET {text!r}: there is no file {file}")
        folder, module = import_place(file)
    else:
        top = Path.cwd() / place.partition(".")[0]
        is_here = top.is_dir() or top.with_suffix(".py").is_file()
        folder, module = (Path.cwd(), place) if is_here else (None, place)
    if folder is not None:
        refuse_shadows(folder)
    return folder, f"{module}:{name}"


def storage_for(storage: str | None) -> str:
    """What the nodes see. This machine need not."""
    if storage is None:
        raise WrongInput(
            "submit needs --storage, a bucket's URI or a folder that every node of the cluster "
            "sees: a temporary folder there would be found by nobody"
        )
    if "://" not in storage and not storage.startswith("/"):
        raise WrongInput(
            f"--storage {storage!r} is relative to this machine's folders, and the run is "
            "elsewhere: give an absolute path that every node sees, or a bucket's URI"
        )
    return storage


def refuse_secrets(options: dict[str, Any]) -> None:
    """The words of a job's command are on record at its server, and in every list of jobs."""
    with_keys = [n for n, v in options.items() if isinstance(v, str) and shown_text(v) != v]
    if with_keys:
        raise WrongInput(
            f"--{with_keys[0].replace('_', '-')} {shown_text(options[with_keys[0]])} has keys in "
            "it, which would be in the job's command for everyone to read: give the nodes a role; "
            "--env KEY=VALUE is for a job server that nobody else reaches"
        )
    arguments = parse_arguments(options["settings"] or ())
    if hidden := sorted(redacted({"arguments": plain(arguments)}).get("secrets", {})):
        raise WrongInput(
            f"--set {hidden[0]}=... is a secret, which would be in the job's command for everyone "
            "to read: give the nodes a role; --env KEY=VALUE, which the workload reads, is for a "
            "job server that nobody else reaches"
        )


def refuse_keys(requirements: Iterable[str]) -> None:
    """The server shows a job's requirements to everyone, too."""
    for line in requirements:
        if (shown := shown_text(line)) != line:
            raise WrongInput(
                f"the requirement {shown!r} has keys in it, which would be in the job's "
                "environment for everyone to read: configure the index on the nodes (pip.conf)"
            )


def variables_in(settings: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not VARIABLE.match(key):
            raise WrongInput(f"--env {printable(setting)!r} is no KEY=VALUE")
        found[key] = value
    return found


def now_text() -> str:
    """UTC, as in the name that a run without one has."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime())
