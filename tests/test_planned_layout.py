"""The layout of a generation and the level of a script: what a controller's successor shows of them
without asking again."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.control.events import Committed
from elastic.control.state import Decision, Running
from elastic.control.transition import start
from elastic.controller import recorder as recorder_file
from elastic.controller.status import stage_text, stages_of
from elastic.protocol.membership import Membership
from elastic.protocol.messages.to_controller import Planned, ScriptLevel, Stage
from tests.test_recorder import close, recorder, settled

FIRST = Planned(1, "1 pipeline of 2 stages", (), (Stage(0, 0, (0, 2)), Stage(0, 1, (2, 5))))
SECOND = Planned(
    2, "1 pipeline of 1 stage", ("idle",), (None, Stage(0, 0, (0, 5))), 320, ("a", "b"), (12.0, 0.5)
)


@pytest.mark.parametrize("every", [1000, 3], ids=["since its start", "before a landmark"])
def test_a_successor_knows_the_layout_and_the_level_that_were_said_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
):
    """A reading back stops at the last line that has the whole ledger."""
    monkeypatch.setattr(recorder_file, "LEDGER_EVERY", every)

    async def run() -> None:
        died = recorder(str(tmp_path))
        await died.open_at(0, [])
        decision = start(died.limits, 5.0)
        died.record(None, None, decision)
        for said in (FIRST, SECOND):
            died.record_planned(said)
        died.record_level(ScriptLevel(1, 1, "why"))
        for step in range(1, 5):
            died.record(Committed(1, step, 0.1, 5.0 + step), decision, decision)
        await settled(died)
        died.writer.executor.shutdown()
        successor = recorder(str(tmp_path))
        assert await successor.reopen() is not None
        assert successor.planned == SECOND
        assert successor.level == ScriptLevel(1, 1, "why")
        await close(successor)

    asyncio.run(run())
    lines = (tmp_path / "r" / "journal.jsonl").read_text()
    assert lines.count('"planned_last"') == (every == 3)
    assert lines.count('"planned"') == 2


def test_a_members_stage_is_told_by_the_layout_of_its_generation(tmp_path: Path):
    async def begun() -> Decision:
        return start(recorder(str(tmp_path)).limits, 5.0)

    ledger = asyncio.run(begun()).ledger
    decision = Decision(ledger, Running(Membership(1, (4, 2))))
    assert stage_text(FIRST, decision, 4) == "; it has stage 0 of pipeline 0, blocks 0 to 1"
    assert stage_text(FIRST, decision, 2) == "; it has stage 1 of pipeline 0, blocks 2 to 4"
    two = replace(FIRST, stages=(Stage(1, 0, (0, 1, 3, 5)), None))
    assert stage_text(two, decision, 4) == (
        "; it has stage 0 of pipeline 1, blocks 0 to 0 and 3 to 4"
    )
    assert stages_of(two, decision) == two.stages
    assert [stages_of(SECOND, decision), stages_of(None, decision), stages_of(two, None)] == [
        ()
    ] * 3
    nothing = [(two, decision, 2), (FIRST, decision, 7), (SECOND, decision, 4)]
    nothing += [(None, decision, 4), (FIRST, None, 4)]
    assert [stage_text(*of) for of in nothing] == [""] * len(nothing)
