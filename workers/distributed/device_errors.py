"""What torch's errors of a device say of it."""

import torch

CUDA_ERROR_MEMORY = 2
"""An allocation that was refused, as outside of torch's own allocator; the GPU goes on."""


def is_gone(error: BaseException) -> bool:
    """Nothing in this process can use the device any more, whoever is to blame."""
    return isinstance(error, torch.AcceleratorError) and not is_memory(error)


def is_memory(error: BaseException) -> bool:
    is_devices = isinstance(error, torch.AcceleratorError)
    return is_devices and getattr(error, "error_code", None) == CUDA_ERROR_MEMORY
