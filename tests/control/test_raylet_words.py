"""What a driver prints of what Ray's raylets tell it."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray import JobID
from ray._private import worker

from elastic.on_ray.driver.raylet_words import DEATH, hush_deaths

PARAGRAPH = f"{DEATH} by an unexpected system error. Worker PID: 7. (1) killed by the OOM killer"
RETRIED = (
    "Task RendezvousActor.ping failed. There are infinite retries remaining, so the task will be "
    "retried. Error: The actor is dead because it was killed by `ray.kill`."
)
OTHERS = [
    "1 Workers (tasks / actors) killed due to memory pressure (OOM)",
    f"no task: {DEATH}",
    RETRIED.replace("RendezvousActor", "users_own"),
]
JOB = JobID.from_int(1)


def told(message):
    """Ray's own listener hears it, and prints it as it does."""
    is_over = threading.Event()

    def poll():
        is_over.set()
        return None, {"job_id": JOB.binary(), "type": "worker_died", "error_message": message}

    subscriber = SimpleNamespace(subscribe=lambda: None, poll=poll)
    driver: Any = SimpleNamespace(gcs_error_subscriber=subscriber, current_job_id=JOB)
    worker.listen_error_messages(driver, is_over)


@pytest.fixture
def hushed():
    undo = hush_deaths()
    yield undo
    undo()


def test_only_ray_s_paragraph_about_a_death_is_hushed(hushed, capsys):
    for message in [PARAGRAPH, RETRIED, *OTHERS]:
        told(message)
    printed = capsys.readouterr().out
    assert PARAGRAPH not in printed
    assert all(other in printed for other in OTHERS)


def test_what_workers_print_stays(hushed, capsys):
    data = {"lines": [PARAGRAPH], "pid": 12, "is_err": False}
    worker.print_to_stdstream(data, ignore_prefix=False)
    assert PARAGRAPH in capsys.readouterr().out


def test_after_the_run_ray_speaks_as_before(hushed, capsys):
    hushed()
    again = f"{PARAGRAPH}, again"  # Ray prints no line twice in a row
    told(again)
    assert again in capsys.readouterr().out
