"""A run that ends says that its final save gets further."""

import threading

import pytest

from elastic.protocol.messages.to_controller import StillSaving
from elastic.protocol.messages.to_worker import Finish
from elastic.store.files import open_folder
from tests.workers.session_rig import Rig, obey
from workers.membership.member import RunEnded

pytestmark = pytest.mark.usefixtures("place")
FINISH = Finish(2, 0, 1, "succeeded", None, 0)
LEASE_S = 0.1


def test_a_member_says_now_and_then_that_the_final_save_gets_further(tmp_path):
    rig, has_told = Rig("bitwise", has_checkpoints=True, lease_s=LEASE_S), threading.Event()
    saver, say, names = rig.member.saver, rig.link.send, []
    take = saver._memory.take

    def send(report):
        say(report)
        if isinstance(report, StillSaving):
            has_told.set()

    def slowly(*arguments):
        names.append(arguments[0])
        if len(names) > 1:  # it has got further
            has_told.wait(60)
        return take(*arguments)

    rig.link.send, saver._memory.take = send, slowly
    saver.open(str(tmp_path))
    with pytest.raises(RunEnded):
        obey(rig.member, FINISH)
    (first, _), *_ = rig.link.of("still_saving")
    assert first == {"generation": 2, "rank": 0}
    told = [kind for kind, _, _ in rig.link.sent if kind != "still_saving"]
    assert told[-2:] == ["part_saved", "ended"]  # a slow machine may say "still" between them
    assert open_folder(str(tmp_path)).at("checkpoints").folders() == ["step-00000000"]
    rig.loader.close()
