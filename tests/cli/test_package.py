"""What of TARGET's folder goes to the nodes: measured and left out as Ray itself then does it."""

import zipfile
from pathlib import Path

import pytest
from ray._private.ray_constants import get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import create_package, get_uri_for_directory

from elastic.data import parquet
from elastic.on_ray.driver.package import package_of
from elastic.on_ray.feed.actor import refuse_unshipped
from elastic.protocol.errors import WrongInput


def put(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"content")


def put_run(folder: Path) -> None:
    put(folder / "config.json", folder / "journal.jsonl", folder / "checkpoints/step-00000001/x")


@pytest.fixture
def folder(tmp_path) -> Path:
    found = tmp_path / "job"
    put(found / "job.py", found / "pq" / "0.parquet", found / "model" / "config.json")
    return found


@pytest.fixture
def shipped(tmp_path):
    """What Ray puts into the package, and the package's name."""

    def names(folder: Path, run_directory="/nowhere/runs/run") -> tuple[set[str], str]:
        made = package_of(folder, str(run_directory))
        excludes = [*get_runtime_env_default_excludes(), *made.excludes]
        target = tmp_path / "package.zip"
        target.unlink(missing_ok=True)
        create_package(str(folder), target, include_gitignore=True, excludes=excludes)
        with zipfile.ZipFile(target) as found:
            infos = [info for info in found.infolist() if not info.is_dir()]
        assert sum(info.file_size for info in infos) == made.size_bytes
        uri = get_uri_for_directory(str(folder), include_gitignore=True, excludes=excludes)
        return {info.filename for info in infos}, uri

    return names


OWN = {"job.py", "pq/0.parquet", "model/config.json"}


def test_run_directories_stay_and_the_package_keeps_its_name(folder, shipped):
    before = shipped(folder, folder / "runs" / "first")
    put_run(folder / "runs" / "first")
    put_run(folder / "runs" / "an older one")
    put(folder / "runs" / ".probe-0")
    assert shipped(folder, folder / "runs" / "first") == before
    assert before[0] == OWN


def test_a_run_directory_stays_wherever_it_is(folder, shipped):
    """Of another storage, in a folder with other files, and with what a pattern would take for
    something else."""
    put_run(folder / "deep" / "[ab]*? " / "run")
    put(folder / "deep" / "a" / "run" / "kept")
    put(folder / "deep" / "notes")
    assert shipped(folder)[0] == OWN | {"deep/a/run/kept", "deep/notes"}


def test_a_storage_with_other_files_is_shipped_without_its_runs(folder, shipped):
    put_run(folder / "pq" / "run")
    put(folder / "pq" / "second" / "journal.jsonl")
    put_run(folder / "run")
    assert shipped(folder, folder / "pq" / "second")[0] == OWN
    assert shipped(folder, folder / "run")[0] == OWN | {"pq/second/journal.jsonl"}


def test_a_run_that_begins_with_an_imported_checkpoint_stays(folder, shipped):
    put(folder / "runs" / "tuned" / "checkpoints" / "step-00000000" / "manifest.json")
    assert shipped(folder)[0] == OWN


def test_ignored_files_do_not_count_and_links_do(folder, shipped, tmp_path):
    (folder / ".gitignore").write_text("*.bin\n")
    (folder / "pq" / ".rayignore").write_text("big\n")
    put(folder / "weights.bin", folder / "pq" / "big" / "x", folder / ".venv" / "x")
    put(folder / "__pycache__" / "job.pyc", tmp_path / "store" / "1.parquet")
    (folder / "linked").symlink_to(tmp_path / "store")
    (folder / "broken").symlink_to(tmp_path / "nothing")
    assert shipped(folder)[0] == OWN | {".gitignore", "pq/.rayignore", "linked/1.parquet"}


def test_data_that_are_not_shipped_are_named_with_the_reason(folder):
    source = parquet(["pq", "raw", "/nowhere", "s3://bucket/raw"]).within(str(folder))
    with pytest.raises(WrongInput, match=r"data path 'raw' is not in the folder .* \.gitignore"):
        refuse_unshipped(source)
    put(folder / "raw" / "0.parquet")
    refuse_unshipped(source)


def test_a_link_back_to_the_folder_stays(folder, shipped):
    (folder / "model" / "back").symlink_to(folder)
    assert shipped(folder)[0] == OWN


def test_what_is_too_large_is_named(folder):
    for name, size in (("pq/1", 70), ("pq/2", 20), ("weights", 40), ("a", 2), ("b", 3)):
        with (folder / name).open("wb") as file:
            file.truncate(size * 2**20)
    storage = "s3://bucket/runs/run"
    found = package_of(folder, storage)
    assert found.is_too_large
    assert str(found) == (
        "it holds 135 MB without its runs (the largest: pq 90 MB, weights 40 MB, b 3 MB), and at "
        "most 100 MB go to the nodes"
    )
    assert "it holds more than 1" in str(package_of(folder, storage, max_counted=0))
    (folder / "weights").unlink()
    assert not package_of(folder, storage).is_too_large
