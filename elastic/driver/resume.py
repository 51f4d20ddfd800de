"""What happens when a run's storage and name exist already: the resume rules of the contract.

`compare` is pure; `read_past_run` reads the run directory; who is asked to go on is in launch.py.
"""

import hashlib
import json
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from elastic.driver.redaction import changed_secrets, redacted, salt_of
from elastic.protocol.errors import WrongInput
from elastic.protocol.timeouts import timeouts_of
from elastic.store.claim import has_ended, is_gone, this_machine
from elastic.store.files import Folder, encode, read_json
from elastic.store.journal import read_backwards
from elastic.store.remote import shown_uri
from elastic.store.run_directory import check_result, has_trained

MAY_DIFFER = frozenset(
    [
        "workers",
        "standby",
        "parallel",
        "detect_s",
        "max_failures",
        "address",
        "device",
        "cpus_per_worker",
        "numa_binding",
        "labels",
        "accelerator_type",
        "worker_resources",
        "spot",
        "checkpoint_every",
        "keep",
        "snapshot_every",
    ]
)
DECIDES_BITS = frozenset(("cpus_per_worker",))
"""May differ with reduction="fast" only: convolutions and matrix products add in another order with
another number of threads."""
LAST_PROCESSES_S = 3.0
"""How long a run that seems to be alive may take to end."""
LOOKS = 40
"""So many times in the time after which a run counts as silent."""
OF_A_SCRIPT = frozenset(("global_batch",))
"""Where a script trains, the engine's own follow from the number of workers."""
SCRIPT = "script:"
"""Begins the target of a run whose loop is a script of Ray Train's."""
WHERE_IT_IS = frozenset(
    (*("storage", "name", "versions", "target_file", "target_sha256"), "secrets", "secrets_salt")
)
SILENT_AFTER_S = 10.0
"""A local status.json is written at least once a second."""
REMOTE_SILENT_AFTER_S = 45.0
"""Elsewhere it is written at most every 10 s."""


@dataclass(frozen=True)
class PastRun:
    """What an earlier run left in the run directory."""

    config: dict[str, Any]
    status: dict[str, Any] | None
    result: dict[str, Any] | None
    silent_s: float
    """Seconds since status.json was written; infinite if it never was."""
    is_controller_gone: bool
    """Known for certain: it ran on this machine and its process is no more."""
    silent_after_s: float = SILENT_AFTER_S
    begun_s: float = field(default=float("inf"), compare=False)
    """Seconds since config.json was written, as each start of the run does."""
    heard_at: float | None = field(default=None, compare=False)
    """When status.json was written, by the clock of its storage."""
    has_trained: bool = field(default=True, compare=False)
    """It has formed a generation, or left steps or checkpoints."""

    @property
    def is_alive(self) -> bool:
        is_silent = self.silent_s > self.silent_after_s
        return self.result is None and not is_silent and not self.is_controller_gone

    @property
    def is_away(self) -> bool:
        """Its controller is gone or silent; a status from before the newest start says nothing."""
        return self.result is None and not self.is_alive and self.begun_s >= self.silent_s

    @property
    def heard_s(self) -> float:
        """Seconds since a controller's last sign of life."""
        return min(self.silent_s, self.begun_s)

    @property
    def successor_left_s(self) -> float:
        """For how long a successor of its controller may still come: its workers wait for as long
        as their lease, and a live run's status may be as old as `silent_after_s`."""
        detect_s = self.config.get("detect_s")
        try:
            lease_s = timeouts_of(detect_s).lease_s
        except (TypeError, ValueError, OverflowError) as error:
            raise WrongInput(f"config.json is damaged: detect_s is {detect_s!r:.80}") from error
        return self.silent_after_s + lease_s - self.heard_s

    @property
    def is_over(self) -> bool:
        """It has a result, or nobody comes any more who could write one."""
        return self.result is not None or (not self.is_alive and self.successor_left_s <= 0)


@dataclass(frozen=True)
class Fresh:
    """No run of this name, or one that came to nothing: start at step 0."""


@dataclass(frozen=True)
class Resumed:
    """Go on with a run that was stopped, failed or lost, or extend one that succeeded."""


@dataclass(frozen=True)
class AlreadyFinished:
    """Nothing to do: the run succeeded with these steps."""

    result: dict[str, Any]

    def __str__(self) -> str:
        steps = self.result["steps"]
        return (
            f"this run finished all {steps} steps before; give a larger --steps to extend it, "
            "or another --name"
        )


