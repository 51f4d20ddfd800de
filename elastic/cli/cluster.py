"""`elastic cluster init`: a cluster's file for `ray up` or KubeRay, from a few answers.

The files' texts are in clusters/; what the settings mean is in cluster_configs/README.md.
"""

import importlib.metadata
import re
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from elastic.cli.run_options import parse_workers
from elastic.protocol.errors import WrongInput
from elastic.protocol.membership import counted
from elastic.store.files import first_line

VALUE = re.compile(r"[\w.:/@,+-]+", re.ASCII)
"""What an answer may hold: nothing that means something in YAML or to a shell."""
OPEN = "set-your-"
"""So begins what nobody has answered and a file cannot do without."""
PLACE = re.compile(r"<<(\w+)>>")

app = typer.Typer(help="Files for clusters in the cloud.", no_args_is_help=True)


CPUS, GPUS = 8, 1
"""Of each worker where nobody says, on every kind of cluster; the usual machines have them."""


@dataclass(frozen=True, slots=True)
class Usual:
    """Of one kind of cluster: its file, and the answers of whoever gives none."""

    file: str
    region: str
    zone: str
    machine: str
    """With CPUS and GPUS; empty where pods ask for both, and nodes are somebody else's."""
    machine_without_gpus: str
    profile: str
    project: str = ""
    has_none_of: dict[str, str] = field(default_factory=dict[str, str])
    """Answers that its file has no place for, and why."""

    def machine_for(self, num_gpus: int) -> str:
        return self.machine if num_gpus else self.machine_without_gpus

    def gpus_of(self, machine: str) -> int | None:
        """None for a machine that nobody here knows, and where there are none to choose from."""
        return {self.machine: GPUS, self.machine_without_gpus: 0}.get(machine) if machine else None


KINDS = {
    "aws": Usual(
        "aws_spot.yaml",
        "us-west-2",
        "us-west-2a,us-west-2b,us-west-2c",
        machine="g5.2xlarge",
        machine_without_gpus="m5.2xlarge",
        profile="set-your-worker-profile",
        has_none_of={"project": "an account is chosen by its credentials"},
    ),
    "gcp": Usual(
        "gcp_spot.yaml",
        "us-central1",
        "us-central1-a",
        machine="g2-standard-8",
        machine_without_gpus="c3-standard-8",
        profile="set-your-service-account",
        project="set-your-project-id",
    ),
    "azure": Usual(
        "azure_spot.yaml",
        "westus2",
        "auto",
        machine="Standard_NC8as_T4_v3",
        machine_without_gpus="Standard_D8s_v5",
        profile="",
        project="set-your-resource-group",
        has_none_of={"profile": "Ray gives all its machines there one identity"},
    ),
    "kuberay": Usual(
        "kuberay_cluster.yaml",
        "",
        "",
        machine="",
        machine_without_gpus="",
        profile="set-your-service-account",
        has_none_of=dict.fromkeys(
            ("machine", "region", "zone", "project"), "pods go where Kubernetes has a node"
        ),
    ),
}
CHECKOUT = """# From the root of a checkout: the nodes get it, and install it.
file_mounts:
  "~/elastic-ray-trainer": "."
rsync_exclude: [".venv", ".git", "**/__pycache__"]

setup_commands:
  - pip install --constraint ~/elastic-ray-trainer/constraints.txt ~/elastic-ray-trainer
"""
IN_IMAGE = """# The image has the project: cluster_configs/Dockerfile makes one.
setup_commands: []
"""
STAYS = """
        - onHostMaintenance: TERMINATE  # GCP does not move machines with GPUs"""
REDIS = """  gcsFaultToleranceOptions:  # another head knows what the one before it knew
    redisAddress: <<redis>>
"""
"""KubeRay itself keeps clusters on one Redis apart, by their uid. `ray up` does not."""


