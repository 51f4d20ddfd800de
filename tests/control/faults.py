"""What shall go wrong in a simulated run."""

from dataclasses import dataclass

BURST_TURNS = 60
LATE_S = (1.0, 5.0, 70.0)
"""After so long a loss may be heard."""


@dataclass(kw_only=True)
class Faults:
    """Every number is a budget, the seed decides when."""

    kills: int = 0
    kill_chance: float = 0.01
    kill_modes: tuple[str, ...] = ()  # empty: whatever the worker does
    stillborn: int = 0
    stuck: int = 0  # freeze when told to form; noticed after 100 s
    sync_failures: int = 0
    user_failure: float = 0.0
    stop_at: float | None = None
    slots: tuple[tuple[float, int], ...] = ((0.0, 1000),)  # from when on, how many
    eval_every: int = 0
    slow_detection: float = 0.0  # chance
    failing_saves: int = 0
    controller_kills: int = 0
    controller_chance: float = 0.004
    dies_retiring: bool = False
    """The controller dies behind a decision to end somebody who has not heard of it."""
    burst: float = 0.0
    """Chance, per turn of the cluster, that a fault has company: within BURST_TURNS of the last."""
    slow_failover: bool = False
    """Between the introductions to a new controller the others go on, and may die."""
    drains: int = 0
    drain_chance: float = 0.01
    notice_s: tuple[float, ...] = (0.0, 0.2, 3.0, 30.0)
    fits_over: int = 0
    """A step that has fitted over more has no memory over fewer members than this."""
    resizes: int = 0
    """So often the run is told to have from 1 to 4 workers."""
    holder_losses: int = 0
    link_breaks: int = 0
    """A worker and the controller do not hear each other for a while; then all of it comes, or some
    of it is lost and both say again what is in force."""
    false_alarms: float = 0.0
    """Chance that a collective of the living fails."""
    lags: float = 0.0
    """Chance that a newcomer's link carries less than the steps bring."""
