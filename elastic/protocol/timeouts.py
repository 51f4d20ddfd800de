"""Every wait of a run, in seconds: all derive from the one knob `detect_s`.

Who waits is elsewhere: elastic/control decides by them, elastic/on_ray and workers keep them.
"""

from dataclasses import dataclass

MIN_DETECT_S = 0.5
MAX_DETECT_S = 3600.0
UNLIMITED_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    heartbeat_s: float
    """Between two words of a worker's pulse."""
    tick_s: float
    """Between two looks of the controller."""
    late_s: float
    """A look that is late by more than this was kept up by a freeze of the controller's own:
    heartbeats wait to be read, and nobody is suspect."""
    diagnosis_s: float
    """At most, for the stacks of everybody before a suspect is killed: how long a busy
    machine takes for them is no matter of `detect_s`."""
    confirm_s: float
    """How long a failed collective waits for the loss that explains it: until a hang would have
    been seen, and explained."""
    cold_s: float
    """For a phase that has no usual time, or cost somebody else his life."""
    join_s: float
    """For a generation to form."""
    silence_s: float
    """Without an answer for so long the controller is dialled again."""
    lease_s: float
    """Without a word from any controller a worker ends itself."""
    start_s: float
    """For a process that serves the run to start, on a machine that is busy."""
    rendezvous_s: float
    """A rendezvous that does not answer for this long is started anew..."""
    controller_s: float
    """...and a controller that is silent for this long, before the workers' lease runs out."""
    stall_s: float
    """Without a byte written for so long a save has failed: the storage hangs."""
    end_s: float
    """For the final state to get further."""
    operation_s: float
    """The backend's own limit per collective: a last resort only."""

    def __post_init__(self) -> None:
        seen_s = self.heartbeat_s + self.tick_s + self.diagnosis_s
        order = (seen_s, self.confirm_s, self.join_s, self.lease_s, self.operation_s)
        if not seen_s < self.confirm_s <= self.join_s <= self.lease_s <= self.operation_s:
            raise ValueError(
                "heartbeat_s + tick_s + diagnosis_s < confirm_s <= join_s <= lease_s <= "
                f"operation_s must hold, got {order}: "
                "a hang would be explained after it was given up"
            )


def timeouts_of(detect_s: float | None) -> Timeouts:
    """detect_s: None for no detection of hangs. ValueError if it is out of bounds."""
    if detect_s is None:
        return Timeouts(
            heartbeat_s=0.5,
            tick_s=0.25,
            late_s=0.5,
            diagnosis_s=0.5,
            confirm_s=30.0,
            cold_s=UNLIMITED_S,
            join_s=600.0,
            silence_s=10.0,
            lease_s=600.0,
            start_s=UNLIMITED_S,
            rendezvous_s=UNLIMITED_S,
            controller_s=UNLIMITED_S,
            stall_s=UNLIMITED_S,
            end_s=UNLIMITED_S,
            operation_s=UNLIMITED_S,
        )
    if not MIN_DETECT_S <= detect_s <= MAX_DETECT_S:
        raise ValueError(
            f"detect_s={detect_s:g} must be from {MIN_DETECT_S:g}, as a busy machine may be silent "
            f"for less, to {MAX_DETECT_S:g}: or give None for no detection of hangs"
        )
    heartbeat_s, tick_s = min(0.5, detect_s / 6), min(0.25, detect_s / 12)
    diagnosis_s = 0.5
    return Timeouts(
        heartbeat_s=heartbeat_s,
        tick_s=tick_s,
        late_s=min(0.5, detect_s / 6),
        diagnosis_s=diagnosis_s,
        confirm_s=detect_s + heartbeat_s + tick_s + diagnosis_s,
        cold_s=100 * detect_s,
        join_s=10 * detect_s,
        silence_s=detect_s,
        lease_s=10 * detect_s,
        start_s=100 * detect_s,
        rendezvous_s=2 * detect_s,
        controller_s=5 * detect_s,
        stall_s=50 * detect_s,
        end_s=100 * detect_s,
        operation_s=100 * detect_s,
    )
