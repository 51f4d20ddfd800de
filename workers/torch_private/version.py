"""The one check of torch's version: private names may change, or change their meaning, with any
release."""

import torch

from elastic.protocol.errors import WrongInput

TESTED = "2.13"
"""All of our tests run with this release, and with no other."""


def untested(version: str = torch.__version__) -> str:
    """Why this torch's private parts are not trusted, and what to install; empty: they are."""
    if f"{version}.".startswith(f"{TESTED}."):
        return ""
    return (
        f"this is torch {version}, and private parts of torch {TESTED} are used: "
        f"pip install 'torch=={TESTED}.*' on every node"
    )


def check_version(what: str, version: str = torch.__version__) -> None:
    """Raises WrongInput for an untested torch. what: that depends on its private parts too much to
    be tried with others."""
    if why := untested(version):
        raise WrongInput(f"{what}: {why}, or use parallel='ddp'")
