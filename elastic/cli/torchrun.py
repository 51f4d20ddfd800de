"""`elastic torchrun [torchrun's options] SCRIPT [arguments]`: a script that torchrun starts.

What of the options has a meaning is elastic/torchrun.py's.
"""

import typer

from elastic.cli.outcome import print_failure
from elastic.cli.worker_output import WorkerOutput

FAILED = 1
SETTINGS = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,
}


def torchrun(context: typer.Context) -> int:
    """Run a script that torchrun starts, as it is: `elastic torchrun --nproc-per-node 4 train.py`.

    Its options are torchrun's, and `--script-level 0`: after a loss the script is run again in the
    same processes, also where it could go on in place.
    """
    from elastic.driver.launch import RunFailed
    from elastic.torchrun import request_of, run

    request = request_of(context.args)
    try:
        result = run(request, WorkerOutput(request.place))
    except RunFailed as failure:
        print_failure(failure)
        return FAILED
    return 0 if result.outcome == "succeeded" else FAILED
