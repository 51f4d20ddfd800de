"""That all workers, and every later start of the run, have a map-style dataset of one length.

The sample order is a function of it. It is kept in the run's `data.json`, where a fed run has its
plan (elastic/data/record.py).
"""

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from elastic.protocol.errors import WrongInput
from elastic.store.files import Folder, reach_folder, read_json, write_json
from elastic.store.remote import AWAY_PAUSES_S, patiently, tell_away

NAME, KEY = "data.json", "num_rows"
LOOK_S, LOOK_REMOTE_S = 0.5, 5.0
"""Between looks. Workers that find no record write theirs, the last one stays, and each of them
looks once more: so a difference is seen by one of them."""
MAX_LOOKS = 720
"""For 6 minutes, or an hour where they take longer: a run begins within seconds of its workers."""


def compare(folder: Folder, num_rows: int) -> bool:
    """Whether the length is on record; WrongInput if there is another."""
    found = read_json(folder, NAME)
    if found is None:
        return False
    if KEY not in found:
        raise WrongInput("the run began with data from a feed, and dataset() now is map-style")
    if found[KEY] != num_rows:
        raise WrongInput(
            f"dataset() has {num_rows} samples here, and {found[KEY]} in another worker or when "
            "the run began; it must be the same data everywhere (or use another --name)"
        )
    return True


def keep_comparing(
    reach: Callable[[], Folder],
    num_rows: int,
    refuse: Callable[[WrongInput], None],
    pauses_s: Sequence[float] = AWAY_PAUSES_S,
) -> None:
    """In a thread, until the length has been found on record twice, or a store or a run that does
    not come was looked for often enough. Not at all if the store cannot be reached for longer than
    this worker waits for it anywhere."""
    try:
        folder = patiently(reach, pauses_s=pauses_s)
    except OSError as error:
        print(f'length is not compared reason="{error}"', file=sys.stderr, flush=True)
        return None
    except WrongInput as error:
        return refuse(error)
    pause, seen = threading.Event(), 0
    for _ in range(MAX_LOOKS):
        pause.wait(LOOK_S if folder.local else LOOK_REMOTE_S)
        with suppress(OSError):  # a store that is away: later
            try:
                if compare(folder, num_rows):
                    seen += 1
                elif folder.exists("config.json"):  # a run that begins nothing leaves nothing
                    write_json(folder, NAME, {KEY: num_rows})
            except WrongInput as error:
                return refuse(error)
        if seen == 2:
            return None
    print(f'length is not compared reason="none on record in {folder}"', file=sys.stderr)
    return None


def watch_length(place: str, num_rows: int, refuse: Callable[[WrongInput], None]) -> None:
    """WrongInput if the run began with another length; `refuse` is told what is found later."""
    reach, is_known = partial(reach_folder, place), False
    try:
        is_known = compare(reach(), num_rows)
    except OSError as error:  # a store that is away: later
        tell_away(error, LOOK_REMOTE_S)
    if not is_known:
        arguments = (reach, num_rows, refuse)
        threading.Thread(target=keep_comparing, args=arguments, name="length", daemon=True).start()
