"""A worker's GPU: whether torch can use it, how it is set up, what it is called, how it fails.

What NCCL is told is elastic/protocol/nccl_settings.py's.
"""

import fcntl
import os
import socket
import struct
from contextlib import suppress

import torch

from elastic.protocol import nccl_settings
from elastic.protocol.errors import UnfitNode, WrongInput
from elastic.protocol.worker_spec import WorkerSpec
from elastic.store.files import first_line
from workers.distributed.device_errors import is_memory
from workers.health.nvml import nvml

SIOCGIFADDR = 0x8915
"""Linux: the address of an interface."""
CUDA_ERROR_ASSERT = 710
"""An assertion in a kernel, as of an index that is out of range: the program's own."""


def prepare(spec: WorkerSpec) -> torch.device:
    """The device of this worker, before anything is on it. Raises UnfitNode and WrongInput."""
    if spec.device != "cuda":
        return torch.device(spec.device)
    try:
        told = nccl_settings.settings(os.environ, interface_of(spec.host), spec.timeouts.join_s)
    except ValueError as error:
        raise WrongInput(f"on node {spec.host} {error}") from error
    os.environ.update(told)
    if not torch.cuda.is_available():
        raise UnfitNode(
            f"torch {torch.__version__} on node {spec.host} can use no GPU, though Ray has one "
            f"there ({why_unusable()}); install a build with CUDA that fits the driver, or use "
            "--device cpu"
        )
    if spec.reduction == "bitwise":
        make_deterministic()
    claim_whole(spec)
    return torch.device("cuda", 0)


def claim_whole(spec: WorkerSpec) -> None:
    """Of slices of one GPU (MIG) one worker of a run at most has one: NCCL connects no two. Raises
    UnfitNode in the other."""
    given, library = os.environ.get("CUDA_VISIBLE_DEVICES", ""), nvml()
    if not given.startswith("MIG-") or library is None or not (whole := library.whole_of(given)):
        return
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0elastic/{spec.run_id}/{whole}")
    except OSError as error:
        raise UnfitNode(
            f"{given} on node {spec.host} is a slice of {whole}, of which another worker of this "
            "run has another slice, and NCCL connects no two slices of one GPU: give Ray one "
            "slice of each GPU, or turn MIG off"
        ) from error
    _claims.append(claim)


_claims: list[socket.socket] = []
"""They end with this process."""


def why_unusable() -> str:
    """torch's own words: a build without CUDA, a driver that is too old and which one it is."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error).rstrip(".")
    return "it finds no device"


def make_deterministic() -> None:
    """On a GPU equal bits need kernels that do not race: an operation without one raises."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # it measures no kernels then
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cudnn.benchmark = False


def refused(error: Exception, spec: WorkerSpec) -> Exception:
    """The same; WrongInput for torch's of an operation without such a kernel, where bits count."""
    if not isinstance(error, RuntimeError) or spec.reduction != "bitwise":
        return error
    operation, _, rest = str(error).partition(" does not have a deterministic implementation")
    if not rest:
        return error
    return WrongInput(
        f"{operation} has no deterministic kernel on this device, and reduction='bitwise' asks "
        "for equal bits: use another operation, or reduction='fast'"
    )


def interface_of(host: str) -> str:
    """The network interface with this IPv4 address; "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == host:
                    return name
    return ""


def name_of(device: torch.device) -> str:
    """As `nvidia-smi` and the node's logs call it; to be asked for while it works."""
    if device.type != "cuda":
        return str(device)
    found = torch.cuda.get_device_properties(device)
    return f"GPU-{found.uuid} {pci_address(device)} {found.name}"


def pci_address(device: torch.device) -> str:
    """As Linux writes it."""
    found = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def peak_memory(device: torch.device) -> int | None:
    """Bytes that its tensors have taken at most; None for the CPU. No device is waited for."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def fault_of(error: BaseException, device: torch.device) -> str:
    """What is wrong with the device itself, which then can do nothing more in this process; "" if
    the error says nothing of that."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.AcceleratorError):
            return "" if is_programs(cause) else str(cause).splitlines()[0]
        cause = cause.__cause__ or cause.__context__
    return _fault_now(device)


def touch(device: torch.device) -> None:
    """Without a wait. Raises torch.AcceleratorError if the device has failed."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).query()


def _fault_now(device: torch.device) -> str:
    """An error that was raised as another one, or swallowed, stays the device's."""
    try:
        touch(device)
    except torch.AcceleratorError as error:
        return "" if is_programs(error) else str(error).splitlines()[0]
    return ""


def is_programs(error: torch.AcceleratorError) -> bool:
    """Of an assertion, or of memory."""
    return is_memory(error) or getattr(error, "error_code", None) == CUDA_ERROR_ASSERT
