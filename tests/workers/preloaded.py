"""Imported by the server that ranks are forked from: what it has by then is no garbage.

Else it would look for some in the meantime, and the first collection of each of its children would
look at all of it, and copy its pages.
"""

import contextlib
import gc
import importlib
import os

# What asks whether there is a GPU asks its driver's library then, and CUDA works in the children.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
gc.disable()
for name in (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.profiler._cupti_monitor", "pytest"),
    *("workers.worker", "workers.backup.server", "workers.parallel.hsdp"),
    *("workers.parallel.fsdp_grad_op", "workers.parallel.pipeline.strategy"),
    *("tests.workers.sharded_rig", "tests.workers.pipeline_models", "tests.device.build"),
    *("tests.scripts.ray_alone", "tests.scripts.local_run"),
):
    with contextlib.suppress(ImportError):  # whoever needs it will be told
        importlib.import_module(name)
gc.collect()
gc.freeze()
gc.enable()
