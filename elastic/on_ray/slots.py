# Ray is typed in part only.
# pyright: reportUnknownMemberType=false
"""A slot: what the controller's process knows of one worker's actor and process.

What it is told to do is elastic/on_ray/cluster.py's; the decisions' view is the ledger.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from elastic.control.detection.hang import STOPPED, Watch, is_dead, watch
from elastic.protocol.messages import to_controller as r
from elastic.protocol.messages.pulse import Heartbeat

ENDING_GRACE_S = 3.0
DEAD = "The actor is dead because"
"""So begins, among other lines, what Ray knows of a death that is not the actor's own doing."""
MAX_WHY_CHARS = 400
STATES: dict[type, str] = {
    r.Synced: "ready",
    r.SyncFailed: "standby",
    r.Joined: "training",
    r.Paused: "paused",
    r.Suspended: "suspended",
    r.Done: "done",
}
"""What a report says about the worker's state in status.json."""
SHORT = 0.1
"""If no more than this part of what a process had or could get was left, it may have died of it."""


@dataclass
class Slot:
    """What the controller's process knows of one worker; the ledger knows the rest."""

    actor: "Future[ActorHandle[Any]]"
    """Made by Ray's head, which may be away for a while."""
    task: "asyncio.Task[None] | None" = None
    node_id: str = ""
    node_ip: str = ""
    pid: int = 0
    device: str = ""
    peer_address: tuple[str, int] | None = None
    state: str = "pending"
    is_placed: bool = False
    """Ray has found a node for it."""
    step: int = 0
    last_seen: float = 0.0
    """When its trainer was last known to be no dead or stopped process."""
    watch: Watch | None = None
    memory: tuple[int, int] | None = None
    """Bytes that it held, and that it could still get, in its last heartbeat."""
    failure: str = ""
    """What its user's code raised, in its own words."""
    wrong_input: str | None = None
    """The same, if it is none of the user's exceptions but what it was given."""
    is_unfit: bool = False
    """It is its node that cannot serve the run."""
    has_failed: bool = False
    last_words: str = ""
    """Why it ends itself, as it says before it does, or what it is accused of..."""
    last_cause: str = ""
    """...and what its loss is by that, if not that of a process that died."""

    def hear(self, report: r.Report) -> None:
        self.state = STATES.get(type(report), self.state)

    def accuse(self, cause: str, why: str) -> None:
        """It will be ended. Should it die before, it is lost by this, unless it has said why."""
        if not self.last_words:
            self.last_words, self.last_cause = why, cause

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """Its pulse beats on while its trainer is frozen, and once after its end."""
        self.watch = watch(self.watch, heartbeat, now)
        if heartbeat.process_state != STOPPED and not is_dead(self.watch):
            self.last_seen = now
        self.step = max(self.step, heartbeat.step)
        self.memory = heartbeat.memory or self.memory

    def end(self) -> None:
        """Its process, whatever state that is in; if it is only being made, once it is."""
        if not self.actor.cancel():
            self.actor.add_done_callback(end_made)

    def locate(self, process: r.Process) -> None:
        """Where its process is, as it says itself."""
        self.node_id, self.node_ip = process.node_id, process.node_ip
        self.pid, self.device = process.pid, process.device
        self.peer_address = process.peer_address

    @property
    def failed_as(self) -> str:
        """The cause of a newcomer's loss by its failure."""
        return "unfit" if self.is_unfit else "start_failed"

    @property
    def own_s(self) -> float | None:
        """Its own seconds per micro-batch, waiting for peers apart; None before its first step."""
        has_stepped = self.watch is not None and self.watch.heartbeat.own.steps
        return self.watch.heartbeat.own.seconds if self.watch is not None and has_stepped else None

    @property
    def shortage(self) -> str:
        """What may explain that its process is gone; empty if there was memory enough."""
        if self.memory is None or self.memory[1] > SHORT * sum(self.memory):
            return ""
        held, left = (size / 1e9 for size in self.memory)
        return f"perhaps out of memory: it held {held:.2f} GB, and {max(left, 0):.2f} GB were left"

    def why_gone(self, worker: str, log_folder: str | None) -> str:
        """What may explain that its process is gone, and where its own output is, with the stack
        if a signal ended it."""
        has_log = self.pid and log_folder is not None
        log = f"what it printed is in logs/{worker}.log" if has_log else ""
        return "; ".join(filter(None, (self.last_words or self.shortage, log)))

    @property
    def shown_state(self) -> str:
        """`state` as status.json says it."""
        is_evaluating = self.watch is not None and self.watch.heartbeat.phase == "evaluate"
        return "evaluating" if is_evaluating and self.state == "training" else self.state


def why_not_started(error: RayError) -> str:
    """What Ray says of an actor that did not start, in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if not isinstance(error, RayActorError):
        return " ".join(lines)[:MAX_WHY_CHARS]
    if error.actor_init_failed:
        return lines[-1]  # of the traceback
    known = next((line for line in lines if line.startswith(DEAD)), lines[0])
    return known.partition(". ")[0]  # the rest guesses


def end_made(actor: "Future[ActorHandle[Any]]") -> None:
    if not actor.cancelled() and actor.exception() is None:
        ray.kill(actor.result(), no_restart=True)


def note_place(slot: Slot, answered: "Future[Any]") -> None:
    slot.is_placed = answered.exception() is None


def end_process(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


async def see_off(slots: Iterable["Slot"]) -> None:
    """Wait until those of this node are gone; who stays too long is ended."""
    here = ray.get_runtime_context().get_node_id()
    pids = [slot.pid for slot in slots if slot.pid and slot.node_id == here]
    deadline = time.monotonic() + ENDING_GRACE_S
    while any(is_running(p) for p in pids) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    for pid in pids:
        if is_running(pid):
            end_process(pid)


def is_running(pid: int) -> bool:
    """False for a process that is gone or a zombie."""
    return (fields := stat_of(pid)) is not None and fields[0] not in "ZX"


def started_at(pid: int) -> int | None:
    """In clock ticks since the machine's start; None if there is no such process."""
    return int(fields[19]) if (fields := stat_of(pid)) is not None else None


def stat_of(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat (proc(5)) from the third, the state, on."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
