"""torch's private names are in one room, behind one check of torch's version."""

import ast
import re
from pathlib import Path

import pytest
import torch

from elastic.protocol.errors import WrongInput
from workers.parallel.fsdp2_private.version import WRITTEN_FOR, check_version

ROOT = Path(__file__).resolve().parents[2]
ROOM = ROOT / "workers/parallel/fsdp2_private"
OF_FSDP2 = (
    "_fully_shard", "_fsdp_api", "_fsdp_common", "FSDPMeshInfo", "TrainingState",
    "_get_fsdp_state", "_fsdp_param_groups", "_is_root", "_root_post_backward_final_callback",
    "_training_state", "fsdp_params", "mesh_info", "post_forward_mesh_info",
    "_all_gather_comm", "_reduce_scatter_comm", "_post_forward_indices", "_all_gather_result",
    "_wait_all_gather_streams_on_event", "_to_sharded", "reset_iter_state",
    "sharded_param", "_unsharded_param", "unsharded_accumulated_grad", "_sharded_param_data",
    "sharded_size", "padded_sharded_param_size", "contiguous_sharded_stride", "_orig_size",
    "to_sharded_dtensor", "all_gather_outputs", "_init_sharded_param",
    "_init_sharded_post_forward_param_metadata", "_setattr_on_modules",
)  # fmt: skip
OF_OPTIMIZERS = (
    "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
)  # fmt: skip
OF_DTENSOR = ("_local_tensor", "tensor_meta")


def users_of(names: tuple[str, ...]) -> dict[str, set[Path]]:
    """Which files of ours have each name as a word."""
    texts = {path: path.read_text() for path in (ROOT / "workers").rglob("*.py")}
    return {
        name: {path for path, text in texts.items() if re.search(rf"\b{name}\b", text)}
        for name in names
    }


@pytest.mark.parametrize("name", OF_FSDP2 + OF_OPTIMIZERS)
def test_a_private_name_is_used_in_its_room_only(name):
    (users,) = users_of((name,)).values()
    assert users, "nobody uses it: take it off the list"
    assert {path.parent for path in users} == {ROOM}


def test_private_names_of_a_sharded_tensor_are_in_its_room_and_in_one_file():
    """Which replicated runs import, too: it asks for DTensor's names without importing it."""
    tensors = ROOT / "workers/tensors/local.py"
    for name, users in users_of(OF_DTENSOR).items():
        assert {path for path in users if path.parent != ROOM} == {tensors}, name


def test_what_is_imported_elsewhere_from_private_torch_is_known():
    """Names for batch normalisation and half precision, which replicated runs have, too, for the
    tensors in what a module is called with, for what is done with them, and for what stands in for
    DistributedDataParallel."""
    trees = "workers/parallel/pipeline/trees.py"
    remembered = "workers/parallel/pipeline/remembered.py"
    found: set[tuple[str, str]] = set()
    for path in (ROOT / "workers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("torch"):
                continue
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            private = [name for name in names if "._" in name and path.parent != ROOM]
            found |= {(str(path.relative_to(ROOT)), name) for name in private}
    assert found == {
        *(
            (trees, f"torch.utils._pytree.tree_{what}")
            for what in ("flatten", "map_only", "unflatten")
        ),
        (remembered, "torch._ops.OpOverload"),
        (remembered, "torch.utils._python_dispatch.TorchDispatchMode"),
        ("workers/scripts/in_place/ddp.py", "torch.utils._pytree.tree_leaves"),
        ("workers/scripts/in_place/seams.py", "torch.distributed.utils._to_kwargs"),
        ("workers/step/buffers.py", "torch.nn.modules.batchnorm._NormBase"),
        ("workers/step/precision.py", "torch.distributed.utils._apply_to_tensors"),
        ("workers/step/precision.py", "torch.nn.modules.batchnorm._NormBase"),
    }


def test_another_torch_is_refused_with_what_to_install():
    check_version(torch.__version__)
    check_version(f"{WRITTEN_FOR}.1+cu130")
    for other in ("2.1.3", "2.14.0", "2.130.0"):
        with pytest.raises(WrongInput, match=r"pip install 'torch==2\.13\.\*'.*parallel='ddp'"):
            check_version(other)
