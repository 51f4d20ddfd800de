"""Files of a run are not written through symbolic links."""

import pytest

from elastic.protocol.errors import WrongInput
from elastic.store.checkpoint_files import write_part
from elastic.store.files import open_folder
from elastic.store.run_directory import LOCK, RunDirectory
from workers.worker_log import WorkerLog


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "samples.jsonl", "journal.jsonl", "metrics.rolledback.jsonl", LOCK]
)
def test_a_run_does_not_begin_where_a_file_of_it_is_a_link(tmp_path, name):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "mine")
    with pytest.raises(WrongInput, match=f"{name} is a symbolic link"):
        RunDirectory(str(tmp_path), "run")
    assert (tmp_path / "mine").read_text() == "precious"


def test_no_part_of_a_checkpoint_is_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "part").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="part"):
        write_part(open_folder(str(tmp_path)), "part", [], [])
    assert (tmp_path / "mine").read_text() == "precious"


def test_status_and_result_replace_a_link(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "status.json").symlink_to(tmp_path / "mine")
    open_folder(str(tmp_path)).write("status.json", b"{}")
    assert (tmp_path / "mine").read_text() == "precious"


class Quiet(WorkerLog):
    """Leaves the streams of this process where they are."""

    def _direct(self, fd):
        pass


def test_no_log_is_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "w1.log").symlink_to(tmp_path / "mine")
    with pytest.raises(WrongInput, match=r"w1.log is a symbolic link"):
        Quiet("w1").move_to(tmp_path)
    assert (tmp_path / "mine").read_text() == "precious"
