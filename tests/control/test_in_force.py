"""What counts of what was said is said again over another connection, and nothing else."""

from elastic.protocol.in_force import CommandsInForce, ReportsInForce
from elastic.protocol.messages import to_controller as r
from elastic.protocol.messages import to_worker as t
from elastic.protocol.step_record import AppliedRecord, StepMetrics, VoteHead
from tests.control.fake_record import step_record

LOAD, SYNC, LOG = t.Load("/run", 3), t.Sync(0, None), t.LogTo("/run")
PAUSE, ABORT = t.Pause(1, 0, 2), t.Abort(1, 0, 2)
RECALL = t.Recall(2, 0, 2)


def form(generation: int) -> t.Form:
    return t.Form(generation, 0, 2, 3, False, 3, None, None, None, ())


def again(*commands: t.Command | t.SaveConcluded) -> tuple[object, ...]:
    in_force = CommandsInForce()
    for command in commands:
        in_force.say(command)
    return in_force.again()


def test_a_new_place_ends_what_was_asked_in_the_one_before():
    assert again(SYNC, LOG, form(1), PAUSE, ABORT) == (LOG, form(1), PAUSE, ABORT)
    assert again(form(1), PAUSE, RECALL) == (RECALL,)
    assert again(RECALL, LOG, form(3)) == (LOG, form(3))


def test_the_newest_of_a_kind_counts_and_saves_end_one_by_one():
    assert again(form(1), PAUSE, PAUSE) == (form(1), PAUSE)
    ends = [t.SaveConcluded(step, True) for step in range(20)]
    assert again(*ends) == tuple(ends[-16:])


def test_what_was_done_is_not_asked_for_again():
    for command, report in ((LOAD, r.Loaded(3, ())), (SYNC, r.Synced(3)), (SYNC, r.SyncFailed(""))):
        in_force = CommandsInForce()
        in_force.say(command)
        in_force.answered(r.Started(r.Process("n", "ip", 1, "cpu", ("h", 1))))
        assert in_force.again() == (command,)
        in_force.answered(report)
        assert in_force.again() == ()


def committed(generation: int, step: int) -> r.Committed:
    return r.Committed(generation, 0, (step_record(step),), VoteHead(step, ()))


def test_reports_count_until_their_generation_is_over_and_steps_until_they_are_on_record():
    in_force = ReportsInForce()
    joined, paused = r.Joined(1, 0, 0.0, 3), r.Paused(1, 0, 5)
    early, held = r.Held(1, 0, 3), r.Held(1, 0, 4)
    said = [joined, early, committed(1, 4), held, committed(1, 5), paused, r.Synced(3)]
    for report in said:
        in_force.say(report)
    steps = [committed(1, 4), held, committed(1, 5)]
    assert list(in_force.again_after(())) == [joined, *steps, paused]
    in_force.forget(4)
    assert list(in_force.again_after(())) == [joined, committed(1, 5), paused]
    in_force.say(r.Joined(2, 0, 0.0, 5))
    in_force.say(r.Paused(1, 0, 5))
    assert list(in_force.again_after(())) == [r.Joined(2, 0, 0.0, 5)]


def test_what_waits_to_be_said_comes_before_what_is_in_force_and_once():
    in_force, waits, fails = ReportsInForce(), r.Synced(3), r.UserFailed("no")
    for report in (r.Done(1, 0, 5), fails):
        in_force.say(report)
    assert list(in_force.again_after([r.Done(1, 0, 5), waits])) == [waits, r.Done(1, 0, 5), fails]


def test_steps_of_the_newest_call_of_a_script_are_said_again_until_they_are_on_record():
    in_force = ReportsInForce()
    steps = [StepMetrics(n, 0.0, None, 1 + (n > 2), 2, n, 0.1, True, {}) for n in range(1, 5)]
    said = [r.ScriptSteps(1, 0, (step,)) for step in steps]
    for report in said:
        in_force.say(report)
    assert list(in_force.again_after(said[-2:])) == said
    in_force.forget_applied(AppliedRecord(0, 9, 9))  # of a controller that has heard of none
    assert list(in_force.again_after(())) == said
    in_force.forget_applied(AppliedRecord(1, 3, 1))  # which was done again in 2
    assert list(in_force.again_after(())) == said[2:]
    in_force.say(r.ScriptSteps(4, 9, ()))
    assert list(in_force.again_after(())) == [r.ScriptSteps(4, 9, ())]
    in_force.forget_applied(AppliedRecord(4, 9, 2))
    assert not in_force.again_after(())


def test_that_a_member_cannot_get_its_state_is_of_its_generation():
    in_force = ReportsInForce()
    in_force.say(r.SyncFailed("the source is gone"))
    assert not in_force.again_after(())
    in_force.say(r.SyncFailed("row 3", 4))
    assert list(in_force.again_after(())) == [r.SyncFailed("row 3", 4)]
