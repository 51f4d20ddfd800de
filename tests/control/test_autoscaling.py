"""What is known of a cluster whose Ray answers otherwise than ours; without Ray."""

from types import SimpleNamespace

import pytest
import ray
from ray.core.generated import autoscaler_pb2
from ray.experimental import internal_kv

from elastic.on_ray.placement.autoscaling import Demand, can_add_gpus, infeasible, report


@pytest.fixture
def demands(monkeypatch) -> list[str]:
    """What has become of the demand for a GPU."""
    said: list[str] = []
    demand = SimpleNamespace(remote=lambda: said.append("made"))
    task = SimpleNamespace(options=lambda **_: demand)
    monkeypatch.setattr(ray, "remote", lambda _: task)
    monkeypatch.setattr(ray, "cancel", lambda _: said.append("cancelled"))
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda _: None)
    return said


def test_a_state_of_the_cluster_that_cannot_be_read_tells_nothing(demands, monkeypatch, caplog):
    gcs = SimpleNamespace(get_cluster_status=lambda: b"\xff of another version")
    monkeypatch.setattr(internal_kv, "internal_kv_get_gcs_client", lambda: gcs)
    assert can_add_gpus() is None
    assert 'gpus=unknown reason="DecodeError: ' in caplog.text
    assert demands == ["made", "cancelled"]


@pytest.mark.parametrize("answer", [b"\xff of another version", None])
def test_demands_that_cannot_be_read_are_none(answer, monkeypatch, caplog):
    gcs = SimpleNamespace(get_cluster_status=lambda: answer)
    monkeypatch.setattr(internal_kv, "internal_kv_get_gcs_client", lambda: gcs)
    assert infeasible() == ()
    assert "demand=unknown" in caplog.text


def test_demands_that_no_node_type_can_fill_are_read():
    status = autoscaler_pb2.GetClusterStatusReply()
    request = status.autoscaling_state.infeasible_resource_requests.add()
    request.resources_bundle["CPU"] = 64.0
    gcs = SimpleNamespace(get_cluster_status=status.SerializeToString)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internal_kv, "internal_kv_get_gcs_client", lambda: gcs)
        assert infeasible() == (Demand({"CPU": 64.0}),)


def test_a_ray_that_has_no_such_call_tells_nothing(demands, monkeypatch, caplog):
    monkeypatch.delattr(internal_kv, "internal_kv_get_gcs_client")
    assert can_add_gpus() is None
    assert 'gpus=unknown reason="AttributeError: ' in caplog.text
    assert demands == ["made", "cancelled"]


def test_a_head_that_is_away_tells_nothing_of_nodes_made_by_hand(monkeypatch, caplog):
    def away(key):
        raise RuntimeError("the head is away")

    monkeypatch.setattr(internal_kv, "_internal_kv_get", away)
    assert report() is None
    assert "the head is away" in caplog.text


def test_version_1_is_not_waited_for(demands, monkeypatch):
    """It says of no demand whether a kind of node could fill it; its own report tells that it is
    there."""
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda _: b"{}")
    assert can_add_gpus() is None
    assert demands == [], "no place was asked for"
