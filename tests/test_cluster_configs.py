"""The cluster files are what Ray's own checks accept, and say what the README says about them."""

import json
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from elastic.cli.app import main
from elastic.cli.cluster import KINDS

CONFIGS = Path(__file__).parent.parent / "cluster_configs"
RAY_UP = ("aws_spot.yaml", "azure_spot.yaml", "gcp_spot.yaml")
KUBERAY = ("kuberay_cluster.yaml", "kuberay_job.yaml")
DRAIN_WINDOW_S = 30  # of `ray start --block`


def load(name: str) -> dict:
    return yaml.safe_load((CONFIGS / name).read_text())


def cluster_spec(name: str) -> dict:
    spec = load(name)["spec"]
    return spec.get("rayClusterSpec", spec)


def ray_schema() -> dict:
    import ray.autoscaler

    return json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())


@pytest.mark.parametrize("name", RAY_UP)
def test_ray_up_file_fulfils_rays_schema(name):
    jsonschema.validate(load(name), ray_schema())


@pytest.mark.parametrize("name", RAY_UP)
def test_ray_up_file_passes_what_ray_up_checks_before_it_calls_the_cloud(name):
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(load(name)))


@pytest.mark.parametrize("name", RAY_UP)
def test_workers_are_spot_and_the_head_is_not(name):
    head, *workers = load(name)["available_node_types"].items()
    assert head[0] == load(name)["head_node_type"]
    is_spot = re.compile('"MarketType": "spot"|"preemptible": true|"priority": "Spot"')
    assert not is_spot.search(json.dumps(head[1]))
    assert all(is_spot.search(json.dumps(w[1])) for w in workers)


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


FIELDS = {
    "aws": ({"region", "availability_zone"}, {"InstanceType", "BlockDeviceMappings"}),
    "gcp": ({"region", "availability_zone", "project_id"}, {"machineType", "disks"}),
    "azure": ({"location", "resource_group"}, {"azure_arm_parameters"}),
}
"""Of each provider, and of its nodes: what it needs and has no default for."""


@pytest.mark.parametrize("name", RAY_UP)
def test_a_ray_up_file_has_what_its_provider_needs(name):
    config = load(name)
    of_provider, of_nodes = FIELDS[config["provider"]["type"]]
    assert of_provider <= config["provider"].keys()
    for kind in config["available_node_types"].values():
        assert of_nodes <= kind["node_config"].keys()
        image = kind["node_config"].get("azure_arm_parameters", {})
        assert not image or {"vmSize", "imagePublisher", "imageOffer", "imageSku"} <= image.keys()


# --- KubeRay: what its custom resources may hold --------------------------------------------
POD = {"type": "object", "required": ["spec"]}
GROUP = {
    "type": "object",
    "required": ["rayStartParams", "template"],
    "properties": {
        "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
        "template": POD,
    },
}
WORKERS = {
    **GROUP,
    "required": [*GROUP["required"], "groupName", "minReplicas", "maxReplicas"],
    "additionalProperties": False,
    "properties": {
        **GROUP["properties"],
        "groupName": {"type": "string"},
        **{k: {"type": "integer"} for k in ("replicas", "minReplicas", "maxReplicas")},
        "idleTimeoutSeconds": {"type": "integer"},
        "labels": {"type": "object"},
        "resources": {"type": "object"},
        "suspend": {"type": "boolean"},
    },
}
CLUSTER = {
    "type": "object",
    "required": ["headGroupSpec"],
    "additionalProperties": False,
    "properties": {
        "rayVersion": {"type": "string"},
        "enableInTreeAutoscaling": {"type": "boolean"},
        "autoscalerOptions": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "version": {"enum": ["v1", "v2"]},
                "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
                "idleTimeoutSeconds": {"type": "integer"},
            },
        },
        "gcsFaultToleranceOptions": {
            "type": "object",
            "required": ["redisAddress"],
            "additionalProperties": False,
            "properties": {
                "redisAddress": {"type": "string"},
                "externalStorageNamespace": {"type": "string"},
            },
        },
        "headGroupSpec": GROUP,
        "workerGroupSpecs": {"type": "array", "items": WORKERS},
    },
}
"""Written by us after KubeRay's reference, of the fields that our files use: its own CRDs are not
in this repository."""


