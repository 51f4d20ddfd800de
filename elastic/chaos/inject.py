"""Faults put into a live run: watches its directory, waits for each strike, carries it out.

Which strikes there are is plan.py's, what lasts of them is lasting.py's, what they cost is
report.py's. Nothing here asks the run's own processes for anything.
"""

import os
import random
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from elastic.chaos.lasting import Lasting
from elastic.chaos.plan import Strike, choose, choose_some, room_text
from elastic.chaos.record import Done, read_done, write_done
from elastic.chaos.scenario import BOUNDED, OF_NODES, PLACES, After, AtStep, Scenario
from elastic.chaos.storage_faults import choose_part, flip_bits
from elastic.protocol.errors import WrongInput
from elastic.protocol.membership import worker_name
from elastic.store.files import Folder, read_json
from elastic.store.journal import LineTail

LOOK_EVERY_S = 0.005
STALE_AFTER_S = 20.0
"""A status that is older: the run's controller is gone."""
DRAIN_DEADLINE_S = 30.0
PATIENCE_S = 5.0
"""How long a strike waits for somebody to hit: status.json follows the journal."""
TIMED = ("stop", "slow", *BOUNDED)
"""What a worker may be lost of until it is over; a drain's for_s is a deadline."""
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM}

Tell = Callable[[str], None]


