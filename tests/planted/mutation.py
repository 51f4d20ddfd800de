"""One bug in one line, and the files that several of them are planted in."""

from typing import NamedTuple

FAILOVER = "elastic/control/failover.py"
RECOVERY = "elastic/control/recovery.py"
SCALING = "elastic/control/scaling.py"
COMMITS = "elastic/on_ray/record/progress.py"
CLUSTER = "elastic/on_ray/cluster.py"
MACHINE = "workers/membership/machine.py"
STATE = "workers/membership/state.py"
NETWORK = "tests/control/test_network_simulation.py"
MEMBER = "workers/membership/member.py"
WORKER = "workers/worker.py"
SHARDS = "workers/parallel/shards.py"


class Mutation(NamedTuple):
    name: str
    file: str
    old: str
    """Must occur once."""
    new: str
    tests: str
    """Files, one of whose tests must fail."""
    is_of_protocol: bool = False
    """The simulation alone finds it as well, within NUM_SEEDS seeds."""
