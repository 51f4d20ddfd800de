"""`elastic stop`: end a run from outside, as Ctrl-C at its driver does; the only way for one that
was detached. What the end of a run is, is elastic/control/shutdown.py's.
"""

import time
from typing import Annotated, Any, cast

import typer

from elastic.cli.absence import ONLY_BEGUN, Absence, said_of
from elastic.cli.journal import config_of
from elastic.cli.outside import Cluster, on_cluster
from elastic.cli.progress import LOOK_EVERY_S, LOOK_REMOTE_EVERY_S
from elastic.cli.text import printable
from elastic.driver.resume import read_past_run
from elastic.protocol.errors import ControllerLost, WrongInput
from elastic.store.claim import is_gone, this_machine
from elastic.store.files import Folder, check_kinds, open_folder, read_json
from elastic.store.journal import read_backwards

EMBEDDED = "embedded"
"""What config.json says of the Ray of a run that has its own."""


def stop(
    run_dir: Annotated[
        str, typer.Argument(metavar="RUN_DIR", help="<storage>/<name>, a folder or a URI.")
    ],
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait for the step; no final checkpoint.")
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="The run's Ray cluster, if it is not the one that is found.")
    ] = None,
    cluster: Cluster = None,
) -> int:
    """End a run: finish its step, write a final checkpoint; the same `elastic run` resumes it."""
    if cluster is not None:
        return on_cluster(cluster, "stop", run_dir, *(["--now"] if now else []))
    folder = open_folder(run_dir)
    config = config_of(folder, run_dir)
    if (result := read_end(folder)) is not None:
        print(f"the run has ended already: {result['outcome']} after {result['steps']} steps")
        return 0
    driver = driver_of(config)
    if address is None and driver.get("ray") == EMBEDDED:
        raise WrongInput(f"{run_dir} runs on a Ray of its own, {who_stops_it(driver)}")
    address = address or config.get("address") or driver.get("ray")
    from elastic.on_ray.driver.remote_run import ask_to_end  # ray loads here

    absence = Absence(print)
    if (past := read_past_run(folder)) is not None:
        absence.look(past)
    ask_to_end(run_id_of(folder, run_dir), address, is_now=now)
    print("stop asked for" + ("" if now else "; the run finishes its step and saves its state"))
    result = await_result(folder, run_dir, absence)
    print(f"{result['outcome']} after {result['steps']} of {config.get('steps', '?')} steps")
    return 0


def driver_of(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of who has started the run last; empty in a run of before."""
    found = config.get("driver")
    driver = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    if not driver and config.get("address") == "local":
        return {"ray": EMBEDDED}  # of before
    return driver


def who_stops_it(driver: dict[str, Any]) -> str:
    """Of a run whose Ray is embedded in its driver."""
    pid, machine = driver.get("pid"), driver.get("machine")
    if not isinstance(pid, int):
        return "which nobody else reaches: press Ctrl-C at its `elastic run`, or send it SIGTERM"
    if is_gone(pid, machine):
        return f"which has ended with its driver (pid {pid}): the same `elastic run` resumes it"
    where = "" if machine == this_machine() else f" on {printable(str(driver.get('host')))}"
    return f"which nobody else reaches: `kill {pid}`{where} stops it as Ctrl-C at its driver does"


def read_end(folder: Folder) -> dict[str, Any] | None:
    found = read_json(folder, "result.json")
    if found is not None:
        check_kinds(found, {"outcome": str, "steps": int}, f"{folder}/result.json")
    return found


def run_id_of(folder: Folder, run_dir: str) -> str:
    """Of its newest start. WrongInput if it has not begun."""
    lines = read_backwards(folder, "journal.jsonl")
    run_id = next((line["run"] for line in lines if "run" in line), None)
    if run_id is None:
        raise WrongInput(f"{run_dir}: {ONLY_BEGUN}")
    return str(run_id)


def await_result(folder: Folder, run_dir: str, absence: Absence) -> dict[str, Any]:
    """Ctrl-C ends only the waiting. ControllerLost if nobody is left who could write it."""
    every_s = LOOK_EVERY_S if folder.local else LOOK_REMOTE_EVERY_S
    while (result := read_end(folder)) is None:
        past = read_past_run(folder)
        if past is not None and past.result is None and past.is_over:
            raise ControllerLost(f"{run_dir}: {said_of(past)}")
        if past is not None:
            absence.look(past)
        time.sleep(every_s)
    return result