class Injector:
    """Owns the strikes of one scenario on one run; `run` returns when the run is over."""

    def __init__(
        self,
        folder: Folder,
        scenario: Scenario,
        plan: tuple[Strike, ...],
        *,
        address: str | None = None,
        driver_pid: int | None = None,
        tell: Tell = print,
    ) -> None:
        self._folder, self._scenario, self._waiting = folder, scenario, list(plan)
        self._address, self._driver_pid, self._tell = address, driver_pid, tell
        self.done = read_done(folder)
        self._status: dict[str, Any] = {}
        self._journal = LineTail(folder, "journal.jsonl")
        self._phases: list[str] = []
        """What the journal said since strikes were last chosen."""
        self._lost: set[str] = set()
        """Workers that the journal has as lost; status.json may still show them."""
        self._began: dict[int, tuple[float, int]] = {}
        """Fault, 0 for the start -> monotonic seconds and committed steps when it happened."""
        self._lasting = Lasting(folder, self._signal, address, tell)
        self._due_since: dict[Strike, float] = {}

    def run(self) -> None:
        """Until the run has ended. KeyboardInterrupt wakes what would be woken later."""
        self._journal.poll()
        if self._address is not None:  # now, because it takes seconds
            from elastic.on_ray.driver import remote_faults

            remote_faults.join(self._address)
        try:
            while not self._is_over():
                self._look()
                now = time.monotonic()
                due = [strike for strike in self._waiting if self._is_due(strike, now)]
                self._phases = []
                for strike in due:
                    since = self._due_since.setdefault(strike, now)
                    rows = self._victims(strike)
                    if rows or now > since + PATIENCE_S:
                        self._waiting.remove(strike)
                        self._strike(strike, rows)
                self._lasting.check()
                self._take_room(now)
                time.sleep(LOOK_EVERY_S)
        finally:
            self._lasting.end()
            self._save()
        for strike in self._waiting:
            self._tell(f"not reached before the run ended: {strike}")

    def _is_over(self) -> bool:
        if self._folder.exists("result.json"):
            return True
        ballast = self._lasting.ballast
        if ballast.is_there or time.monotonic() < ballast.gone_at + STALE_AFTER_S:
            return False  # nobody could write its status
        changed = self._folder.modified("status.json")
        return changed is not None and time.time() - changed > STALE_AFTER_S

    def _look(self) -> None:
        self._status = read_json(self._folder, "status.json") or self._status
        lines = self._journal.poll()
        self._phases += [line["phase"] for line in lines if "phase" in line]
        self._lost |= {worker_name(e["worker"]) for e in map(event_in, lines) if is_loss(e)}
        if self._status.get("phase") == "running" and self._step() > 0:
            self._began.setdefault(0, (time.monotonic(), self._step()))

    def _step(self) -> int:
        return int(self._status.get("step", 0))

    def _is_due(self, strike: Strike, now: float) -> bool:
        if strike in self._due_since:
            return True
        began = self._began.get(strike.spec.after_fault)
        if began is None:
            return False
        match strike.trigger:
            case After(seconds=seconds):
                return now >= began[0] + seconds
            case AtStep(step=step):
                return self._step() >= step + (began[1] if strike.spec.after_fault else 0)
            case trigger:
                return trigger.phase in self._phases

    def _strike(self, strike: Strike, rows: list[dict[str, Any]]) -> None:
        if not rows:
            self._record(strike, {}, f"nobody to hit: there is no {strike.spec.whom} now")
        nodes: dict[str, float] = {}  # node -> when: it hits all workers there together
        for row in rows:
            try:
                at = nodes.get(row.get("node_id", ""))
                at = self._hit(strike, row) if at is None else at
                if strike.spec.what in OF_NODES:
                    nodes[row["node_id"]] = at
                self._record(strike, row, "", at)
            except (OSError, WrongInput) as error:
                self._record(strike, row, str(error))
        self._look()  # a signal to another node takes its time
        self._began.setdefault(strike.fault, (time.monotonic(), self._step()))

    def _victims(self, strike: Strike) -> list[dict[str, Any]]:
        whom = strike.spec.whom
        if strike.spec.what in PLACES:
            return self._place(strike)
        if whom.kind == "controller":
            return [self._status["controller"]]
        if whom.kind == "driver":
            return [{"pid": self._driver_pid, "node_ip": None}] if self._driver_pid else []
        there = [row for row in self._status["workers"] if row["id"] not in self._lost]
        return choose(whom, strike.num_victims, there, self._dice(strike))

    def _place(self, strike: Strike) -> list[dict[str, Any]]:
        """What is hit that is no process, by its name; nothing if it is not there."""
        match strike.spec.what:
            case "corrupt":
                name = choose_part(self._folder, self._dice(strike))
            case "capacity":
                name = room_text(strike.room)
            case _:
                name = str(self._folder)
        return [{"name": name}] if name else []

    def _dice(self, strike: Strike) -> random.Random:
        return random.Random(f"{self._scenario.seed}:{strike.fault}:{strike.number}")

    def _take_room(self, now: float) -> None:
        """Kill the workers for which the last strike on the capacity has left no room."""
        strike = self._lasting.room_strike
        if strike is None:
            return
        rows = [*self._status.get("workers", []), *self._status.get("standby", [])]
        placed = [row for row in rows if row["pid"] and row["id"] not in self._lost]
        num_excess = self._lasting.capacity.num_excess(len(placed), now)
        dice = random.Random(f"{self._scenario.seed}:{strike.fault}:{strike.number}:{now}")
        for row in choose_some(placed, num_excess, dice):
            try:
                self._record(strike, row, "", self._signal(row, signal.SIGKILL))
            except (OSError, WrongInput) as error:
                self._record(strike, row, str(error))

    def _hit(self, strike: Strike, row: dict[str, Any]) -> float:
        """Do it; the Unix time just before, on the process's node."""
        spec, now, at = strike.spec, time.monotonic(), time.time()
        until = inf if spec.for_s is None else now + spec.for_s
        match spec.what:
            case "kill" | "term":
                at = self._signal(row, SIGNALS[spec.what])
            case "stop":
                at = self._stop(row, spec.for_s)
            case "slow":
                if row["pid"] != self._driver_pid and not is_here(row["node_ip"]):
                    raise WrongInput(f"slow needs the process here; it is on {row['node_ip']}")
                self._lasting.slow(row, spec.slower, until)
            case "drain":
                self._lasting.drain(row["node_id"], spec.for_s or DRAIN_DEADLINE_S)
            case "cut" | "lossy":
                at = self._lasting.lose_packets(row["node_id"], spec)
            case "corrupt":
                flip_bits(self._folder, row["name"], self._dice(strike))
            case "fill":
                self._lasting.fill(spec.at_most_gb, now, until)
            case "capacity":
                self._lasting.make_room(strike, self._status, now)
        return at

    def _stop(self, row: dict[str, Any], for_s: float | None) -> float:
        """As `_hit`. The time counts from the signal, which another node may take long to send."""
        if for_s is None:
            self._lasting.leave(row)  # else it might be woken in between
            return self._signal(row, signal.SIGSTOP)
        self._lasting.hold(row, inf)  # so that it is woken if this command is ended meanwhile
        try:
            at = self._signal(row, signal.SIGSTOP)
        except (OSError, WrongInput):
            self._lasting.leave(row)
            raise
        self._lasting.hold(row, time.monotonic() + for_s)
        return at

    def _signal(self, row: dict[str, Any], number: signal.Signals) -> float:
        is_driver = row["pid"] == self._driver_pid
        if is_driver or is_here(row["node_ip"]):
            if not is_driver:
                refuse_stranger(row["pid"])
            at = time.time()
            os.kill(row["pid"], number)
            return at
        from elastic.on_ray.driver import remote_faults

        if "node_id" not in row:
            raise WrongInput(f"the controller is on another node, {row['node_ip']}: run this there")
        remote_faults.join(self._address)
        return remote_faults.signal_process(row["node_id"], row["pid"], number)

    def _record(
        self, strike: Strike, row: dict[str, Any], note: str, at: float | None = None
    ) -> None:
        done = Done(
            strike=f"{strike.fault}.{strike.number}",
            what=strike.spec.what,
            whom=str(row.get("name") or strike.spec.whom),
            at=time.time() if at is None else at,
            step=self._step(),
            generation=int(self._status.get("generation", 0)),
            phase=str(self._status.get("phase", "")),
            scenario=self._scenario.name,
            note=note,
            for_s=strike.spec.for_s if strike.spec.what in TIMED else None,
        )
        known = {k: row.get(k) for k in ("rank", "node_ip", "pid")}
        self.done.append(replace(done, worker=row.get("id"), **known))
        self._save()
        hit = row.get("name") or "nobody"
        if "pid" in row:
            hit = f"pid {row['pid']} {row.get('id') or strike.spec.whom}"
        self._tell(f"step {done.step}: {strike.spec.what} {hit}{note and f', but {note}'}")

    def _save(self) -> None:
        """What a full disk does not take is written at the end."""
        with suppress(OSError):
            write_done(self._folder, self.done)


def event_in(line: dict[str, Any]) -> dict[str, Any]:
    """The event of a line of the journal; empty if it has none."""
    return line.get("entry", {}).get("event") or {}


def is_loss(event: dict[str, Any]) -> bool:
    return event.get("type") == "WorkerLost"


def is_here(node_ip: str | None) -> bool:
    """Whether the address is this machine's."""
    if not node_ip:
        return False
    with socket.socket(socket.AF_INET6 if ":" in node_ip else socket.AF_INET) as probe:
        try:
            probe.bind((node_ip, 0))
        except OSError:
            return False
    return True


def refuse_stranger(pid: int) -> None:
    """A status may be older than the process: only Ray's processes are ever signalled."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"process {pid} is gone already") from None
    if not command.startswith(b"ray::"):
        raise WrongInput(f"process {pid} is no worker of Ray (any more)")
