"""Spot notices, from metadata servers that answer as those of the clouds do."""

import json
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from elastic.config import RunConfig
from elastic.protocol.spot import SpotSource, parse_spot
from tests.metadata_server import MetadataServer
from workers.health.spot import Metadata, SpotWatch

CLOUDS = ("aws", "gcp", "azure")
PATIENCE_S = 10.0


class Heard:
    """What a watch tells."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []
        self.event = threading.Event()

    def tell(self, cloud: str, left_s: float) -> None:
        self.told.append((cloud, left_s))
        self.event.set()


def await_asked(server: MetadataServer, more: int) -> None:
    deadline, wanted = time.monotonic() + PATIENCE_S, server.num_asked + more
    while server.num_asked < wanted:
        assert time.monotonic() < deadline
        time.sleep(0.01)  # polling, bounded by the deadline


@pytest.fixture(params=CLOUDS)
def server(request):
    with MetadataServer(request.param) as found:
        yield found


def test_no_notice_is_none_and_one_is_seconds(server):
    metadata = Metadata(server.url)
    assert metadata.left_s(server.cloud) is None
    server.give_notice(90.0)
    left_s = metadata.left_s(server.cloud)
    assert left_s is not None
    if server.cloud == "gcp":  # which does not say when
        assert left_s == 30.0
    else:
        assert 85.0 < left_s <= 90.0


def test_the_cloud_is_found(server):
    assert Metadata(server.url).find() == server.cloud


def test_the_cloud_is_found_though_the_server_was_away_at_first(server, caplog):
    heard = Heard()
    server.is_away = True
    SpotWatch(SpotSource("auto", server.url), heard.tell)
    await_asked(server, 2 * len(CLOUDS))
    server.is_away = False
    server.give_notice(60.0)
    assert heard.event.wait(PATIENCE_S)
    assert [cloud for cloud, _ in heard.told] == [server.cloud]
    assert len([r for r in caplog.records if "none of aws, gcp, azure is found" in r.message]) == 1


def test_azure_is_found_before_its_events_are_turned_on():
    with MetadataServer("azure") as server:
        server.says = "not yet"
        assert Metadata(server.url).find() == "azure"


def test_a_server_of_none_is_none():
    with MetadataServer("none") as server:
        assert Metadata(server.url).find() == ""


def test_the_watch_tells_once_though_the_server_was_away(server, caplog):
    heard = Heard()
    server.is_away = True
    SpotWatch(SpotSource(server.cloud, server.url), heard.tell)
    await_asked(server, 3)
    assert not heard.event.is_set()
    server.is_away = False
    server.give_notice(60.0)
    assert heard.event.wait(PATIENCE_S)
    assert [cloud for cloud, _ in heard.told] == [server.cloud]
    trouble = [r for r in caplog.records if "does not answer" in r.message]
    assert len(trouble) == 1, "a server that is away is told once"


def test_the_watch_goes_on_though_what_it_was_told_is_garbled(server):
    heard = Heard()
    server.is_garbled = True
    SpotWatch(SpotSource(server.cloud, server.url), heard.tell)
    await_asked(server, 2)
    server.is_garbled = False
    for says in ("[]", "[" * 50_000, '{"Events": [3], "time": 3}', "\x00"):
        server.says = says
        await_asked(server, 1)
    server.give_notice(60.0)
    assert heard.event.wait(PATIENCE_S)


@pytest.mark.parametrize("says", ["[]", "[" * 50_000, '{"Events": [3], "time": 3}'])
def test_a_garbled_answer_is_of_no_cloud(says):
    with MetadataServer("aws") as server:
        server.says = says
        assert Metadata(server.url).find() == ""
        server.is_garbled = True
        assert Metadata(server.url).find() == ""


def test_an_event_of_another_machine_or_another_kind_is_no_notice():
    with MetadataServer("azure") as server:
        at = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
        events = [
            {"EventType": "Preempt", "Resources": ["another"], "NotBefore": at},
            {"EventType": "Reboot", "Resources": [server.name], "NotBefore": at},
        ]
        server.says = json.dumps({"Events": events})
        assert Metadata(server.url).left_s("azure") is None
        server.says = json.dumps(
            {"Events": [{"EventType": "Preempt", "Resources": [server.name], "NotBefore": ""}]}
        )
        assert Metadata(server.url).left_s("azure") == 0.0, "it is under way"


def test_a_token_that_is_no_longer_good_is_renewed():
    with MetadataServer("aws") as server:
        metadata = Metadata(server.url)
        assert metadata.left_s("aws") is None
        server.token = "another"
        with pytest.raises(OSError, match="401"):
            metadata.left_s("aws")
        assert metadata.left_s("aws") is None


def test_settings():
    assert parse_spot("aws") == SpotSource("aws")
    assert parse_spot("auto@http://127.0.0.1:80") == SpotSource("auto", "http://127.0.0.1:80")
    sizes = {"steps": 1, "global_batch": 1, "micro_batch": 1}
    assert RunConfig(**sizes, spot="gcp").resources.spot == "gcp"
    for text in ("", "ibm", "aws@", "aws@nowhere", "aws@http://a/b"):
        with pytest.raises(ValueError, match="choose one of aws, gcp, azure, auto"):
            RunConfig(**sizes, spot=text)
