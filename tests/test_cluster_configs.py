"""The cluster files are what Ray's own checks accept, and say what the README says about them."""

import json
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

CONFIGS = Path(__file__).parent.parent / "cluster_configs"
RAY_UP = ("aws_spot.yaml", "gcp_spot.yaml")
KUBERAY = ("kuberay_cluster.yaml", "kuberay_job.yaml")
DRAIN_WINDOW_S = 30  # of `ray start --block`


def load(name: str) -> dict:
    return yaml.safe_load((CONFIGS / name).read_text())


def cluster_spec(name: str) -> dict:
    spec = load(name)["spec"]
    return spec.get("rayClusterSpec", spec)


@pytest.mark.parametrize("name", RAY_UP)
def test_ray_up_file_fulfils_rays_schema(name):
    import ray.autoscaler

    schema = Path(ray.autoscaler.__file__).parent / "ray-schema.json"
    jsonschema.validate(load(name), json.loads(schema.read_text()))


@pytest.mark.parametrize("name", RAY_UP)
def test_ray_up_file_passes_what_ray_up_checks_before_it_calls_the_cloud(name):
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(load(name)))


@pytest.mark.parametrize("name", RAY_UP)
def test_workers_are_spot_and_the_head_is_not(name):
    head, *workers = load(name)["available_node_types"].items()
    assert head[0] == load(name)["head_node_type"]
    assert not re.search("spot|preemptible", json.dumps(head[1]))
    assert all(re.search('"spot"|"preemptible": true', json.dumps(w[1])) for w in workers)


@pytest.mark.parametrize("name", RAY_UP)
def test_the_head_of_a_ray_up_file_has_no_slots(name):
    config = load(name)
    assert config["available_node_types"][config["head_node_type"]]["resources"] == {"CPU": 0}
    assert all(
        "--num-cpus=0" in command
        for command in config["head_start_ray_commands"]
        if "ray start" in command
    )


@pytest.mark.parametrize("name", KUBERAY)
def test_the_head_of_a_kuberay_file_has_no_slots(name):
    assert cluster_spec(name)["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


@pytest.mark.parametrize("name", KUBERAY)
def test_pods_get_longer_than_rays_drain_window(name):
    spec = cluster_spec(name)
    templates = [g["template"] for g in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    graces = [t["spec"]["terminationGracePeriodSeconds"] for t in templates]
    assert min(graces) > DRAIN_WINDOW_S


@pytest.mark.parametrize("name", KUBERAY)
def test_worker_groups_can_grow(name):
    spec = cluster_spec(name)
    assert spec["enableInTreeAutoscaling"] is True
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] < group["maxReplicas"]


def test_job_entrypoint_fits_its_cluster():
    job = load("kuberay_job.yaml")
    (group,) = cluster_spec("kuberay_job.yaml")["workerGroupSpecs"]
    assert f"--workers {group['minReplicas']}..{group['maxReplicas']} " in job["spec"]["entrypoint"]


def test_every_file_is_in_the_readme():
    text = (CONFIGS / "README.md").read_text()
    assert [f.name for f in CONFIGS.iterdir() if f.name not in text and f.name != "README.md"] == []


def test_local_script_says_how_to_use_it():
    done = subprocess.run(
        [CONFIGS / "local.sh"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "local.sh join HEAD_IP:6379" in done.stderr