def config_json(
    config: dict[str, Any],
    target: str,
    arguments: dict[str, Any],
    versions: dict[str, str],
    source: Path | None = None,
    *,
    past: PastRun | None = None,
) -> dict[str, Any]:
    """The content of config.json: the fields of RunConfig, and what was run with them.

    Exactly what reading it back gives; an argument that JSON cannot hold is its type. source: the
    target's file, if there is one. Secrets are not in it, only what tells that they are the same
    as those of the past run.
    """
    values = {**config, "target": target, "arguments": plain(arguments), "versions": versions}
    if source is not None and source.is_file():
        sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
        values |= {"target_file": str(source), "target_sha256": sha256}
    if past is not None and past.has_trained and "fingerprint" in past.config:
        values["fingerprint"] = past.config["fingerprint"]  # of the machine it has begun on
    salt = None if past is None else salt_of(past.config)
    return redacted(json.loads(encode(values)), salt)


def plain(value: object) -> object:
    """`value` as JSON, the same in every process: of what JSON cannot hold, its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        pairs = cast("dict[object, object]", value).items()
        return {str(plain(key)): plain(item) for key, item in pairs}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast("list[object]", value)]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in cast("set[object]", value)), key=str)
    if isinstance(value, os.PathLike):
        return os.fspath(cast("os.PathLike[str]", value))
    return f"{type(value).__module__}.{type(value).__qualname__}"


def differences(past: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Settings that may not change between two parts of one run, each with both values."""
    found: list[str] = []
    past = redacted(past, new.get("secrets_salt"))  # of an earlier version it may have all
    names = changed_secrets(past.get("secrets"), new.get("secrets", {}))
    found += [f"the argument {name!r}, a secret, is another one now" for name in names]
    may_differ = MAY_DIFFER | (OF_A_SCRIPT if is_script(new) else frozenset[str]())
    if past.get("reduction") == "bitwise":
        may_differ -= DECIDES_BITS
    past, new = without_checks(past), without_checks(new)
    for name in sorted(past.keys() & new.keys() - may_differ - WHERE_IT_IS):
        is_extended = name == "steps" and isinstance(past[name], int) and new[name] > past[name]
        if past[name] != new[name] and not is_extended:
            found.append(f"{name} was {past[name]!r} and now is {new[name]!r}")
    return found


def without_checks(config: dict[str, Any]) -> dict[str, Any]:
    """Without `faults.validate`, which decides nothing and which older runs do not have."""
    faults = config.get("faults")
    if not isinstance(faults, dict):
        return config
    known = cast("dict[str, Any]", faults)
    return {**config, "faults": {k: v for k, v in known.items() if k != "validate"}}


def is_script(config: dict[str, Any]) -> bool:
    """It says itself when it is over."""
    return str(config.get("target", "")).startswith(SCRIPT)


def changed_code(past: dict[str, Any], new: dict[str, Any]) -> str:
    """A line if the target's file is another than when the run was last started, else empty."""
    before, now = past.get("target_sha256"), new.get("target_sha256")
    if before is None or now is None or before == now:
        return ""
    return (
        f"note: {new['target_file']} has changed since this run was last started; it goes on with "
        "the new code"
    )


def changed_parallel(past: dict[str, Any], new: dict[str, Any]) -> str:
    """A line if the state of a checkpoint goes to another strategy, else empty."""
    before, now = past.get("parallel"), new["parallel"]
    if before is None or before == now:
        return ""
    line = f"note: this run was last started with parallel={before!r} and goes on with {now!r}"
    if new["reduction"] != "bitwise":
        line += "; reduction='fast' adds in another order there, so the last bits may differ"
    return line


def compare(
    place: str, past: PastRun | None, new: dict[str, Any]
) -> Fresh | Resumed | AlreadyFinished:
    """Whether the run in `place` may go on with the settings `new`; WrongInput if it may not."""
    if past is None:
        return Fresh()
    place = shown_uri(place)
    if past.has_trained and (found := differences(past.config, new)):
        raise WrongInput(
            f"{place} holds a run with another configuration: {'; '.join(found)}. "
            "Use the old values to resume it, or another --name"
        )
    if past.is_alive:
        raise WrongInput(
            f"{place} is being written by a live run ({where(past)}, {past.silent_s:.0f} s ago). "
            "Wait for it, or use another --name"
        )
    if not past.has_trained:
        return Fresh()
    result = past.result or {}
    if result.get("outcome") == "succeeded":
        check_result(result, f"{place}/result.json")
    is_at_end = is_script(new) or new["steps"] <= result.get("steps", -1)
    if result.get("outcome") == "succeeded" and is_at_end:
        return AlreadyFinished(result)
    return Resumed()


