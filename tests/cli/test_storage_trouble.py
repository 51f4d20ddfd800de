"""What a run says about storage that refused: while it lasts, and at the end."""

from elastic.storage_trouble import StorageTrouble


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
