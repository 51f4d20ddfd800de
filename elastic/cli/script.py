"""`elastic run SCRIPT.py [its arguments]`: a script that calls Ray Train's `TorchTrainer.fit()`.

The script runs in this process as `python SCRIPT.py` would run it; its `fit()` is ours
(elastic/ray_train.py).
"""

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from elastic.driver.starting import slow_step
from elastic.protocol.errors import WrongInput

FAILED = 1


def script_in(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """The script of a command line and its arguments; None if it names none."""
    if len(words) >= 2 and words[0] == "run" and words[1].endswith(".py"):
        return words[1], list(words[2:])
    return None


def run_script(script: str, arguments: list[str]) -> int:
    """The exit status. WrongInput for a script that is not there, that asks for what is not
    supported, or that calls no fit()."""
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