def where(past: PastRun) -> str:
    controller = controller_of(past.status)
    return f"controller pid {controller.get('pid')} on {controller.get('node_ip')}"


def read_past_run(folder: Folder, now: float | None = None) -> PastRun | None:
    """The run in this folder, None if there is none. `now` is Unix time."""
    config = read_json(folder, "config.json")
    if config is None:
        return None
    status = read_json(folder, "status.json")
    result = read_json(folder, "result.json")
    now = now or time.time()
    written, begun = folder.modified("status.json"), folder.modified("config.json")
    return PastRun(
        config=config,
        status=status,
        result=result,
        silent_s=float("inf") if written is None else now - written,
        is_controller_gone=is_controller_gone(controller_of(status)),
        silent_after_s=SILENT_AFTER_S if folder.local else REMOTE_SILENT_AFTER_S,
        begun_s=float("inf") if begun is None else now - begun,
        heard_at=written,
        has_trained=bool(generation_of(status) or (result or {}).get("steps"))
        or has_trained(folder),
    )


def newest_generation(folder: Folder, past: PastRun | None) -> int:
    """The newest that the run directory knows of, 0 for none: no launch of the run repeats one.

    past: the run in this folder.
    """
    if past is None:
        return 0
    lines = read_backwards(folder, "journal.jsonl")
    decided = next((found for line in lines if (found := generation_of(line))), 0)
    return max(generation_of(past.status), decided)


def generation_of(content: dict[str, Any] | None) -> int:
    """Of status.json or of a line in the journal; 0 where none stands."""
    found = (content or {}).get("generation")
    return found if isinstance(found, int) else 0


def await_silence(
    read: Callable[[], PastRun | None],
    tell: Callable[[str], object],
    now: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> PastRun | None:
    """The run in a folder, alive only if it was heard again while we looked, or is on this machine.

    If all of it was killed a moment ago, its status is young all the same, and a successor of its
    controller may just be about to notice. tell: told once what is waited for, and for how long at
    most. now: in seconds, of whatever origin.
    """
    begun, is_told = now(), False
    past = first = read()
    while past is not None and past.is_alive:
        waited_s = now() - begun
        is_heard = is_here(past) or (first is not None and past.heard_at != first.heard_at)
        if is_heard and waited_s >= LAST_PROCESSES_S:
            return past
        if waited_s > past.silent_after_s:  # by our own clock; that of its storage may be wrong
            return replace(past, silent_s=max(waited_s, past.silent_s))
        if waited_s >= LAST_PROCESSES_S and not is_told:
            is_told = True
            left_s = math.ceil(past.silent_after_s - waited_s)
            tell(
                f"an earlier start of this run ({where(past)}) may be alive: waiting {left_s} s "
                "at most for a sign of it, and going on without one"
            )
        pause(past.silent_after_s / LOOKS)
        past = read()
    return past


def controller_of(status: dict[str, Any] | None) -> dict[str, Any]:
    found = (status or {}).get("controller")
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def is_here(past: PastRun) -> bool:
    """Its controller's process is one of this machine."""
    machine = controller_of(past.status).get("machine")
    return bool(machine) and machine == this_machine()


def is_controller_gone(controller: dict[str, Any]) -> bool:
    """The process ran on this machine and is no more; False where we cannot know."""
    pid, machine = controller.get("pid"), controller.get("machine")
    if machine is not None or not isinstance(pid, int):
        return is_gone(pid, machine)
    return controller.get("node_ip") in own_addresses() and has_ended(pid)  # of version 0.1.0


def own_addresses() -> frozenset[str]:
    """The addresses under which this machine is known to itself and to others."""
    found = {"127.0.0.1"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the route tells our own address
            found.add(probe.getsockname()[0])
        except OSError:
            pass  # no network: only the loopback is left
    return frozenset(found)
