"""`elastic run SCRIPT.py [its arguments]`: a script that calls Ray Train's `TorchTrainer.fit()`.

The script runs in this process as `python SCRIPT.py` would run it; its `fit()` is ours
(elastic/ray_train.py). An option of ours may stand before SCRIPT.py: `--script-level 0`.
"""

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from elastic.driver.script_level import OPTION, ask
from elastic.driver.starting import slow_step
from elastic.protocol.errors import WrongInput

FAILED = 1


def script_in(words: Sequence[str]) -> tuple[str, list[str], str | None] | None:
    """The script of a command line, its arguments, and the level that is asked for; None if it
    names no script. WrongInput for a level without a script."""
    if words[:1] != ["run"]:
        return None
    level, rest = level_in(words[1:])
    if rest and rest[0].endswith(".py"):
        return rest[0], [*rest[1:]], level
    if level is None:
        return None
    raise WrongInput(f"{OPTION} needs a level and a script: `elastic run {OPTION} 0 train.py`")


def level_in(words: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """The level that they begin with, and the others."""
    name, is_with_value, value = words[0].partition("=") if words else ("", "", "")
    if name != OPTION:
        return None, words
    return (value, words[1:]) if is_with_value else ("".join(words[1:2]), words[2:])


def run_script(script: str, arguments: list[str], level: str | None = None) -> int:
    """The exit status. WrongInput for a script that is not there, that asks for what is not
    supported, or that calls no fit()."""
    if level is not None:
        ask(level)
    file = Path(script).expanduser().resolve()
    if not file.is_file():
        raise WrongInput(f"there is no script {file}")
    with slow_step("importing Ray Train"):
        from elastic import ray_train

    sys.argv = [script, *arguments]
    sys.path.insert(0, str(file.parent))
    try:
        runpy.run_path(str(file), run_name="__main__")
    except SystemExit as end:
        return status_of(end)
    except (WrongInput, KeyboardInterrupt):
        raise
    except Exception as error:
        traceback.print_exception(without_ours(error))
        return FAILED
    if not ray_train.num_fits:
        raise WrongInput(
            f"{script} called no TorchTrainer.fit(); for a script that torchrun starts use "
            f"`elastic torchrun`; a Workload is named as {script}:Class"
        )
    return 0


def status_of(end: SystemExit) -> int:
    """As Python makes it of `sys.exit(...)`."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return FAILED


def without_ours(error: Exception) -> Exception:
    """Its traceback begins in the script."""
    trace = error.__traceback__
    while trace is not None and is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return error.with_traceback(trace)


def is_ours(filename: str) -> bool:
    return filename == __file__ or "runpy" in filename
