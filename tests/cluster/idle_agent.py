"""What a raylet of the tests runs in place of Ray's dashboard agent: it serves nothing and says so.

Ray's own does no more where `ray[default]` is not installed, but takes a second of a core to start.
The raylet looks for a file per port, and has its agents end with it.
"""

import os
import sys
import time
from pathlib import Path

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
NONE = "-1"
LOOK_S = 0.5


def announce(folder: Path, node_id: str) -> None:
    for name in PORTS:
        path = folder / f"{name}_{node_id}"
        written = path.with_suffix(".new")
        written.write_text(NONE)
        written.rename(path)


if __name__ == "__main__":
    given = dict(a.removeprefix("--").split("=", 1) for a in sys.argv[1:] if "=" in a)
    announce(Path(given["session-dir"]), given["node-id"])
    while os.getppid() == int(os.environ["RAY_RAYLET_PID"]):
        time.sleep(LOOK_S)  # polling, for as long as there is a raylet