JOB = {
    "type": "object",
    "required": ["entrypoint", "rayClusterSpec"],
    "additionalProperties": False,
    "properties": {
        "entrypoint": {"type": "string"},
        "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        "shutdownAfterJobFinishes": {"type": "boolean"},
        "ttlSecondsAfterFinished": {"type": "integer", "minimum": 0},
        "rayClusterSpec": CLUSTER,
    },
}
"""As above, of a RayJob's own spec."""


def test_a_kuberay_job_has_fields_of_a_job_only():
    jsonschema.validate(load("kuberay_job.yaml")["spec"], JOB)


@pytest.mark.parametrize("name", RAY_UP)
def test_spot_workers_have_the_label_that_runs_can_ask_for(name):
    config = load(name)
    head, spot = (config["available_node_types"][k] for k in (config["head_node_type"], "spot"))
    assert (head.get("labels"), spot["labels"]) == (None, {"ray.io/market-type": "spot"})


@pytest.mark.parametrize("name", KUBERAY)
def test_spot_pods_have_it_too_and_tolerate_spot_nodes(name):
    for group in cluster_spec(name)["workerGroupSpecs"]:
        (container,), pod = group["template"]["spec"]["containers"], group["template"]["spec"]
        assert {"name": "RAY_NODE_MARKET_TYPE", "value": "spot"} in container["env"]
        assert len(pod["tolerations"]) >= 3
        assert pod["restartPolicy"] == "Never"


@pytest.mark.parametrize("name", KUBERAY)
def test_a_kuberay_file_has_fields_of_its_kind_only(name):
    jsonschema.validate(cluster_spec(name), CLUSTER)
    assert load(name)["apiVersion"] == "ray.io/v1"
    assert load(name)["kind"] == ("RayJob" if "job" in name else "RayCluster")


