"""What a worker says of an error: the place in the stream, and in whose words."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from elastic.protocol.errors import UnfitNode, UserError, WrongInput
from elastic.protocol.worker_spec import Cpus
from tests.workers.session_rig import CPU, Rig, Tiny, spec
from workers.parallel.build import build_strategy
from workers.train_state.build import check_threads
from workers.worker import Worker

ROW = 25
on_both = pytest.mark.usefixtures("place")


class Faulty(Tiny):
    """Row 25 cannot be loaded, or its loss is not what it should be."""

    def __init__(self, sample=None, loss=None):
        self._sample, self._loss = sample, loss

    def dataset(self):
        return Rows(super().dataset(), self._sample)

    def loss(self, model, batch):
        value = super().loss(model, batch[:2])
        return self._loss(value) if self._loss and ROW in batch[2] else value


class Rows:
    def __init__(self, samples, sample):
        self._samples, self._sample = samples, sample

    def __len__(self):
        return len(self._samples)

    def __getitem__(self, row):
        return (*self._samples[row], row) if row != ROW or not self._sample else self._sample()


def raise_(error):
    raise error


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Reporting:
    """A worker's reports without its process, over one rig."""

    def __init__(self, workload):
        torch.set_num_threads(1)
        self.rig = rig = Rig("bitwise", workload)
        self.worker = worker = object.__new__(Worker)
        worker._spec, worker._built, worker._link = rig.spec, rig.built, rig.link
        worker._keep_log = lambda: None

    def train(self):
        rig = self.rig
        rig.form(generation=1, step=0)
        while rig.session.step < rig.session.steps:
            rig.step()

    def said(self):
        """What is raised, and the only report of it."""
        with pytest.raises(Exception) as caught:  # noqa: PT011
            self.worker._tell_of_errors(self.train)
        self.rig.loader.close()
        kinds = ("user_failed", "wrong_input", "unfit_node")
        [(kind, fields, _)] = [sent for sent in self.rig.link.sent if sent[0] in kinds]
        return caught.value, kind, fields["message"]


def test_an_error_before_the_first_step_says_so():
    reporting = Reporting(Faulty())
    reporting.train = lambda: raise_(KeyError("x"))
    error, kind, message = reporting.said()
    assert (type(error), kind) == (KeyError, "user_failed")
    assert message.startswith("before its first step: KeyError: 'x'\nTraceback")


@on_both
def test_an_error_of_the_loss_names_its_rows():
    reporting = Reporting(Faulty(loss=lambda value: raise_(ValueError("no"))))
    _, kind, message = reporting.said()
    assert kind == "user_failed"
    assert message.splitlines()[0] == (
        "rank 0 in step 3, micro-batch 1, stream positions 27..29, rows [12, 26, 25]: "
        "ValueError: no"
    )


@on_both
def test_an_error_of_the_dataset_names_the_micro_batch_that_it_belongs_to():
    reporting = Reporting(Faulty(sample=lambda: raise_(ValueError("row is broken"))))
    error, kind, message = reporting.said()
    assert (type(error), kind) == (UserError, "user_failed")
    assert message.splitlines()[0] == (
        "rank 0 in step 3, micro-batch 1, stream positions 27..29: ValueError: row is broken, "
        "loading the sample at stream position 29 (row 25, step 3, micro-batch 1)"
    )


@on_both
def test_an_error_between_steps_says_after_which_one():
    reporting = Reporting(Faulty())

    def train():
        reporting.rig.form(generation=1, step=0)
        assert reporting.rig.step().committed
        raise ValueError("no evaluation")

    reporting.train = train
    assert reporting.said()[2].startswith("rank 0 after step 1: ValueError: no evaluation\n")


@on_both
def test_an_error_of_the_commit_names_the_step_that_it_was_to_commit():
    reporting = Reporting(Faulty(loss=lambda value: (value[0] * math.inf, value[1])))
    reporting.rig.train_state.max_nonfinite = 0
    assert reporting.said()[2].startswith(
        "rank 0 in step 3: FloatingPointError: the gradients of 1 steps in a row, up to step 3, "
    )


