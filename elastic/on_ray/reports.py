"""What members say, as events: the plain reports, those that bring nothing but themselves.

Reports with a payload or an effect on the cluster are handled in cluster.py.
"""

from collections.abc import Callable
from typing import Any

from elastic.control import events as e
from elastic.control.detection.hang import Heartbeat

STATES = {
    "synced": "ready",
    "sync_failed": "standby",
    "joined": "training",
    "paused": "paused",
    "suspended": "suspended",
    "done": "done",
}
"""What a report says about the worker's state in status.json."""


REPORTS: dict[str, tuple[Callable[..., e.Event], tuple[str, ...]]] = {
    "connected": (e.Connected, ()),
    "paused": (e.Paused, ("step",)),
    "kept": (e.Kept, ()),
    "suspended": (e.Suspended, ("step", "is_prepared", "is_between_steps")),
    "done": (e.Done, ("step",)),
    "ended": (e.Ended, ("weights_sha256",)),
    "part_saved": (e.PartSaved, ("step",)),
    "still_saving": (e.StillSaving, ()),
    "part_failed": (e.PartFailed, ("step", "message")),
}
"""The event, and its fields between generation, rank and time."""


def event_of(worker: int, header: dict[str, Any], at: float) -> e.Event:
    """The event of a report; KeyError if it is none of ours."""
    match header["type"]:
        case "synced":
            return e.Synced(worker, at)
        case "sync_failed":
            return e.SyncFailed(worker, header["reason"], at)
        case "drain_notice":
            return e.DrainNotice(worker, header["cause"], at + header["notice_s"], at)
        case "joined":
            generation, rank = header["generation"], header["rank"]
            return e.Joined(generation, rank, header["state_s"], at, header["step"])
        case "collective_failed":
            generation, rank, message = header["generation"], header["rank"], header["message"]
            is_refused = header["is_refused"]
            return e.CollectiveFailed(generation, rank, message, at, is_refused=is_refused)
        case kind:
            event, fields = REPORTS[kind]
            said = (header[field] for field in fields)
            return event(header["generation"], header["rank"], *said, at)


def heartbeat_of(worker: int, header: dict[str, Any]) -> Heartbeat:
    return Heartbeat(
        worker=worker,
        generation=header["generation"],
        step=header["step"],
        phase=header["phase"],
        phase_s=header["phase_s"],
        p95_s=header["p95_s"],
        is_new_there=header["is_new_there"],
        waits_for_peers=header["waits_for_peers"],
        process_state=header["process_state"],
        collective=tuple(header["collective"]),
        own_steps=header["own_steps"],
        own_s=header["own_s"],
        part=header["part"],
        unanswered=tuple(header["unanswered"].items()),
        stopped_s=header["stopped_s"],
    )
