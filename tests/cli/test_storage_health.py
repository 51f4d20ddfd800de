"""What a run says about storage that refuses: before it begins, while it lasts, and at the end."""

import errno
import os
import socket
from pathlib import Path

import pytest

import elastic
from elastic.cli.app import main
from elastic.controller.storage_health import StorageTrouble
from elastic.driver import launch
from elastic.store.files import leave_probe, place_of, remove_probe, sees_probe
from elastic.store.remote import unknown_host


def test_a_run_without_trouble_says_nothing():
    trouble = StorageTrouble()
    trouble.hear_published(20)
    assert (trouble.now, trouble.summary(20, "")) == ("", "")


def test_a_failed_save_is_told_until_the_next_one_and_counted_at_the_end():
    trouble = StorageTrouble()
    trouble.hear_published(20)
    trouble.hear_save(40, "disk full")
    trouble.hear_save(40, "said by another rank")
    trouble.hear_published(60, "the manifest was refused")
    assert trouble.now == "the save of step 60 failed: the manifest was refused"
    trouble.hear_published(80)
    assert trouble.now == ""
    assert trouble.summary(80, "") == (
        "2 of 4 saves failed, the last at step 60: the manifest was refused; "
        "the newest checkpoint is of step 80"
    )


def test_a_save_that_works_at_the_second_try_has_not_failed():
    trouble = StorageTrouble()
    trouble.hear_save(40, "away")
    trouble.hear_published(40)
    assert (trouble.now, trouble.summary(40, "")) == ("", "")


def test_files_that_wait_are_told_with_the_place_where_they_are():
    trouble = StorageTrouble()
    assert trouble.hear_upload("away")
    assert not trouble.hear_upload("away")
    assert trouble.now == "files wait for storage: away"
    assert trouble.summary(None, "/spool") == (
        "some files of the run may be incomplete in storage: away; they are in /spool on the "
        "controller's node"
    )
    assert trouble.hear_upload("")
    assert (trouble.now, trouble.summary(None, "/spool")) == ("", "")


def test_damage_that_was_found_is_told_at_the_end():
    trouble = StorageTrouble()
    trouble.hear_damaged(120, "part 1: bytes 0..9 are not what was written")
    assert trouble.summary(120, "") == (
        "the checkpoint of step 120 was damaged and kept aside, an earlier one used: part 1: "
        "bytes 0..9 are not what was written"
    )


def test_steps_without_lines_are_told_at_the_end():
    trouble = StorageTrouble()
    trouble.hear_missing(4, 5)
    assert trouble.summary(5, "") == (
        "steps 4 to 5 have no lines in metrics.jsonl and samples.jsonl: they were not on record "
        "when the run went on from a state of step 5"
    )


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket whose server is away."""
    monkeypatch.setattr(launch, "AWAY_PAUSES_S", (0.0,))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return "s3://bucket/runs?endpoint_override=127.0.0.1:9&scheme=http&region=us-east-1"


SIZES = {"steps": 10, "global_batch": 32, "micro_batch": 8}


def test_storage_that_is_away_before_a_run_fails_it_after_a_while(away, capsys):
    from workers.workloads.digits import Digits

    with pytest.raises(elastic.RunFailed, match=r"does not answer.* start the same run") as caught:
        elastic.run(Digits(), **SIZES, storage=away, name="r")
    assert (caught.value.result.outcome, caught.value.result.steps) == ("failed", 0)
    assert capsys.readouterr().err.count("does not answer") == 1


def test_the_command_says_so_in_a_line(away, capsys):
    sizes = [x for name, n in SIZES.items() for x in (f"--{name.replace('_', '-')}", str(n))]
    arguments = ["workers.workloads.digits:Digits", *sizes, "--storage", away, "--name", "r"]
    assert main(["run", *arguments]) == 1
    told, failed = capsys.readouterr().err.splitlines()
    assert told.startswith(f"elastic: storage {away!r} does not answer: ")
    assert failed.startswith(f"elastic: the run failed: storage {away!r} does not answer: ")


def test_a_host_without_an_address_is_wrong_input_at_once(away, capsys, monkeypatch):
    monkeypatch.setattr(launch, "AWAY_PAUSES_S", (600.0,))
    place = away.replace("127.0.0.1:9", "no-such-host.invalid")
    sizes = [x for name, n in SIZES.items() for x in (f"--{name.replace('_', '-')}", str(n))]
    arguments = ["workers.workloads.digits:Digits", *sizes, "--storage", place, "--name", "r"]
    assert main(["run", *arguments]) == 2
    assert capsys.readouterr().err == (
        f"elastic: storage {place!r} cannot be used: there is no host 'no-such-host.invalid'; mend "
        "its name, or the name service of this machine\n"
    )


def test_a_name_service_that_does_not_answer_is_waited_for(monkeypatch):
    error = OSError("curlCode: 6, Could not resolve hostname; Details: Could not resolve host: h.x")
    for number, host in ((socket.EAI_AGAIN, ""), (socket.EAI_NONAME, "h.x")):

        def refuse(*_: object, number: int = number) -> None:
            raise socket.gaierror(number, "no")

        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        assert unknown_host(error) == host
        assert unknown_host(OSError("connection refused")) == ""


def test_the_name_of_a_place_is_known_while_its_store_is_away():
    bucket = "s3://no-region-in-this-uri/runs"
    assert place_of(bucket, "r") == f"{bucket}/r"
    assert place_of("file:///tmp/runs", "r") == "/tmp/runs/r"


def test_a_probe_that_cannot_be_read_now_is_not_taken_for_another_folder(tmp_path: Path):
    probe = leave_probe(str(tmp_path))
    assert sees_probe(probe)
    os.rename(tmp_path / probe.name, tmp_path / "kept")
    assert not sees_probe(probe)
    (tmp_path / probe.name).symlink_to(probe.name)  # a loop: neither missing nor forbidden
    with pytest.raises(OSError, match=r"symbolic") as caught:
        sees_probe(probe)
    assert caught.value.errno == errno.ELOOP
    os.rename(tmp_path / probe.name, tmp_path / "loop")
    remove_probe(probe)