@app.command("init")
def init(
    kind: Annotated[str, typer.Argument(metavar="aws|gcp|azure|kuberay", help="Which cloud.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write it.")] = None,
    name: Annotated[str, typer.Option(help="The cluster's name.")] = "elastic",
    workers: Annotated[str, typer.Option(help="Worker machines, MIN..MAX.")] = "2..8",
    machine: Annotated[
        str | None,
        typer.Option(help="The workers' kind of machine, with its --cpus and --gpus."),
    ] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help=f"CPUs of each; default: {CPUS}.")] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=0, help=f"GPUs of each; default: {GPUS}. 0: machines without GPUs."),
    ] = None,
    region: Annotated[str | None, typer.Option(help="The cloud's region or location.")] = None,
    zone: Annotated[str | None, typer.Option(help="Availability zones, by commas.")] = None,
    project: Annotated[
        str | None, typer.Option(help="GCP: the project's id. Azure: the resource group.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="The workers' own rights: an instance profile or a service account."),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(help="Container image that has elastic; default: Ray's, and a checkout."),
    ] = None,
    redis: Annotated[
        str | None, typer.Option(help="HOST:PORT of a Redis that outlives the head.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE.")] = False,
) -> int:
    """Write a cluster's file: an on-demand head without slots, and spot workers."""
    usual = KINDS.get(kind)
    if usual is None:
        raise WrongInput(f"{kind!r} is no kind of cluster: choose from {', '.join(KINDS)}")
    bounds = parse_workers(workers)
    low, high = (bounds, bounds) if isinstance(bounds, int) else bounds
    if not 0 <= low <= high or high < 1:
        raise WrongInput(f"--workers {workers!r}: give MIN..MAX, such as 2..8")
    given = {"machine": machine, "region": region, "zone": zone, "project": project}
    for asked, value in (*given.items(), ("profile", profile)):
        if value and (why := usual.has_none_of.get(asked)):
            raise WrongInput(f"--{asked} says nothing on {kind}: {why}; leave it out")
    sizes = sizes_of(usual, machine, cpus, gpus)
    answers = {
        "name": name,
        "low": str(low),
        "high": str(high),
        "machine": machine or usual.machine_for(sizes.gpus),
        "cpus": str(sizes.cpus),
        "region": region or usual.region,
        "zone": zone or (usual.zone if region is None else zone_in(kind, region)),
        "project": project or usual.project,
        "profile": profile or usual.profile,
    }
    for asked, value in (*answers.items(), ("image", image), ("redis", redis)):
        if value and not VALUE.fullmatch(value):
            raise WrongInput(f"--{asked} {value!r}: give letters, digits and . : / @ , + - only")
    path = out or Path(usual.file)
    text = made(kind, answers, sizes.gpus, image, redis)
    write(path, text, force=force)
    how = "kubectl apply -f" if kind == "kuberay" else "ray up"
    replace = f", replace what begins with {OPEN}" if OPEN in text else ""
    print(f"{path} is written; read it{replace}, and then: {how} {path}")
    return 0


class Sizes(NamedTuple):
    """Of each worker."""

    cpus: int
    gpus: int


def sizes_of(usual: Usual, machine: str | None, cpus: int | None, gpus: int | None) -> Sizes:
    """What a node is said to have, Ray believes: WrongInput for what its machine may not have."""
    if machine is not None and machine != usual.machine and None in (cpus, gpus):
        raise WrongInput(
            f"--machine {machine!r}: say what it has, --cpus and --gpus (0 for none), or Ray waits "
            "for what no machine brings"
        )
    sizes = Sizes(cpus or CPUS, GPUS if gpus is None else gpus)
    usually = machine or usual.machine_for(sizes.gpus)
    has = usual.gpus_of(usually)
    if has is not None and (sizes.cpus > CPUS or sizes.gpus > has):
        raise WrongInput(
            f"{usually} has {CPUS} CPUs and {counted(has, 'GPU')}, fewer than you ask for: "
            "name another --machine that has them"
        )
    return sizes


def zone_in(kind: str, region: str) -> str:
    """Where the usual machines are in a region: of most there, this is one."""
    return {"aws": f"{region}a,{region}b", "gcp": f"{region}-a", "azure": "auto"}.get(kind, "")


def made(
    kind: str, answers: dict[str, str], num_gpus: int, image: str | None, redis: str | None
) -> str:
    """The file's text. Raises KeyError for a place that nobody fills."""
    ray = importlib.metadata.version("ray")
    system = "set-your-gpu-image-family" if num_gpus else "common-cpu"
    values = {**answers, "ray": ray, "system": system, "redis": "", "gpus": "", "stays": ""}
    if kind == "kuberay":
        values["image"] = image or "elastic-ray-trainer:latest"
        if num_gpus:
            values["gpus"] = f', nvidia.com/gpu: "{num_gpus}"'
        if redis:
            values["redis"] = REDIS.replace("<<redis>>", redis)
    else:
        values["image"] = image or f"rayproject/ray:{ray}-py311{'-gpu' if num_gpus else ''}"
        values["install"] = IN_IMAGE if image else CHECKOUT
        if num_gpus:
            values["gpus"] = f', "GPU": {num_gpus}'
            values["stays"] = STAYS
        if redis:
            values["redis"] = (
                f"RAY_REDIS_ADDRESS={redis} RAY_external_storage_namespace={answers['name']} "
            )
    text = (files("elastic.cli") / "clusters" / f"{kind}.yaml").read_text()
    return PLACE.sub(lambda found: values[found[1]], text)


def write(path: Path, text: str, *, force: bool) -> None:
    if path.exists() and not force:
        raise WrongInput(f"{path} is there already: give another --out, or --force to replace it")
    try:
        path.write_text(text)
    except OSError as error:
        raise WrongInput(f"{path} cannot be written: {first_line(error)}") from error
