"""The resume rules: what may differ, what may not, and who is still alive."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elastic.cli.stop import run_id_of
from elastic.config import RunConfig
from elastic.driver.resume import (
    AlreadyFinished,
    Fresh,
    PastRun,
    Resumed,
    await_silence,
    changed_code,
    changed_parallel,
    compare,
    config_json,
    newest_generation,
    read_past_run,
)
from elastic.protocol.errors import WrongInput
from elastic.store.claim import this_machine
from elastic.store.files import encode, open_folder, write_json
from elastic.store.journal import segment_name
from elastic.store.run_directory import RunDirectory
from tests.store.test_journal import told
from tests.store.test_run_directory import RESULT, STATUS


def content(target: str = "/j.py:Job", arguments: Any = None, **changes: Any) -> dict[str, Any]:
    settings = {"steps": 10, "global_batch": 32, "micro_batch": 8, "storage": "/s", "name": "r"}
    config = RunConfig(**{**settings, **changes})
    return config_json(config.to_json(), target, arguments or {}, {"torch": "2.13"})


STOPPED = {"outcome": "stopped", "steps": 4}
PAST = PastRun(content(), None, STOPPED, silent_s=1.0, is_controller_gone=False)
CONTROLLER = {"pid": 77, "node_ip": "10.0.0.1"}


def refusal(past: PastRun, new: dict[str, Any]) -> str:
    with pytest.raises(WrongInput) as caught:
        compare("/s/r", past, new)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_name_that_nobody_used_is_a_fresh_run():
    assert compare("/s/r", None, content()) == Fresh()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"workers": (2, 4)},
        {"standby": 1},
        {"parallel": "fsdp"},
        {"detect_s": None},
        {"max_failures": 1},
        {"address": "ray://x"},
        {"device": "cpu"},
        {"cpus_per_worker": 2},
        {"numa_binding": "none"},
        {"steps": 11},
        {"name": "r", "storage": "/elsewhere/../s"},
    ],
)
def test_a_stopped_run_goes_on_with_settings_that_may_differ(changes):
    assert compare("/s/r", PAST, content(**changes)) == Resumed()


def test_a_run_directory_of_before_the_settings_were_grouped_is_resumed():
    written = """{"workers": [2, 4], "steps": 300, "global_batch": 64, "micro_batch": 8,
        "parallel": "hsdp:4", "reduction": "fast", "precision": "fp32", "clip_norm": null,
        "activation_checkpointing": false, "offload": false, "seed": 0, "storage": "/s",
        "name": "r", "checkpoint_every": 50, "keep": [3, 10], "snapshot_every": 2, "standby": 0,
        "detect_s": 3.0, "max_failures": 8, "device": "cpu", "cpus_per_worker": 2,
        "address": "auto", "eval_every": null, "on_storage_error": "fail",
        "faults": {"max_nonfinite": 8, "verify_every": 10, "replace_stragglers": null}}"""
    past = json.loads(written)
    config = RunConfig.from_json(past)
    newer = dict.fromkeys(("spot", "labels", "accelerator_type", "worker_resources"))
    newer["numa_binding"] = "node"
    newer["faults"] = {**past["faults"], "validate": True}
    assert config.to_json() == {**past, **newer}
    before = config_json(past, "/j.py:Job", {}, {"torch": "2.13"})
    now = config_json(config.to_json(), "/j.py:Job", {}, {"torch": "2.13"})
    assert compare("/s/r", replace(PAST, config=before), now) == Resumed()


@pytest.mark.parametrize(
    ("new", "says"),
    [
        (content(seed=1), "seed was 0 and now is 1"),
        (content(steps=9), "steps was 10 and now is 9"),
        (content(global_batch=64), "global_batch was 32 and now is 64"),
        (content(reduction="bitwise"), "reduction was 'fast' and now is 'bitwise'"),
        (content(clip_norm=1.0), "clip_norm was None and now is 1.0"),
        (content(target="/k.py:Job"), "target was '/j.py:Job' and now is '/k.py:Job'"),
        (content(arguments={"w": 2}), "arguments was {} and now is {'w': 2}"),
    ],
)
def test_anything_else_that_differs_is_refused_with_both_values(new, says):
    assert says in refusal(PAST, new)


def test_the_same_module_in_another_folder_is_the_same_target_and_changed_code_is_a_note(tmp_path):
    """As under `ray job submit`, where each submission has a folder of its own."""
    there, here = tmp_path / "a" / "j.py", tmp_path / "b" / "j.py"
    contents = []
    for file in (there, here):
        file.parent.mkdir()
        file.write_text("x = 1")
        config = RunConfig(steps=10, global_batch=32, micro_batch=8).to_json()
        contents.append(config_json(config, "j:Job", {}, {}, file))
    before, now = contents
    assert compare("/s/r", replace(PAST, config=before), now) == Resumed()
    assert changed_code(before, now) == ""
    assert changed_code(content(), now) == "", "nobody knows"
    here.write_text("x = 1  # a comment")
    edited = config_json({}, "j:Job", {}, {}, here)
    note = f"note: {here} has changed since this run was last started; it goes on"
    assert changed_code(before, edited).startswith(note)
    assert changed_code(edited, edited) == "", "told once"


def test_another_strategy_is_told():
    before, now = content(parallel="pp:3"), content(parallel="fsdp", reduction="bitwise")
    note = "note: this run was last started with parallel='pp:3' and goes on with 'fsdp'"
    assert changed_parallel(before, now) == note
    assert changed_parallel(before, content()).endswith("so the last bits may differ")
    assert changed_parallel(now, now) == changed_parallel({}, now) == ""


def test_a_bitwise_run_goes_on_with_its_number_of_threads_only():
    past = replace(PAST, config=content(reduction="bitwise"))
    message = refusal(past, content(reduction="bitwise", cpus_per_worker=2))
    assert "cpus_per_worker was 1 and now is 2" in message
    assert compare("/s/r", past, content(reduction="bitwise", workers=(2, 4))) == Resumed()


def test_every_difference_is_named():
    message = refusal(PAST, content(seed=1, eval_every=5))
    assert "eval_every was None and now is 5; seed was 0 and now is 1" in message


def test_arguments_that_json_cannot_hold_compare_equal_to_themselves():
    arguments = {"sizes": (1, 2), "names": {3}, "rate": float("inf")}
    assert content(arguments=arguments)["arguments"] == {
        "sizes": [1, 2],
        "names": [3],
        "rate": None,
    }
    past = replace(PAST, config=content(arguments=arguments))
    assert compare("/s/r", past, content(arguments=arguments)) == Resumed()


def test_a_finished_run_says_so_and_a_larger_number_of_steps_extends_it():
    counts = dict.fromkeys(("steps", "generations", "lost_steps"), 10)
    others = {"loss": None, "weights_sha256": "", "goodput": None, "badput": {}, "recoveries": []}
    result = {"outcome": "succeeded", **counts, **others}
    past = replace(PAST, result=result)
    assert compare("/s/r", past, content()) == AlreadyFinished(result)
    assert "finished all 10 steps" in str(AlreadyFinished(result))
    assert compare("/s/r", past, content(steps=20)) == Resumed()


def test_a_run_that_wrote_its_status_a_moment_ago_is_alive():
    alive = replace(PAST, result=None, status={"controller": CONTROLLER}, silent_s=2.0)
    assert "live run (controller pid 77 on 10.0.0.1, 2 s ago)" in refusal(alive, content())


@pytest.mark.parametrize("past", [{"silent_s": 60.0}, {"is_controller_gone": True}])
def test_a_run_without_a_result_that_is_silent_or_gone_is_resumed(past):
    assert compare("/s/r", replace(PAST, result=None, **past), content()) == Resumed()


@pytest.mark.parametrize(
    ("machine", "pid", "is_gone"),
    [
        (this_machine(), 2**22 + 1, True),
        (this_machine(), os.getpid(), False),
        ("another boot/pid:[4026531836]", 2**22 + 1, False),
        ("", 2**22 + 1, False),
    ],
    ids=["here and gone", "here and alive", "elsewhere", "nobody knows where"],
)
def test_a_process_number_says_something_on_its_own_machine_only(tmp_path, machine, pid, is_gone):
    folder = open_folder(str(tmp_path))
    write_json(folder, "config.json", content())
    controller = {"pid": pid, "node_ip": "127.0.0.1", "machine": machine}  # embedded Ray has it so
    write_json(folder, "status.json", {"controller": controller})
    past = read_past_run(folder)
    assert past is not None
    assert (past.is_controller_gone, past.is_alive) == (is_gone, not is_gone)


def test_a_run_that_came_to_nothing_does_not_use_up_its_name(tmp_path):
    """A detached run keeps its end, as nobody else would tell: the corrected command goes on."""
    folder = open_folder(str(tmp_path))
    run = RunDirectory(str(tmp_path.parent), tmp_path.name)
    run.begin(content(seed=1))
    write_json(folder, "data.json", {"plan_sha256": "of other data"})
    run.append_journal({"generation": 0})
    run.write_status({**STATUS, "generation": 0})
    run.write_result({**RESULT, "outcome": "failed", "steps": 0, "generations": 0})
    run.close()
    (tmp_path / "checkpoints/step-00000000").mkdir(parents=True)  # it was imported
    assert compare("/s/r", read_past_run(folder), content()) == Fresh()
    again = RunDirectory(str(tmp_path.parent), tmp_path.name)
    again.begin(content())
    again.write_status({**STATUS, "generation": 0})
    again.close()
    assert not folder.exists("data.json"), "the corrected run may have other data"
    status = folder.modified("status.json")
    past = read_past_run(folder, status)
    assert past is not None
    assert "live run" in refusal(past, content(seed=1)), "it waits for its first worker"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("status.json", '{"generation": 1}'),
        ("result.json", '{"outcome": "stopped", "steps": 4}'),
        ("metrics.jsonl", '{"step": 1}'),
        ("metrics.jsonl.000000000000000", '{"step": 1}'),
        ("metrics.rolledback.jsonl", '{"step": 1}'),
        ("checkpoints/step-00000004/manifest.json", "{}"),
        ("checkpoints/step-00000004.damaged/manifest.json", "{}"),
    ],
)
def test_a_run_that_has_left_something_goes_on_with_its_own_configuration(tmp_path, name, text):
    folder = open_folder(str(tmp_path))
    write_json(folder, "config.json", content(seed=1))
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    past = read_past_run(folder, now=2.0**40)
    assert past is not None
    assert "seed was 1 and now is 0" in refusal(past, content())
    assert compare("/s/r", past, content(seed=1)) == Resumed()


def test_a_past_run_is_read_from_its_directory(tmp_path):
    folder = open_folder(str(tmp_path))
    assert read_past_run(folder) is None
    write_json(folder, "config.json", content())
    assert read_past_run(folder) == PastRun(content(), None, None, float("inf"), False)
    for pid, is_gone in ((os.getpid(), False), (2**22 + 1, True)):
        status = {"controller": {"pid": pid, "node_ip": "127.0.0.1"}}
        write_json(folder, "status.json", status)
        os.utime(tmp_path / "status.json", (1000.0, 1000.0))
        past = read_past_run(folder, now=1003.0)
        assert past == PastRun(content(), status, None, 3.0, is_gone)
        assert past.is_alive != is_gone
    write_json(folder, "result.json", STOPPED)
    assert not read_past_run(folder, now=1003.0).is_alive


def test_a_resume_knows_the_newest_generation_of_status_and_journal(tmp_path):
    folder = open_folder(str(tmp_path))
    write_json(folder, "config.json", content())
    lines = ['{"generation": 4}', '{"generation": 6}', '{"data": {}}', "[1]", '{"generation": 9']
    (tmp_path / "journal.jsonl").write_text("\n".join(lines))
    assert newest_generation(folder, None) == 0
    assert newest_generation(folder, read_past_run(folder)) == 6
    write_json(folder, "status.json", {"generation": 8})
    assert newest_generation(folder, read_past_run(folder)) == 8


def test_a_look_at_a_run_in_a_bucket_does_not_read_its_history(tmp_path):
    folder = told(tmp_path)
    write_json(folder, "config.json", content())
    size = 0
    for n in range(400):
        line = encode({"generation": n, "run": f"launch {n // 100}"}) + b"\n"
        folder.write(segment_name("journal.jsonl", size), line)
        size += len(line)
    past = read_past_run(folder)
    assert folder.reads == ["config.json", "status.json", "result.json"]
    assert newest_generation(folder, past) == 399
    assert run_id_of(folder, "r") == "launch 3"
    assert len(folder.reads) == 5


ALIVE = replace(PAST, result=None, status={"controller": CONTROLLER}, silent_after_s=45.0)


def silence(after_s: Callable[[float], PastRun | None]) -> tuple[PastRun | None, float, list[str]]:
    """What is found of a run that is this after so many seconds, how long that takes, what is
    told."""
    waited_s, told = 0.0, list[str]()

    def pause(seconds: float) -> None:
        nonlocal waited_s
        waited_s += seconds

    found = await_silence(lambda: after_s(waited_s), told.append, lambda: waited_s, pause)
    return found, waited_s, told


def test_a_controller_elsewhere_that_was_killed_is_waited_for_until_it_counts_as_silent():
    found, waited_s, told = silence(lambda s: replace(ALIVE, silent_s=6.0 + s, heard_at=1.0))
    assert compare("/s/r", found, content()) == Resumed()
    assert 39.0 < waited_s < 41.0
    assert told == [
        "an earlier start of this run (controller pid 77 on 10.0.0.1) may be alive: waiting 42 s "
        "at most for a sign of it, and going on without one"
    ]


def test_a_clock_of_the_storage_that_is_ahead_makes_nobody_wait_for_longer():
    found, waited_s, _ = silence(lambda s: replace(ALIVE, silent_s=s - 600.0, heard_at=1.0))
    assert compare("/s/r", found, content()) == Resumed()
    assert 45.0 < waited_s < 47.0


def test_a_run_that_is_heard_again_is_refused_as_soon_as_it_is():
    found, waited_s, _ = silence(
        lambda s: replace(ALIVE, silent_s=(4.0 + s) % 10, heard_at=float((4.0 + s) // 10))
    )
    assert "live run" in refusal(found, content())
    assert 6.0 <= waited_s < 8.0


def test_a_live_run_of_this_machine_need_not_be_heard():
    here = {"controller": {**CONTROLLER, "machine": this_machine()}}
    found, waited_s, told = silence(lambda s: replace(ALIVE, status=here, silent_s=s, heard_at=1.0))
    assert "live run" in refusal(found, content())
    assert 3.0 <= waited_s < 5.0
    assert told == []


def test_a_live_run_on_this_disk_is_refused_without_a_line():
    here = replace(ALIVE, silent_after_s=10.0)
    found, waited_s, told = silence(lambda s: replace(here, silent_s=s % 1, heard_at=s // 1))
    assert "live run" in refusal(found, content())
    assert (waited_s, told) == (3.0, [])


@pytest.mark.parametrize("end", [{"is_controller_gone": True}, {"result": STOPPED}])
def test_the_end_of_a_run_that_seemed_alive_ends_the_wait(end):
    ended = replace(ALIVE, **end)
    assert silence(lambda s: ended if s > 1.0 else ALIVE)[0] is ended
    assert silence(lambda _: None) == (None, 0.0, [])
