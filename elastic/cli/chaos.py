"""`elastic chaos SCENARIO RUN_DIR`, `chaos report`, `chaos list`: faults for a live run.

What happens is elastic/chaos; a typer group here, so that the scenario may come first.
"""

import json
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from elastic.chaos.inject import Injector
from elastic.chaos.page import page
from elastic.chaos.plan import Strike, make_plan
from elastic.chaos.report import read_story, report
from elastic.chaos.scenario import Scenario, read_scenario, shipped_names
from elastic.chaos.storage_faults import refuse_large_disk
from elastic.cli.journal import config_of, followed
from elastic.cli.text import printable
from elastic.config import as_bounds
from elastic.protocol.errors import WrongInput
from elastic.store.files import Folder, open_folder


class ScenarioFirst(TyperGroup):
    """`chaos SCENARIO ...` means `chaos run SCENARIO ...`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = args and args[0] in self.list_commands(ctx)
        return super().resolve_command(ctx, args if known else ["run", *args])


app = typer.Typer(
    cls=ScenarioFirst,
    no_args_is_help=True,
    help="Put faults into a live run and report what they cost: chaos SCENARIO RUN_DIR.",
)

RunDir = Annotated[str, typer.Argument(metavar="RUN_DIR", help="The run directory, path or URI.")]
Report = Annotated[
    str | None,
    typer.Option("--report", metavar="PATH", help="Base name of the .json and .html to write."),
]
DEFAULT_REPORT = "chaos-report"
LOOK_EVERY_S = 0.05
DRIVER_GONE_S = 10.0
"""Who has started both says first why the run did not begin, and ends us."""


@app.command()
def run(
    scenario: Annotated[str, typer.Argument(metavar="SCENARIO", help="A name, or a YAML file.")],
    run_dir: RunDir,
    report_path: Report = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, do nothing.")] = False,
    seed: Annotated[int | None, typer.Option(help="Instead of the scenario's.")] = None,
    address: Annotated[
        str | None, typer.Option(help="The run's Ray cluster, for drains and other nodes.")
    ] = None,
    driver_pid: Annotated[
        int | None, typer.Option(help="Of `elastic run`, for its faults.")
    ] = None,
    wait_s: Annotated[
        float | None, typer.Option("--wait", metavar="SECONDS", help="For a run yet to begin.")
    ] = None,
) -> int:
    """Carry a scenario out on a live run; when the run has ended, write the report."""
    chosen = read_scenario(scenario)
    if seed is not None:
        chosen = Scenario(chosen.name, chosen.about, seed, chosen.faults)
    folder = open_folder(run_dir)
    if wait_s is not None:
        if address is not None:  # before the run begins, because it takes seconds
            from elastic.on_ray.driver import remote_faults

            remote_faults.join(address)
        wait_for_run(folder, run_dir, wait_s, driver_pid)
    plan = make_plan(chosen, num_workers_of(folder, run_dir))
    if dry_run:
        for strike in plan:
            print(strike)
        return 0
    if wait_s is None and folder.exists("result.json"):  # a run that was waited for may be short
        raise WrongInput(f"{run_dir}: the run has ended; `elastic chaos report` reports on it")
    refuse_impossible(plan, driver_pid, folder, address)
    for number in (signal.SIGTERM, signal.SIGHUP):  # whatever lasts is undone
        signal.signal(number, signal.default_int_handler)
    Injector(folder, chosen, plan, address=address, driver_pid=driver_pid).run()
    return write_report(folder, report_path)


@app.command("report")
def report_only(run_dir: RunDir, report_path: Report = None) -> int:
    """Write the report of a run, with or without faults, that has ended or still runs."""
    folder = open_folder(run_dir)
    num_workers_of(folder, run_dir)
    return write_report(folder, report_path)


@app.command("list")
def list_scenarios() -> int:
    """The scenarios that come with elastic."""
    for name in shipped_names():
        print(f"{name:20} {read_scenario(name).about}")
    return 0


def num_workers_of(folder: Folder, run_dir: str) -> int:
    """The most workers the run may have. WrongInput if this is no run directory."""
    try:
        bounds = as_bounds(config_of(folder, run_dir).get("workers"))
    except ValueError as error:
        raise WrongInput(f"{run_dir}/config.json is damaged: {error}") from error
    return bounds if isinstance(bounds, int) else bounds[1]


def wait_for_run(
    folder: Folder, run_dir: str, wait_s: float, driver_pid: int | None = None
) -> None:
    """Until it has a directory. WrongInput if it has none after so many seconds, or DRIVER_GONE_S
    after the end of its driver."""
    deadline = time.monotonic() + wait_s
    there_at = time.monotonic()
    while not folder.exists("config.json"):
        now = time.monotonic()
        if driver_pid is None or Path(f"/proc/{driver_pid}").exists():
            there_at = now
        if now > deadline:
            raise WrongInput(f"{run_dir}: no run began within {wait_s:g} s")
        if now > there_at + DRIVER_GONE_S:
            raise WrongInput(f"{run_dir}: no run began, and its driver has ended")
        time.sleep(LOOK_EVERY_S)


def refuse_impossible(
    plan: tuple[Strike, ...], driver_pid: int | None, folder: Folder, address: str | None
) -> None:
    """WrongInput before anything is done, rather than a note on each fault behind it."""
    if driver_pid is None and any(strike.spec.whom.kind == "driver" for strike in plan):
        raise WrongInput("the scenario hits the driver: give its --driver-pid")
    whats = {strike.spec.what for strike in plan}
    for spec in {strike.spec for strike in plan if strike.spec.what == "fill"}:
        refuse_large_disk(folder, spec.at_most_gb)
    if whats & {"cut", "lossy", "capacity"}:
        from elastic.on_ray.driver import remote_faults

        remote_faults.join(address)


def write_report(folder: Folder, report_path: str | None) -> int:
    """PATH.json and PATH.html, by default in the run directory; prints the faults in short."""
    with followed(str(folder)):
        story = read_story(folder)
        found = report(story)
        drawn = page(story, found)
    base = report_path or str((folder.local or Path()) / DEFAULT_REPORT)
    base = base.removesuffix(".json").removesuffix(".html")
    try:
        Path(f"{base}.json").write_text(json.dumps(found, indent=1) + "\n")
        Path(f"{base}.html").write_text(drawn)
    except OSError as error:
        raise WrongInput(f"the report cannot be written to {base}.json: {error}") from error
    for fault in found["faults"]:
        print(fault_line(fault))
    time, capacity = (100 * found["goodput"][part] for part in ("time", "capacity"))
    print(
        f"{found['outcome']}: {found['steps']} steps, {found['lost_steps']} lost, goodput "
        f"{time:.1f} % of the time, {capacity:.1f} % of the capacity, at most "
        f"{found['longest_gap_s']:.2f} s without a new step that lasted"
    )
    print(f"report: {base}.html, {base}.json")
    return 0


def fault_line(fault: dict[str, Any]) -> str:
    whom = fault["worker"] or fault["whom"]
    result = fault["note"] or fault["result"]
    line = f"{fault['strike']} {fault['what']} {whom} at step {fault['step']}: {result}"
    return f"  {printable(line)}{times_of(fault)}"


def times_of(fault: dict[str, Any]) -> str:
    """Of its recovery, if it had one: in the words of every other place."""
    if "total_s" not in fault:
        return ""
    words = {"detect": "detect", "fence": "fence", "form": "form", "restore": "state"}
    words["first_step"] = "first step"
    times = [f"{word} {fault[f'{phase}_s']:.3f} s" for phase, word in words.items()]
    waited_s = fault.get("waiting_s", 0.0)
    waited = f"; {waited_s:.3f} s of form were waiting for workers" if waited_s > 0 else ""
    return f", {fault['total_s']:.3f} s = {' + '.join(times)}{waited}"