# --- elastic cluster init -------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_the_files_here_are_those_that_cluster_init_writes(kind, tmp_path):
    out = tmp_path / "made.yaml"
    assert main(["cluster", "init", kind, "--out", str(out)]) == 0
    assert out.read_text() == (CONFIGS / KINDS[kind].file).read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_in_the_file(kind, tmp_path, capsys):
    out = tmp_path / "made.yaml"
    answers = ["--name", "mine", "--workers", "0..3", "--cpus", "6", "--gpus", "2"]
    answers += ["--redis", "store:6379", "--image", "registry/mine:1"]
    of_kind = {"machine": "large", "profile": "writers"}
    of_kind = {k: v for k, v in of_kind.items() if k not in KINDS[kind].has_none_of}
    answers += [word for k, v in of_kind.items() for word in (f"--{k}", v)]
    assert main(["cluster", "init", kind, "--out", str(out), *answers]) == 0
    text = out.read_text()
    assert "<<" not in text
    assert ("set-your-" in text) == ("what begins with set-your-" in capsys.readouterr().out)
    for answer in ("mine", "registry/mine:1", "store:6379", *of_kind.values()):
        assert answer in text, answer
    config = yaml.safe_load(text)
    if kind == "kuberay":
        jsonschema.validate(config["spec"], CLUSTER)
        (group,) = config["spec"]["workerGroupSpecs"]
        assert (group["minReplicas"], group["maxReplicas"]) == (0, 3)
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert (limits["cpu"], limits["nvidia.com/gpu"]) == ("6", "2")
        return
    jsonschema.validate(config, ray_schema())
    spot = config["available_node_types"]["spot"]
    assert spot["resources"] == {"CPU": 6, "GPU": 2}
    assert (spot["min_workers"], spot["max_workers"], config["max_workers"]) == (0, 3, 3)
    start = config["head_start_ray_commands"][-1]
    kept = "RAY_REDIS_ADDRESS=store:6379 RAY_external_storage_namespace=mine ray start --head"
    assert kept in start, "two clusters on one Redis are two"
    assert config["setup_commands"] == []
    assert "file_mounts" not in config


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_offer_the_same_worker_with_a_gpu_and_without(kind, tmp_path):
    def made(*words: str) -> str:
        out = tmp_path / "made.yaml"
        assert main(["cluster", "init", kind, "--out", str(out), "--force", *words]) == 0
        return out.read_text()

    with_gpu, without = made(), made("--gpus", "0")
    assert "set-your-gpu" not in without
    machines = KINDS[kind].machine, KINDS[kind].machine_without_gpus
    assert (machines[0] in with_gpu, machines[1] in without) == (True, True)
    if kind == "kuberay":
        assert ('cpu: "8"' in with_gpu, 'cpu: "8"' in without) == (True, True)
        assert ('nvidia.com/gpu: "1"' in with_gpu, "nvidia.com/gpu:" in without) == (True, False)
        return
    found = [yaml.safe_load(t)["available_node_types"]["spot"] for t in (with_gpu, without)]
    assert [w["resources"] for w in found] == [{"CPU": 8, "GPU": 1}, {"CPU": 8}]
    stays = ['"onHostMaintenance": "TERMINATE"' in json.dumps(w) for w in found]
    assert stays == [kind == "gcp", False]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kuberay", "--machine", "n1"], "--machine says nothing on kuberay: pods go where"),
        (["azure", "--profile", "a"], "--profile says nothing on azure: Ray gives all its"),
        (["aws", "--project", "a"], "--project says nothing on aws: an account is chosen by"),
        (["gcp", "--machine", "n1-standard-8", "--cpus", "8"], "--machine 'n1-standard-8': say "),
        (["gcp", "--gpus", "2"], "g2-standard-8 has 8 CPUs and 1 GPU, fewer than you ask for"),
        (["aws", "--cpus", "16"], "g5.2xlarge has 8 CPUs and 1 GPU, fewer than you ask for"),
        (["aws", "--cpus", "16", "--gpus", "0"], "m5.2xlarge has 8 CPUs and 0 GPUs, fewer than"),
        (
            ["gcp", "--machine", "c3-standard-8", "--cpus", "8", "--gpus", "1"],
            "c3-standard-8 has 8 CPUs and 0 GPUs, fewer than you ask for",
        ),
        (["ibm"], "'ibm' is no kind of cluster: choose from aws, gcp, azure, kuberay"),
        (["aws", "--workers", "3..2"], "--workers '3..2': give MIN..MAX"),
        (["aws", "--workers", "x"], "--workers 'x': give a number or MIN..MAX"),
        (["aws", "--name", "a: b"], "--name 'a: b': give letters, digits and"),
        (["aws", "--image", "a\nb"], "give letters, digits and"),
        (["aws", "--out", "/nowhere/at/all"], "/nowhere/at/all cannot be written: "),
        (["aws", "--out", "there"], "there is there already: give another --out, or --force"),
    ],
)
def test_an_answer_that_is_none_is_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("kept")
    assert main(["cluster", "init", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert (tmp_path / "there").read_text() == "kept"


def test_the_dashboard_shows_every_meter_and_no_other():
    from elastic.on_ray.meters import METERS

    board = json.loads((CONFIGS / "grafana.json").read_text())
    expressions = " ".join(t["expr"] for panel in board["panels"] for t in panel["targets"])
    assert set(re.findall(r"ray_elastic_(\w+)", expressions)) == set(METERS)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_every_file_is_in_the_readme():
    text = (CONFIGS / "README.md").read_text()
    assert [f.name for f in CONFIGS.iterdir() if f.name not in text and f.name != "README.md"] == []


def test_local_script_says_how_to_use_it():
    done = subprocess.run(
        [CONFIGS / "local.sh"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "local.sh join HEAD_IP:6379" in done.stderr
