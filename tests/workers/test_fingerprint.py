"""Who computes other bits than the members joins no run that promises bits."""

import ctypes
import json
import threading
from dataclasses import replace

import pytest
import torch

from elastic.protocol.errors import UnfitNode
from tests.workers.session_rig import spec
from workers.distributed import process_group
from workers.distributed.backends import connect_for
from workers.distributed.process_group import leave
from workers.distributed.rendezvous import Rendezvous
from workers.health import fingerprint, gpu, preflight
from workers.health.fingerprint import Fingerprint, alike, compare
from workers.health.nvml import Health, Nvml

CPU = torch.device("cpu")
H100 = (("GPU", "NVIDIA H100 80GB HBM3"), ("multiprocessors", "132"), ("driver", "580.159.04"))
OURS = Fingerprint("w0 on node 10.0.0.1", (*H100, (fingerprint.BITS, "aa")))


def formed(specs, connects):
    """What becomes of each rank."""
    rendezvous, found = Rendezvous("127.0.0.1"), [None] * len(specs)
    address = rendezvous.open(1)
    formations = [
        process_group.form(
            store_address=address, prefix="r/1", rank=rank, world_size=len(specs), connect=connect,
            join_timeout_s=20.0, operation_timeout_s=20.0,
        )
        for rank, connect in enumerate(connects)
    ]  # fmt: skip

    def wait(rank):
        try:
            found[rank] = formations[rank].wait(20.0)
        except Exception as error:
            found[rank] = error
            for formation in formations:
                formation.abandon()

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in range(len(specs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    rendezvous.forget()
    return found


def two(reduction):
    return [replace(spec(reduction), worker=w, host=f"10.0.0.{w}") for w in range(2)]


RECORDED = dict(OURS.facts)
OF_RUN = "does not compute as the machine on which this run has begun"


@pytest.mark.parametrize(
    ("facts", "difference"),
    [
        ((*H100[:2], ("driver", "590.48.01"), (fingerprint.BITS, "aa")),
         "driver 590.48.01 here and 580.159.04 there"),
        ((*H100, (fingerprint.BITS, "bb")), "bits of a fixed computation bb here and aa there"),
        (((fingerprint.BITS, "aa"),), "no GPU here, NVIDIA H100 80GB HBM3 there"),
    ],
)  # fmt: skip
def test_a_run_goes_on_where_its_bits_are_computed_as_they_were(facts, difference):
    own = Fingerprint("w0 on node 10.0.0.1", facts)
    with pytest.raises(UnfitNode) as met:
        fingerprint.compare_recorded(own, RECORDED)
    assert str(met.value).startswith(f"w0 on node 10.0.0.1 {OF_RUN} ({difference}), and")
    fingerprint.compare_recorded(OURS, RECORDED)


def test_what_is_recorded_is_looked_at_where_bits_are_a_promise_and_kept(tmp_path):
    here = replace(spec("bitwise"), place=str(tmp_path), has_checkpoints=True)
    fingerprint.check_recorded(here, CPU)
    (tmp_path / "config.json").write_text(json.dumps({"steps": 9}))
    fingerprint.check_recorded(here, CPU)
    (tmp_path / "config.json").write_text(json.dumps({"fingerprint": RECORDED}))
    with pytest.raises(UnfitNode, match=OF_RUN):
        fingerprint.check_recorded(here, CPU)
    fingerprint.check_recorded(replace(here, reduction="fast"), CPU)
    fingerprint.check_recorded(replace(here, has_checkpoints=False), CPU)


def test_a_store_that_is_away_keeps_no_newcomer_from_joining(monkeypatch):
    def away(place):
        raise TimeoutError("no answer")

    monkeypatch.setattr(fingerprint, "reach_folder", away)
    fingerprint.check_recorded(
        replace(spec("bitwise"), has_checkpoints=True, is_newcomer=True), CPU
    )


def test_what_bits_depend_on_is_recorded_of_gpus(monkeypatch):
    monkeypatch.setattr(fingerprint, "fingerprint_of", lambda spec, device: OURS)
    gpu_0 = torch.device("cuda", 0)
    assert fingerprint.to_record(spec("bitwise"), gpu_0).facts == OURS.facts
    assert fingerprint.to_record(spec("fast"), gpu_0) is None
    assert fingerprint.to_record(spec("bitwise"), CPU) is None


def connects(specs):
    return [alike(connect_for(CPU, "127.0.0.1"), s, CPU) for s in specs]


def test_a_fixed_computation_has_the_same_bits_again_and_draws_nothing():
    before = torch.get_rng_state()
    first = fingerprint.fingerprint("w0", CPU)
    assert first.facts == fingerprint.fingerprint("w1", CPU).facts
    assert torch.equal(torch.get_rng_state(), before)
    assert [name for name, _ in first.facts] == [fingerprint.BITS], "a CPU's bits alone decide"


def test_where_a_workload_makes_its_tensors_changes_no_bit():
    with torch.device("meta"):
        assert fingerprint.computed.__wrapped__(CPU) == fingerprint.computed(CPU)


def test_workers_whose_bits_are_equal_form_a_group():
    specs = two("bitwise")
    found = formed(specs, connects(specs))
    assert [group.rank() for group in found] == [0, 1]
    for group in found:
        leave(group)


def test_who_has_other_bits_is_refused_and_the_first_is_not(monkeypatch):
    specs = two("bitwise")
    own = connects(specs[:1])
    monkeypatch.setattr(fingerprint, "computed", lambda device: "0123456789abcdef")
    _, other = formed(specs, [*own, *connects(specs[1:])])
    assert isinstance(other, UnfitNode)
    assert str(other).startswith(
        "w1 on node 10.0.0.1 does not compute as w0 on node 10.0.0.0 does (bits of a fixed "
        "computation 0123456789abcdef here and "
    )


def test_where_bits_are_no_promise_nobody_is_compared(monkeypatch):
    specs = two("fast")
    monkeypatch.setattr(fingerprint, "computed", lambda device: pytest.fail("is computed"))
    for group in formed(specs, connects(specs)):
        leave(group)


def test_what_is_said_of_two_kinds_of_gpu():
    other = Fingerprint(
        "w3 on node 10.0.0.2",
        (("GPU", "NVIDIA A100"), ("multiprocessors", "108"), *OURS.facts[2:]),
    )
    assert Fingerprint.of(str(other)) == other
    with pytest.raises(UnfitNode) as raised:
        compare(other, OURS)
    assert str(raised.value) == (
        "w3 on node 10.0.0.2 does not compute as w0 on node 10.0.0.1 does (GPU NVIDIA A100 here "
        "and NVIDIA H100 80GB HBM3 there, multiprocessors 108 here and 132 there), and "
        "reduction='bitwise' asks for equal bits: use machines of one kind, or reduction='fast'"
    )
    compare(replace(OURS, worker="w9"), OURS)


# --- NVML ----------------------------------------------------------------------------------------
class FakeLibrary:
    """NVML's functions as ctypes calls them. rows: remapped for correctable and other errors,
    whether a reset is due, whether none is left."""

    def __init__(self, errors=0, rows=(0, 0, 0, 0), slices=()):
        self.errors, self.rows, self.slices = errors, rows, slices

    def nvmlInit_v2(self):
        return 0

    def nvmlSystemGetDriverVersion(self, room, size):
        room.value = b"580.159.04"
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, found):
        found._obj.value = 1 + len(uuid)
        self.asked = uuid.decode()
        return 0 if self.asked.startswith(("GPU-", "MIG-")) else 6

    def nvmlDeviceGetTotalEccErrors(self, gpu, kind, since, count):
        count._obj.value = self.errors
        return 0

    def nvmlDeviceGetRemappedRows(self, gpu, *numbers):
        for number, value in zip(numbers, self.rows, strict=True):
            number._obj.value = value
        return 0

    def nvmlDeviceIsMigDeviceHandle(self, gpu, found):
        found._obj.value = self.asked in self.slices
        return 0

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, gpu, found):
        found._obj.value = 7
        return 0

    def nvmlDeviceGetUUID(self, gpu, room, size):
        room.value = b"GPU-whole"
        return 0


