"""Words that files and reports use for causes, phases and states: the complete lists."""

CAUSES = (
    "process_died",  # Ray or the kernel says that the process is gone
    "connection_lost",  # its connection ended, and it did not come back
    "heartbeat_silent",  # nothing heard for longer than detect_s
    "hung",  # a peer waits for it, and it has been in its phase far longer than usual
    "unreachable",  # its host and a peer's cannot reach each other, and the controller both
    "device_failed",  # its GPU can do nothing more
    "diverged",  # its replica has other bits than the majority's
    "join_timeout",  # it did not join its generation in time, nor answer when that was given up
    "start_failed",  # it died before its model was built
    "unfit",  # its machine cannot serve the run, or its results would have other bits
)
"""Values of `cause` in result.json's recoveries and of a WorkerLost event."""

RUN_PHASES = (
    "starting",
    "waiting",
    "forming",
    "running",
    "pausing",
    "suspending",
    "ending",
    "finished",
)
"""Values of `phase` in status.json."""

WORKER_STATES = (
    "pending",  # asked for; Ray has no slot for it yet, or its process starts
    "standby",  # warm: model built, no current state
    "syncing",  # copies state from a peer while the others train
    "ready",  # holds the current state and waits for a generation
    "training",
    "evaluating",
    "paused",  # at a step boundary
    "suspended",  # its generation was given up
    "done",
)
"""Values of `state` of a worker in status.json."""

OUTCOMES = (
    "succeeded",  # it came to its end
    "failed",  # it could not go on
    "stopped",  # it was asked to; the same command goes on with it
)
"""Values of `outcome` in result.json."""
