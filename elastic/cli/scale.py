"""`elastic scale`: another number of workers for a run that goes on.

Who leaves or comes, and when, is elastic/control/resizing.py's.
"""

from typing import Annotated

import typer

from elastic.cli.journal import RunDir, config_of
from elastic.cli.outside import Cluster, on_cluster
from elastic.cli.run_options import parse_workers
from elastic.cli.stop import EMBEDDED, driver_of, read_end, run_id_of
from elastic.driver.resume import read_past_run
from elastic.protocol.errors import WrongInput
from elastic.protocol.membership import counted, workers_from_to
from elastic.store.files import open_folder
from elastic.store.remote import shown_uri


def scale(
    run_dir: RunDir,
    workers: Annotated[
        str, typer.Argument(metavar="WORKERS", help="A number, or MIN..MAX, such as 2..6.")
    ],
    address: Annotated[
        str | None, typer.Option(help="The run's Ray cluster, if it is not the one that is found.")
    ] = None,
    cluster: Cluster = None,
) -> int:
    """Give a live run another number of workers: who is too many leaves between two steps."""
    bounds = parse_workers(workers, "WORKERS")
    low, high = (bounds, bounds) if isinstance(bounds, int) else bounds
    if cluster is not None:
        return on_cluster(cluster, "scale", run_dir, workers)
    folder = open_folder(run_dir)
    config = config_of(folder, run_dir)
    if (result := read_end(folder)) is not None:
        raise WrongInput(
            f"{shown_uri(run_dir)} has ended: {result['outcome']} after {result['steps']} steps; "
            f"to go on with it, start it again with --workers {workers}"
        )
    driver = driver_of(config)
    if address is None and driver.get("ray") == EMBEDDED:
        raise WrongInput(
            f"{shown_uri(run_dir)} runs on a Ray of its own, which nobody else reaches: stop it, "
            f"and start it again with --workers {workers}"
        )
    address = address or config.get("address") or driver.get("ray")
    from elastic.on_ray.driver.remote_run import ask_to_resize  # ray loads here

    asked, (low, high) = high, ask_to_resize(run_id_of(folder, run_dir), address, (low, high))
    past = read_past_run(folder)
    now = past.status.get("world_size", 0) if past is not None and past.status else 0
    wanted = workers_from_to(low, high)
    print(
        f"the run is to have {wanted} from now on; at this moment it has {counted(now, 'worker')}"
    )
    if asked > high:
        print(f"more than {high} would have no micro-batch to compute")
    return 0
