"""A map-style dataset's length is compared among workers and with the run's beginning."""

import json
import threading
from functools import partial

import pytest

from elastic.data import parquet
from elastic.data.footers import make_plan
from elastic.data.record import open_record
from elastic.protocol.errors import WrongInput
from elastic.store.files import open_folder
from tests.data.histories import write_rows
from tests.object_store import uri
from workers.data import agreement
from workers.data.agreement import keep_comparing, watch_length
from workers.data.loader import Loader

DEADLINE_S = 120.0


class Table:
    """With the interface of a Hugging Face dataset."""

    column_names = ("x",)

    def __len__(self):
        return 21

    def __getitem__(self, key):
        return {"x": key} if isinstance(key, int) else {"x": list(range(21))[key]}

    def __getitems__(self, keys):
        return [self[k] for k in keys]


class OnTable:
    def dataset(self):
        return Table()


def test_a_hugging_face_dataset_is_map_style():
    loader = Loader(OnTable(), 3, 4, 2)
    loader.assign(0, range(2))
    loaded = loader.next(0, 0, lambda: False)
    assert (loader.num_rows, loaded.batch["x"].tolist()) == (21, loaded.rows.tolist())
    loader.close()


def test_the_first_length_stays_on_record_and_another_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    refused = []
    keep_comparing(partial(open_folder, str(tmp_path)), 21, refused.append)
    assert json.loads((tmp_path / "data.json").read_text()) == {"num_rows": 21}
    watch_length(str(tmp_path), 21, refused.append)
    with pytest.raises(WrongInput, match=r"dataset\(\) has 20 samples here, and 21 in another"):
        watch_length(str(tmp_path), 20, refused.append)
    assert refused == []


def test_of_two_workers_that_differ_at_the_same_time_one_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    refused = []
    threads = [
        threading.Thread(
            target=keep_comparing, args=(partial(open_folder, str(tmp_path)), size, refused.append)
        )
        for size in (20, 21)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(refused) == 1


def test_a_run_does_not_change_between_a_feed_and_a_dataset(tmp_path):
    plan = make_plan(parquet(write_rows(tmp_path / "set")), 3)
    (tmp_path / "data.json").write_text('{"num_rows": 21}')
    with pytest.raises(WrongInput, match="began with other data than Parquet files"):
        open_record(plan, str(tmp_path))
    (tmp_path / "data.json").write_text('{"plan_sha256": "x"}')
    with pytest.raises(WrongInput, match="the run began with data from a feed"):
        watch_length(str(tmp_path), 21, lambda _: None)


def test_a_store_that_is_away_when_a_worker_starts_is_asked_again(
    s3, s3_server, monkeypatch, capsys
):
    place = uri(s3_server.new_bucket(), "runs/a", s3.port)
    folder = open_folder(place)
    folder.write("config.json", b"{}")
    folder.write("data.json", b'{"num_rows": 21}')
    refused, has_refused = [], threading.Event()

    def refuse(error: WrongInput) -> None:
        refused.append(str(error))
        has_refused.set()

    monkeypatch.setattr(agreement, "LOOK_REMOTE_S", 0.1)
    s3.faults.is_unreachable = True
    watch_length(place, 20, refuse)
    assert refused == []
    assert 'storage is away pause_s=0.1 reason="' in capsys.readouterr().err
    s3.faults.heal()
    assert has_refused.wait(DEADLINE_S), "it goes on comparing"
    assert "has 20 samples here, and 21 in another" in refused[0]


def test_a_run_that_never_begins_is_not_looked_for_for_ever(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(agreement, "LOOK_S", 0.001)
    monkeypatch.setattr(agreement, "MAX_LOOKS", 3)
    keep_comparing(partial(open_folder, str(tmp_path)), 21, [].append)
    assert (
        f'length is not compared reason="none on record in {tmp_path}"' in capsys.readouterr().err
    )
    assert not list(tmp_path.iterdir())


def test_a_store_that_stays_away_is_not_asked_for_ever(capsys):
    asked = []

    def reach():
        asked.append(True)
        raise OSError("no such host")

    keep_comparing(reach, 20, asked.append, pauses_s=(0.0, 0.0))
    assert asked == [True] * 3
    assert 'length is not compared reason="no such host"' in capsys.readouterr().err
