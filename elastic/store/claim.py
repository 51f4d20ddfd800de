"""`Claim`: who writes a run where the file system has no locks, as an object store.

No store is asked to write on a condition: whoever wants the run writes a file of its own under a
rising number, and then looks who else has. How old a file is, is by the store's clock alone.
"""

import logging
import os
import re
import secrets
import threading
import time
from contextlib import suppress
from functools import cache
from typing import Any, NoReturn

from elastic.protocol.errors import WrongInput
from elastic.store.files import Folder, first_line, read_json, write_json

log = logging.getLogger(__name__)

CLAIMS = ".claims"
_NAME = re.compile(r"\d{6,}-[0-9a-f]{8}-.*")
"""Number, token, launch."""
RENEW_EVERY_S = 5.0
SILENT_S = 30.0
"""A claim that was not renewed for so long is nobody's."""
SURE_S = 10.0
"""So long after it was renewed a claim is the only one for certain, a slow upload included."""
WITHDRAW_S = 3.0
"""How long a rival that must give way may take to do so."""
LOOK_EVERY_S = 0.2


class TakenOver(OSError):
    """Another controller writes the run now: nothing more may be written by this one."""


class Claim:
    """A controller's right to write a run: taken, renewed by a thread, released.

    Every wish comes before the look for others, so that of two at least one sees the other.
    """

    def __init__(self, run: Folder, place: str, launch: str) -> None:
        """launch: the same for a controller and its successors, who may supersede it."""
        self._folder, self._place, self._launch = run.at(CLAIMS), place, launch
        self._name = ""
        self._is_released = threading.Event()
        self._renewed_at = time.monotonic()
        self._renewing = threading.Lock()
        self.taken_by = ""
        """The launch that writes the run now, if it is another one."""
        self._is_superseded = False

    def take(self) -> None:
        """WrongInput if another controller has the run, or wants it and was first."""
        self._folder.create()
        newest = max((number_of(name) for name in self._times()), default=0)
        self._name = f"{newest + 1:06d}-{secrets.token_hex(4)}-{self._launch}"
        self._write(is_held=False)
        deadline = time.monotonic() + WITHDRAW_S
        while rivals := self._rivals():
            if min(rivals) < self._name or time.monotonic() >= deadline:
                self._refuse()
            time.sleep(LOOK_EVERY_S)
        self._write(is_held=True)
        if any(name < self._name and self._is_held(name) for name in self._rivals()):
            self._refuse()  # it was silent, and is back
        for name in self._times():
            if number_of(name) <= newest:  # rivals of our own number withdraw by themselves
                self._folder.delete(name)
        threading.Thread(target=self._keep_renewing, name="claim", daemon=True).start()

    def _refuse(self) -> NoReturn:
        self._folder.delete(self._name)
        raise WrongInput(
            f"{self._place} is being written by a live run; wait for it, or use another name; "
            f"if it was killed, try again in {SILENT_S:g} s"
        )

    def check(self) -> None:
        """Before something is written. TakenOver if another controller writes the run, OSError if
        that cannot be known."""
        if not self._is_superseded and time.monotonic() - self._renewed_at > SURE_S:
            self.renew()
        if self._is_superseded:
            raise TakenOver(f"{self._place} was taken over by another controller")

    def renew(self) -> None:
        with self._renewing:
            began = time.monotonic()
            if self._is_released.is_set() or self._is_superseded:
                return
            self._write(is_held=True)
            for name in self._times():
                if name > self._name and self._is_held(name):
                    self._is_superseded = True
                    self.taken_by = "" if launch_of(name) == self._launch else launch_of(name)
                    self._folder.delete(self._name)
                    return
            self._renewed_at = began

    def release(self) -> None:
        """The run may be taken at once."""
        self._is_released.set()
        with self._renewing, suppress(OSError):
            self._folder.delete(self._name)

    def withdraw(self, *, with_run: bool) -> None:
        """As `release`, but no empty folder stays. with_run: nor that of the run. Whoever wants the
        run in this moment may lose its wish to it, is refused, and can try again."""
        self._is_released.set()
        run = self._folder.parent
        with self._renewing, suppress(OSError):
            if self._folder.names() != [self._name]:
                self._folder.delete(self._name)
            elif with_run and not run.names() and run.folders() == [CLAIMS]:
                run.delete_all()
            else:
                self._folder.delete_all()

    def _keep_renewing(self) -> None:
        while not self._is_released.wait(RENEW_EVERY_S) and not self._is_superseded:
            try:
                self.renew()
            except OSError as error:  # what is written next asks again
                log.warning('storage=%s claim not renewed reason="%s"', self._place, error)

    def _times(self) -> dict[str, float]:
        """When each claim was renewed last; a file on its way to its name is none yet."""
        times = self._folder.modified_times()
        return {name: at for name, at in times.items() if _NAME.fullmatch(name)}

    def _rivals(self) -> list[str]:
        """Claims of others that may be alive."""
        times = self._times()
        now = times.get(self._name)
        if now is None:  # whoever took the run has cleared it away
            self._refuse()
        return [
            name
            for name, at in times.items()
            if name != self._name and now - at <= SILENT_S and not self._is_over(name)
        ]

    def _is_over(self, name: str) -> bool:
        """A predecessor's, or of a process of this machine that is no more."""
        if launch_of(name) == self._launch and name < self._name:
            return True
        owner = self._content(name)
        return not owner or is_gone(owner.get("pid"), owner.get("machine"))

    def _is_held(self, name: str) -> bool:
        return bool(self._content(name).get("is_held"))

    def _content(self, name: str) -> dict[str, Any]:
        """Empty if it was released meanwhile."""
        try:
            return read_json(self._folder, name) or {}
        except WrongInput:  # it is being written, where a store shows half of a file
            return {"is_held": False}

    def _write(self, *, is_held: bool) -> None:
        owner = {"pid": os.getpid(), "machine": this_machine(), "is_held": is_held}
        write_json(self._folder, self._name, owner, is_durable=False)


def number_of(name: str) -> int:
    return int(name.partition("-")[0])


def launch_of(name: str) -> str:
    return name.split("-", 2)[-1]


# --- whose process is that? ---------------------------------------------------------
@cache
def this_machine() -> str:
    """What tells apart all places where a process number means something: every machine's every
    boot, and every container there. Empty if it cannot be known."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError as error:
        log.warning('machine unknown reason="%s"', first_line(error))
        return ""


def is_gone(pid: object, machine: object) -> bool:
    """The process was on this machine and is no more; False where we cannot know."""
    if not isinstance(pid, int) or not machine or machine != this_machine():
        return False
    return has_ended(pid)


def has_ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
