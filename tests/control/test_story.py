"""The story of a worker, from the journal of a real run: one dies inside a step, one is silent."""

from pathlib import Path

import pytest

from elastic.cli.app import main
from elastic.cli.journal import parts_of
from elastic.control.story import Happening, story
from elastic.store.files import open_folder
from elastic.store.journal import read_lines

JOURNAL = Path(__file__).parent / "traces" / "a_death_and_a_silence.jsonl"


def told_of(worker: int) -> list[Happening]:
    lines = read_lines(open_folder(str(JOURNAL.parent)), JOURNAL.name)
    parts = parts_of([line["entry"] for line in lines if "entry" in line])
    return [each for part in parts for each in story(part, worker)]


def test_the_story_of_a_worker_that_came_late_goes_from_its_wish_to_its_end():
    assert [(t.generation, t.step, t.what) for t in told_of(3)] == [
        (3, 6, "is asked for"),
        (3, 12, "has started: its model is built"),
        (3, 12, "is to copy the state of w0"),
        (4, 12, "has copied the state and follows its source"),
        (4, 12, "is to be rank 1 of 2 in generation 4, at step 12"),
        (4, 12, "is in, as rank 1 of 2 (its state took 0.000 s)"),
        (4, 30, "has returned from its loop after step 30"),
        (4, 30, "is to write the final state: succeeded"),
        (4, 30, "has saved its part of the checkpoint of step 30"),
        (4, 30, "has written and hashed the final state"),
        (4, 30, "is ended: the run has no more use for it"),
    ]


def test_a_lost_worker_s_story_ends_with_its_loss_and_the_reason():
    told = told_of(2)
    assert [t.at for t in told] == sorted(t.at for t in told)
    *_, steps, loss = told
    assert (steps.what, steps.step) == ("says that all have committed steps 6 to 12", 12)
    assert loss.what.startswith("is lost: heartbeat_silent, no heartbeat for 3.2 s; ")
    assert loss.reason.startswith("w2 lost (heartbeat_silent: ")
    assert loss.reason.endswith(", 1 of 2 left, min 2, budget 1/8")


def test_the_journal_of_an_earlier_version_is_decided_as_it_was(tmp_path, capsys):
    """Its limits have a field that is another one now."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "journal.jsonl").write_bytes(JOURNAL.read_bytes())
    assert main(["replay", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("every decision is the same again\n")


def test_it_is_printed_a_line_each(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "journal.jsonl").write_bytes(JOURNAL.read_bytes())
    assert main(["story", str(tmp_path), "w1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(told_of(1))
    assert lines[0] == (
        "     0.000 s  generation 0  step 0  w1 is asked for  "
        'reason="the run starts: 2 to 3 workers"'
    )
    assert " w1 is lost: process_died, what it printed is in logs/w1.log  " in lines[-1]


@pytest.mark.parametrize(
    ("worker", "said"),
    [("w9", "there was no worker w9 in this run"), ("rank 1", "'rank 1' is no worker: ")],
)
def test_whoever_was_not_there_is_one_line(worker, said, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "journal.jsonl").write_bytes(JOURNAL.read_bytes())
    assert main(["story", str(tmp_path), worker]) == 2
    assert said in capsys.readouterr().err
