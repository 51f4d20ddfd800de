"""The one check of torch's version: private names may change with any release."""

import torch

from elastic.protocol.errors import WrongInput

WRITTEN_FOR = "2.13"


def check_version(version: str = torch.__version__) -> None:
    """Raises WrongInput unless the private names are those that this package was written for."""
    if not f"{version}.".startswith(f"{WRITTEN_FOR}."):
        raise WrongInput(
            f"sharded strategies use private parts of torch {WRITTEN_FOR}'s FSDP2, and this is "
            f"torch {version}: pip install 'torch=={WRITTEN_FOR}.*' on every node, or use "
            "parallel='ddp'"
        )
