"""Every module of tests here runs on the simulated device as well, or it is said why not."""

import re
from pathlib import Path

HERE = Path(__file__).parent
RUNS_THERE = re.compile(r'usefixtures\("(place|place_slowly|on_device)"\)|\(place_slowly\)')
NO_TENSORS = "no tensor of a model or of a step: messages, files, host processes, clocks"
CONTROL = "what is decided over the control group, which is gloo's on either device"
ON_HOST = "memory of the host is what it is about"
BACKEND = "of gloo itself; tests/device has the same of NCCL's manners"
STAND_INS = "tensors that are not there, whose device is but a word"
HOST_ONLY = {
    "absent": STAND_INS,
    "admission": NO_TENSORS,
    "agreement": NO_TENSORS,
    "ahead_sources": "connections over which a test sends what it likes, into memory of the host",
    "anatomy": NO_TENSORS,
    "assemble": ON_HOST,
    "backup_server": ON_HOST,
    "backup_store": ON_HOST,
    "copying_ahead": "not tried there yet",
    "dialling": NO_TENSORS,
    "exchange": CONTROL,
    "fingerprint": "what a worker says of its processor or GPU, to others",
    "forming": BACKEND,
    "group_errors": BACKEND,
    "host_memory": ON_HOST,
    "link": NO_TENSORS,
    "link_broken": NO_TENSORS,
    "loader": "batches are made on the host; they go to a device in tests/device/test_placement.py",
    "log_upload": NO_TENSORS,
    "loss": "a loss is looked at before a device has computed it: its shape and type",
    "machine": NO_TENSORS,
    "memory": ON_HOST,
    "moves": NO_TENSORS,
    "notice": NO_TENSORS,
    "numa": NO_TENSORS,
    "order": NO_TENSORS,
    "own_group": BACKEND,
    "parquet_loader": "batches are made on the host, as in test_loader.py",
    "parts": "a group's names of its parts, over a backend that the test answers for",
    "pipeline_bubble": "blocks that sleep, and the order in which hosts begin them",
    "pipeline_chain": STAND_INS,
    "pipeline_schedule": NO_TENSORS,
    "places": NO_TENSORS,
    "private_names": NO_TENSORS,
    "process_group": "a group over a backend that the test answers for",
    "pulse": NO_TENSORS,
    "remembered_blocks": STAND_INS,
    "rendezvous": NO_TENSORS,
    "shared_memory": ON_HOST,
    "shortage": "a host that has no memory; tests/device/test_faults.py has devices without",
    "spot": NO_TENSORS,
    "stacks": NO_TENSORS,
    "step_log": NO_TENSORS,
    "storage": NO_TENSORS,
    "tracebacks": NO_TENSORS,
    "unanswered": NO_TENSORS,
    "vitals": NO_TENSORS,
    "vote": CONTROL,
    "worker_log": NO_TENSORS,
}


def test_every_module_runs_on_the_simulated_device_or_is_listed_with_the_reason_why_not():
    modules = {path.stem.removeprefix("test_"): path for path in HERE.glob("test_*.py")}
    there = {name for name, path in modules.items() if RUNS_THERE.search(path.read_text())}
    assert modules.keys() - there - HOST_ONLY.keys() == set()
    assert there & HOST_ONLY.keys() == set()
