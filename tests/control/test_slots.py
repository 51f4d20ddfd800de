"""What a controller says of a worker whose process is gone."""

from typing import Any, cast

from elastic.on_ray.slots import Slot


def test_the_end_of_a_process_is_told_in_its_own_words_and_with_its_log():
    slot, place = Slot(cast(Any, None), pid=7), ("w3", "s3://bucket/runs/first")
    assert slot.why_gone(*place) == "what it printed is in logs/w3.log"
    slot.memory = (9 * 10**9, 10**8)
    shortage = "perhaps out of memory: it held 9.00 GB, and 0.10 GB were left"
    assert slot.why_gone(*place) == f"{shortage}; what it printed is in logs/w3.log"
    slot.last_words = "loader process 7 exited with status 9"
    assert slot.why_gone("w3", None) == "loader process 7 exited with status 9"


def test_a_worker_that_never_started_has_no_log():
    assert Slot(cast(Any, None)).why_gone("w3", "/runs/first") == ""
