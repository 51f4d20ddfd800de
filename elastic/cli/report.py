"""`elastic report`: one HTML page of a run, and the command that does the same run again."""

import shlex
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from elastic.cli.job_file import OPTIONS, SECTIONS
from elastic.cli.journal import RunDir, open_run
from elastic.cli.share_table import size_text
from elastic.driver.resume import SCRIPT, is_script
from elastic.observe.charts import draw
from elastic.observe.report_page import MARK, page
from elastic.observe.run_record import read_record
from elastic.protocol.errors import WrongInput
from elastic.store.files import first_line, write_local
from elastic.store.remote import shown_uri

DEFAULT = Path("report.html")
LOOK_BYTES = 400
"""Of a file that is there: a page of ours says so in its first bytes."""
OF_THE_PLACE = ("place", "name", "address")
"""Keys that another run has other values of."""


def report(
    run_dir: RunDir,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The page to write; an older report is replaced.")
    ] = DEFAULT,
    force: Annotated[
        bool, typer.Option("--force", help="Replace FILE even if it is no report.")
    ] = False,
) -> int:
    """Write one HTML page about a run: workers, curves, recoveries, time, samples, configuration.

    It needs nothing from outside. The run may go on, and may be in a bucket.
    """
    folder = open_run(run_dir)
    check_free(out, is_forced=force)
    record = read_record(folder)
    drawn = page(record, draw(record), shown_uri(run_dir), command_of(record.config))
    content = drawn.encode()
    try:
        write_local(out, content, is_durable=False)
    except OSError as error:
        raise WrongInput(f"the report cannot be written to {out}: {first_line(error)}") from error
    print(f"report: {out}, {size_text(len(content))}")
    return 0


def check_free(out: Path, *, is_forced: bool) -> None:
    """WrongInput if something else than a report is there."""
    try:
        if out.is_dir():
            raise WrongInput(f"{out} is a folder: give --out a file in it")
        if is_forced or not out.exists():
            return
        with out.open("rb") as file:
            start = file.read(LOOK_BYTES)
    except (OSError, ValueError) as error:
        raise WrongInput(f"the report cannot be written to {out}: {first_line(error)}") from error
    if MARK.encode() not in start:
        raise WrongInput(f"{out} is there and is no report of ours: give another --out, or --force")


def command_of(config: dict[str, Any]) -> str:
    """`elastic run` with all that config.json tells but where it was."""
    target = str(config.get("target", "TARGET"))
    if is_script(config):
        return f"# the command that has started {target.removeprefix(SCRIPT)}, with its arguments"
    if target.startswith("__main__"):
        return f"python {shlex.quote(str(config.get('target_file', 'SCRIPT.py')))}"
    module, file = target.partition(":")[0], str(config.get("target_file") or "")
    if file.endswith(".py") and Path(file).stem == module:  # of no package: it is found by its file
        target = f"{file}:{target.partition(':')[2]}"
    words = ["elastic", "run", shlex.quote(target)]
    for keys in SECTIONS.values():
        for key in keys:
            if key != "target" and key not in OF_THE_PLACE:
                words += option_of(key, config.get(key))
    return " ".join(words)


def option_of(key: str, value: Any) -> list[str]:
    name = OPTIONS.get(key, f"--{key.replace('_', '-')}")
    if key == "detect_s" and value is None:
        return [name, "none"]
    if value is None or value is False:
        return []
    if value is True:
        return [name]
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        texts = (f"{k}={v!r}" for k, v in pairs if v is not None)
        return [word for text in texts for word in (name, shlex.quote(text))]
    if key == "keep":
        value = ",".join(str(part) for part in value if part is not None)
    if isinstance(value, list):
        value = "..".join(str(bound) for bound in cast("list[Any]", value))
    return [name, shlex.quote(str(value))]