def test_what_nvml_says_of_a_gpu():
    library = Nvml(FakeLibrary(errors=3, rows=(1, 2, 1, 0), slices=("MIG-a",)))
    assert library.driver == "580.159.04"
    assert library.health("GPU-1") == Health(3, needs_reset=True)
    assert library.health("unknown") == Health()
    assert (library.whole_of("MIG-a"), library.whole_of("GPU-1")) == ("GPU-whole", "")
    assert ctypes.sizeof(ctypes.c_void_p) == 8


@pytest.mark.parametrize(
    ("health", "said"),
    [
        (Health(2, has_no_spare=True), "has a bad row of memory and no spare one left: have it"),
        (Health(2, needs_reset=True), "call nvidia-smi --gpu-reset -i GPU-1$"),
    ],
)
def test_a_gpu_with_bad_memory_is_left_out(health, said):
    with pytest.raises(UnfitNode, match=f"^GPU-1 0000:01:00.0 H100 on node 10.0.0.1 .*{said}"):
        preflight.check_health(health, "GPU-1 0000:01:00.0 H100", "10.0.0.1")


def test_errors_that_were_repaired_are_told(caplog):
    preflight.check_health(Health(2), "GPU-1", "10.0.0.1")
    assert 'gpu="GPU-1" uncorrected_errors=2 since its reset' in caplog.text


def test_a_second_slice_of_one_gpu_is_refused(monkeypatch):
    library = Nvml(FakeLibrary(slices=("MIG-a", "MIG-b")))
    monkeypatch.setattr(gpu, "nvml", lambda: library)
    monkeypatch.setattr(gpu, "_claims", [])
    here = replace(spec("fast"), host="10.0.0.1", run_id=f"slices-{id(library)}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a")
    gpu.claim_whole(here)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-b")
    with pytest.raises(UnfitNode, match=r"^MIG-b on node .* is a slice of GPU-whole, of which"):
        gpu.claim_whole(here)
    gpu.claim_whole(replace(here, run_id=f"other-{id(library)}"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    gpu.claim_whole(here)
    for claim in gpu._claims:
        claim.close()