@on_both
def test_an_exception_without_a_text_keeps_its_class_and_its_place():
    error, kind, message = Reporting(Faulty(loss=lambda value: raise_(Speechless()))).said()
    assert (type(error), kind) == (Speechless, "user_failed")
    assert message.splitlines()[0] == (
        "rank 0 in step 3, micro-batch 1, stream positions 27..29, rows [12, 26, 25]: Speechless: "
        "(its text cannot be had, str() of it raised RuntimeError)"
    )


DETACHED = "loss() returned a tensor without a gradient; compute it from the model's output"


@on_both
def test_a_wrong_loss_is_wrong_input_before_the_run_has_begun_and_a_users_error_afterwards():
    def loss(value):
        return value[0].detach(), value[1]

    error, kind, message = Reporting(Faulty(loss=loss)).said()
    assert (type(error), kind) == (WrongInput, "user_failed")
    assert message.splitlines()[0] == (
        "rank 0 in step 3, micro-batch 1, stream positions 27..29, rows [12, 26, 25]: " + DETACHED
    )
    reporting = Reporting(Faulty())
    reporting.train = lambda: raise_(WrongInput(DETACHED))
    assert reporting.said()[1:] == ("wrong_input", DETACHED)


def test_a_node_that_cannot_serve_stays_unfit_at_any_time():
    reporting = Reporting(Faulty())
    reporting.rig.form(generation=1, step=0)
    assert reporting.rig.session.step == 0
    reporting.train = lambda: raise_(UnfitNode("no storage here"))
    assert reporting.said()[1:] == ("wrong_input", "no storage here")


def test_a_workload_that_sets_another_number_of_threads_is_refused_where_bits_count():
    class Threaded(Tiny):
        def build_model(self):
            torch.set_num_threads(2)
            return super().build_model()

    before, one = torch.get_num_threads(), spec("bitwise")
    two = replace(one, cpus=Cpus(2))
    try:
        build_strategy(Threaded(), one, CPU)
        check_threads(two, CPU)
        check_threads(replace(one, reduction="fast"), CPU)
        with pytest.raises(WrongInput, match=r"set 2 intra-op threads, .* cpus_per_worker=1: "):
            check_threads(one, CPU)
    finally:
        torch.set_num_threads(before)


def uses_what_races(value):
    """On a GPU: an operation without a deterministic kernel. On a CPU put_ is one."""
    torch.zeros(1).put_(torch.zeros(1, dtype=torch.long), torch.ones(1))
    return value


@pytest.mark.parametrize(("reduction", "words"), [("bitwise", "put_ has no"), ("fast", "Runtime")])
def test_an_operation_that_races_is_told_by_name_in_whatever_step_it_comes(reduction, words):
    """Sharded models on GPUs have no trial micro-batch: it comes in step 1."""
    reporting = Reporting(Faulty(loss=uses_what_races))
    reporting.worker._spec = replace(reporting.rig.spec, reduction=reduction)
    torch.use_deterministic_algorithms(True)
    try:
        error, kind, message = reporting.said()
    finally:
        torch.use_deterministic_algorithms(False)
    assert (type(error) is WrongInput, kind) == (reduction == "bitwise", "user_failed")
    assert f"rows [12, 26, 25]: {words}" in message
    assert "in uses_what_races" in message, "the user's own traceback"


def test_a_worker_without_memory_for_the_state_is_a_loss_with_words():
    """And no user's error, which would end the run."""
    raised = 'raise OutOfMemory("out of memory while it copied the state")'
    said = "LastWords(why='out of memory while it copied the state', cause='')\n"
    assert ended(raised) == (73, said)


def test_a_worker_whose_device_fails_is_a_loss_with_words():
    """Whoever has met the error, and whatever became of it on its way."""
    raised = """
    fault = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\\nCompile with")
    raise RuntimeError("this rank's shard could not be copied") from fault
"""
    why = "cpu has failed: CUDA error: uncorrectable ECC error encountered"
    assert ended(raised) == (74, f"LastWords(why='{why}', cause='device_failed')\n")


def ended(raised):
    """(status, output) of a worker's process in which training does that."""
    script = f"""
import types
import torch
from workers.train_state.out_of_memory import OutOfMemory
from workers.worker import Worker
def train():
    {raised}
worker = object.__new__(Worker)
worker._link = types.SimpleNamespace(send=lambda report: print(report, flush=True))
worker._keep_log = lambda: None
worker._tell_of_errors(train)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout
