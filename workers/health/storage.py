"""Whether this node can write to the run's storage, asked before the first step.

Where checkpoints go is workers/checkpoint/saver.py's; what the driver and the controller see of the
storage, elastic/store/files.py's probe.
"""

import errno
import logging
import secrets
import time
from contextlib import suppress
from functools import partial

from elastic.protocol.errors import UnfitNode, WrongInput
from elastic.store.files import PROBE, Folder, first_line, reach_folder
from elastic.store.remote import is_refused, patiently, shown_uri, unknown_host

SEEN_S = 30.0
"""A run directory that was made on another node may take as long to be seen over a network."""
LOOK_EVERY_S = 0.2
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Full for every node: what follows is the run's `on_storage_error`."""
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG)
log = logging.getLogger(__name__)


def check(place: str, host: str, *, is_newcomer: bool, seen_s: float = SEEN_S) -> None:
    """place: the run directory, which the controller makes. host: this node's address.
    is_newcomer: others train already, and a store that is away does not keep it from joining them.

    UnfitNode if this node does not see the run directory, or cannot write to it.
    """
    shown = shown_uri(place)
    try:
        folder = reach_folder(place)
        if folder.local is not None and not _is_seen(folder, seen_s):
            raise UnfitNode(
                f"storage: node {host} does not see {shown}, which the controller has made; choose "
                "a folder that every node sees, or a URI"
            )
        _write(folder, is_newcomer=is_newcomer)
    except WrongInput as error:
        if isinstance(error, UnfitNode):
            raise
        raise UnfitNode(f"node {host}: {error}") from error
    except OSError as error:
        why = first_line(error).replace(place, shown)
        if error.errno in FULL or (is_newcomer and not _is_final(error)):
            log.warning('storage=%s reason="%s"', shown, why)
            return
        raise UnfitNode(
            f"storage: node {host} cannot write to {shown}: {why}; let this node write there, or "
            "choose another storage"
        ) from error


def _is_seen(folder: Folder, seen_s: float) -> bool:
    give_up_at = time.monotonic() + seen_s
    while not folder.exists("config.json"):
        if time.monotonic() > give_up_at:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def _write(folder: Folder, *, is_newcomer: bool) -> None:
    """OSError, of a store that is away after as long a wait as everywhere."""
    put = partial(_put, folder)
    try:
        put()
    except OSError as error:
        if is_newcomer or error.errno in FULL or _is_final(error):
            raise
        patiently(put)


def _put(folder: Folder) -> None:
    name = f"{PROBE}{secrets.token_hex(8)}"
    folder.write(name, b"probe", is_durable=False)
    with suppress(OSError):  # who may write but not delete can serve a run
        folder.delete(name)


def _is_final(error: OSError) -> bool:
    """Whether no waiting mends it."""
    return is_refused(error) or error.errno in FORBIDDEN or bool(unknown_host(error))
