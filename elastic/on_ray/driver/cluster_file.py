# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""From a cluster's file to the address of its job server.

What is asked there is job_server.py's.
"""

import logging
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, cast

import yaml

from elastic.on_ray.driver.job_server import PORT
from elastic.protocol.errors import WrongInput
from elastic.store.files import first_line, first_line_of_yaml


def address_in(file: Path) -> str:
    """Where the head of the cluster is that `ray up FILE` has made. WrongInput if the file is of
    another kind, or there is no such cluster."""
    try:
        content: object = yaml.safe_load(file.read_text().partition("\n---")[0])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise WrongInput(f"--cluster {file} cannot be read: {first_line_of_yaml(error)}") from error
    found = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    if found.get("kind") in ("RayCluster", "RayJob", "RayService"):
        raise WrongInput(
            f"--cluster {file} is Kubernetes': forward the head's port, "
            f"`kubectl port-forward service/{name_in(found)}-head-svc {PORT}`, and give "
            f"--cluster http://127.0.0.1:{PORT}"
        )
    if not {"cluster_name", "provider"} <= found.keys():
        raise WrongInput(f"--cluster {file} is no cluster file of Ray: it has no provider")
    return f"http://{head_of(file)}:{PORT}"


def name_in(manifest: dict[str, Any]) -> str:
    metadata = manifest.get("metadata")
    name = cast("dict[str, Any]", metadata).get("name") if isinstance(metadata, dict) else None
    return str(name or "NAME")


def head_of(file: Path) -> str:
    """Its address, from the cloud."""
    from ray.autoscaler.sdk import get_head_node_ip

    said = StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(said), redirect_stderr(said):  # Ray prints pages about a file
            return get_head_node_ip(str(file))
    except (Exception, SystemExit) as error:
        raise WrongInput(
            f"--cluster {file}: the head of that cluster is not found: "
            f"{first_line(error)}; is it up (`ray up {file}`), and are this machine's "
            "credentials those of its cloud?"
        ) from error
    finally:
        logging.disable(logging.NOTSET)
