"""A user's traceback has no frames of ours before the user's."""

import traceback

import pytest

from elastic.store.remote import patiently
from workers.tracebacks import begun_outside


def read() -> None:
    raise KeyError("mine")


def caught(call) -> BaseException:
    """As our own code has it, which calls: without the frame of this one."""
    with pytest.raises(KeyError) as found:
        call()
    trace = found.value.__traceback__
    return found.value.with_traceback(trace and trace.tb_next)


def names(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_frames_of_ours_before_the_user_s_go():
    error = caught(lambda: patiently(read))
    assert names(error)[-1] == "read"
    inner = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
    assert names(inner)[0] == "patiently"
    assert names(begun_outside(inner)) == ["read"]


def test_frames_of_ours_behind_the_user_s_stay():
    error = caught(lambda: patiently(read))
    assert names(begun_outside(error)) == ["<lambda>", "patiently", "read"]


def test_of_what_we_have_raised_ourselves_all_stays():
    error = caught(lambda: patiently(read))
    trace = error.__traceback__ and error.__traceback__.tb_next
    assert trace is not None
    trace.tb_next = None
    assert names(begun_outside(error.with_traceback(trace))) == ["patiently"]
