"""Secrets of a run: nowhere in its directory, and a resume knows whether they are the same."""

import json
import os

import pytest

from elastic.cli.app import main
from elastic.cli.outcome import print_outcome
from elastic.driver import redaction
from elastic.driver.redaction import hidden_in, redacted
from elastic.driver.resume import PastRun, Resumed, compare, config_json, differences
from elastic.protocol.errors import WrongInput
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


def config(*, past: PastRun | None = None, **arguments) -> dict:
    settings = {"storage": STORAGE, "steps": 9}
    return config_json(settings, "m:C", {**ARGUMENTS, **arguments}, {}, past=past)


def past_run(content: dict) -> PastRun:
    return PastRun(content, None, None, 99.0, True)


def without_salt(content: dict) -> dict:
    """As it was written when the salt was the target's name."""
    found = redacted({**content, "arguments": ARGUMENTS}, f"elastic:{content['target']}")
    del found["secrets_salt"]
    return found


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(redaction, "SCRYPT", {"n": 2, "r": 1, "p": 1})


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


def test_the_same_secret_looks_different_in_each_run():
    one, other = (config()["secrets"] for _ in range(2))
    assert one.keys() == other.keys()
    assert not set(one.values()) & set(other.values()), "whoever has guessed one has them all"


@pytest.mark.parametrize(
    "early", [dict, lambda c: {**c, "secrets": {}, "arguments": ARGUMENTS}, without_salt]
)
def test_a_resume_with_the_same_secrets_goes_on_and_with_others_is_refused(early):
    past = early(config())
    run = past_run(past)
    assert compare("here", run, config(past=run)) == Resumed()
    with pytest.raises(
        WrongInput, match=r"the argument 'hf_token', a secret, is another"
    ) as caught:
        compare("here", run, config(past=run, hf_token="other"))
    assert "hunter2" not in str(caught.value)
    assert "other" not in str(caught.value).replace("another", "")
    wider = config(past=run, width=4)
    assert differences(past, wider) == [
        f"arguments was {redacted(past)['arguments']!r} and now is {wider['arguments']!r}"
    ]


ARE_SECRET = """
token HF_TOKEN hfToken hub_token HFToken apiKey APIKey api_key api_keys apikey api-key db-password
password passwords dbpassword passwd secret secrets credential credentials client_secret_2 sig key
secret_access_key accessKeys access_key_id aws_session_token wandb_api_key azure_storage_account_key
encryption_key signing_key private_key refresh_token bearer_token auth_tokens github_token token_2
X-Amz-Security-Token X-Amz-Credential oAuthToken authtoken WANDB_API_KEY
"""
ARE_NONE = """
tokenizer max_tokens num_tokens tokens keys width keyboard region text_key image_key label_key
sort_key key_name pad_token eos_token padToken token_ids num_key_value_heads monkey turkey hockey
donkey_kong design signal sigma significance secretary session account api_version access apiary
keyed_batches group_key primary_key
"""


@pytest.mark.parametrize("name", ARE_SECRET.split())
def test_a_name_tells_a_secret(name):
    assert is_secret(name)


@pytest.mark.parametrize("name", ARE_NONE.split())
def test_other_names_with_keys_and_tokens_are_none(name):
    assert not is_secret(name)


def test_all_of_a_secret_is_hidden_and_the_uris_of_every_other_argument():
    secret = {
        "token": ["hunter2", "hunter2"],
        "api_keys": "hunter2",
        "credentials": {"user": "hunter2", "pin": 7, "ids": [["hunter2"]], "cached": None},
        "data": "s3://AK:hunter2@b/x?secret_key=hunter2&region=eu",
        "more": [{"files": "s3://AK:hunter2@b/x,s3://AK:hunter2@b/y see gs://hunter2@c/z"}],
        "text_key": "caption",
        "use_auth_token": True,
        "note": "me@home, 3://4",
    }
    found = config(**secret)
    assert "hunter2" not in json.dumps(found)
    hidden = {
        "token": ["***", "***"],
        "api_keys": "***",
        "credentials": {"user": "***", "pin": "***", "ids": [["***"]], "cached": None},
        "data": "s3://***@b/x?secret_key=***&region=eu",
        "more": [{"files": "s3://***@b/x,s3://***@b/y see gs://***@c/z"}],
    }
    assert found["arguments"] == {**redacted(config())["arguments"], **secret, **hidden}
    assert set(found["secrets"]) == {*config()["secrets"], *hidden}
    assert redacted(found) == found
    others = json.loads(json.dumps(secret).replace("hunter2", "hunter3"))
    assert differences(found, config(past=past_run(found), **others)) == [
        f"the argument {name!r}, a secret, is another one now" for name in sorted(hidden)
    ]


def test_a_resume_names_both_values_of_an_argument_that_is_no_secret():
    past = config(text_key="caption")
    (told,) = differences(past, config(past=past_run(past), text_key="title"))
    assert "caption" in told
    assert "title" in told


def test_places_are_shown_without_secrets(capsys):
    assert shown_uri("/a/b?password=c") == "/a/b?password=c", "a local path is what it is"
    assert shown_uri("s3://AK:hun/ter/2@b/x") == "s3://***@b/x", "it is a secret with slashes"
    for plain in ("s3://h:9000/a@b", "http://[::1]:9000/a@b", "gs://b/x:y/a@b", "s3://b:/a@b"):
        assert shown_uri(plain) == plain
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


def test_a_secret_inside_an_argument_is_wanted_again_too():
    on_record = redacted(
        {"arguments": {**ARGUMENTS, "files": ["gs://me:hunter2@b/x"], "path": "p"}}
    )
    assert hidden_in(on_record["arguments"]) == ["clients", "files", "hf_token", "store"]
    assert hidden_in({"a": "s3://b/x?key=***"}) == ["a"]
    assert hidden_in({"a": ["s3://b/x?region=eu", "2*3", None, {"b": 1}]}) == []
