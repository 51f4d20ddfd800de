"""Secrets of a run: nowhere in its directory, and a resume knows whether they are the same."""

import json
import os

import pytest

from elastic.cli import main
from elastic.outcome import print_outcome
from elastic.protocol.errors import WrongInput
from elastic.redaction import redacted
from elastic.resume import PastRun, Resumed, compare, config_json, differences
from elastic.store.files import open_folder
from elastic.store.remote import is_secret, shown_uri
from tests.cli.test_data_cli import folder, planned_ids, record  # noqa: F401, a fixture

ARGUMENTS = {
    "hf_token": "hunter2",
    "width": 3,
    "max_tokens": "9",
    "store": {"accessKey": "hunter2", "bucket": "b"},
    "clients": [{"password": "hunter2"}],
}
STORAGE = "s3://AKIA:hunter2@bucket/runs?region=eu&access_key=hunter2&endpoint_override=h:1"


def config(**arguments) -> dict:
    return config_json({"storage": STORAGE, "steps": 9}, "m:C", {**ARGUMENTS, **arguments}, {})


def test_no_secret_is_in_config_json():
    found = config()
    assert "hunter2" not in json.dumps(found)
    assert found["storage"] == "s3://***@bucket/runs?region=eu&access_key=***&endpoint_override=h:1"
    assert found["arguments"] == {
        "hf_token": "***",
        "width": 3,
        "max_tokens": "9",
        "store": {"accessKey": "***", "bucket": "b"},
        "clients": [{"password": "***"}],
    }
    assert sorted(found["secrets"]) == ["clients.0.password", "hf_token", "store.accessKey"]
    assert len(set(found["secrets"].values())) == 3, "one secret in two places looks like two"


@pytest.mark.parametrize("past", [config(), {**config(), "secrets": {}, "arguments": ARGUMENTS}])
def test_a_resume_with_the_same_secrets_goes_on_and_with_others_is_refused(past):
    run = PastRun(past, None, None, 99.0, True)
    assert compare("here", run, config()) == Resumed()
    with pytest.raises(
        WrongInput, match=r"the argument 'hf_token', a secret, is another"
    ) as caught:
        compare("here", run, config(hf_token="other"))
    assert "hunter2" not in str(caught.value)
    assert "other" not in str(caught.value).replace("another", "")
    assert differences(past, config(width=4)) == [
        f"arguments was {redacted(past)['arguments']!r} and now is {config(width=4)['arguments']!r}"
    ]


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        *((n, True) for n in ("token", "HF_TOKEN", "apiKey", "api_key", "apikey", "db-password")),
        *((n, True) for n in ("secret", "secret_access_key", "sig", "client_secret_2")),
        *((n, False) for n in ("tokenizer", "max_tokens", "keys", "width", "keyboard", "region")),
    ],
)
def test_a_name_tells_a_secret(name, is_one):
    assert is_secret(name) is is_one


def test_places_are_shown_without_secrets(capsys):
    assert shown_uri("/a/b?password=c") == "/a/b?password=c", "a local path is what it is"
    with pytest.raises(WrongInput, match=r"storage 'nowhere://\*\*\*@h/x\?token=\*\*\*'") as caught:
        open_folder("nowhere://me:hunter2@h/x?token=hunter2")
    assert "hunter2" not in str(caught.value)
    result = dict.fromkeys(("weights_sha256", "generations", "lost_steps", "steps"), 0)
    about = {"outcome": "succeeded", "loss": None, "recoveries": [], "goodput": None}
    print_outcome({**result, **about}, STORAGE, 9)
    assert "hunter2" not in capsys.readouterr().out


def test_checking_a_run_of_somebody_else_wants_trust(folder, tmp_path, capsys, monkeypatch):  # noqa: F811
    run = record(tmp_path, folder, planned_ids(folder))
    assert main(["data", "check", str(run)]) == 0
    assert "elastic: importing" in capsys.readouterr().err
    somebody_else = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody_else)
    assert main(["data", "check", str(run)]) == 2
    said = capsys.readouterr().err
    assert "give --trust" in said
    assert "importing" not in said
    assert main(["data", "check", str(run), "--trust"]) == 0


def test_checking_a_run_with_secrets_wants_them_again(folder, tmp_path, capsys):  # noqa: F811
    run = record(tmp_path, folder, planned_ids(folder))
    content = json.loads((run / "config.json").read_text())
    content["arguments"]["path"] = "***"
    (run / "config.json").write_text(json.dumps(content))
    assert main(["data", "check", str(run)]) == 2
    assert "'path' is secret and not on record: give --set path=" in capsys.readouterr().err
    assert main(["data", "check", str(run), "--set", f"path={folder}"]) == 0
