"""`elastic init`: a folder with a job that runs, its job file and its test."""

from pathlib import Path
from typing import Annotated

import typer

from elastic.protocol.errors import WrongInput
from elastic.store.files import first_line

JOB = '''"""A job: a small network learns a rule. Replace model and data with your own."""

import torch
from torch import nn

import elastic


class Rows(torch.utils.data.Dataset):
    """Random vectors; the label is which half of one is larger."""

    def __len__(self):
        return 4096

    def __getitem__(self, i):
        row = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return row, int(row[:8].sum() > row[8:].sum())


class Job(elastic.Workload):
    def __init__(self, width=64, lr=0.01):
        self.width, self.lr = width, lr

    def build_model(self):
        return nn.Sequential(nn.Linear(16, self.width), nn.ReLU(), nn.Linear(self.width, 2))

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=self.lr)

    def dataset(self):
        return Rows()

    def loss(self, model, batch):
        rows, labels = batch
        return nn.functional.cross_entropy(model(rows), labels)
'''
JOB_FILE = """resources:
  workers: 1..2
run:
  target: my_job.py:Job
  arguments: {width: 64}
  steps: 200
  global_batch: 64
  micro_batch: 16
storage:
  place: runs
  name: first
  checkpoint_every: 100
"""
TEST = '''"""The job, without Ray: `pytest` in this folder."""

import torch
from my_job import Job


def test_the_loss_falls():
    torch.manual_seed(0)
    job = Job(width=32)
    model, data = job.build_model(), job.dataset()
    optimizer = job.build_optimizer(list(model.parameters()))
    batch = torch.utils.data.default_collate([data[i] for i in range(64)])
    losses = []
    for _ in range(50):
        loss = job.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
'''
PYTEST = """[pytest]
pythonpath = .
"""
"""The job is found wherever pytest is called, also in a folder with settings of its own."""
FILES = {
    "my_job.py": JOB,
    "elastic.yaml": JOB_FILE,
    "test_my_job.py": TEST,
    "pytest.ini": PYTEST,
}


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A new or an empty folder for the job.")
    ],
) -> int:
    """Write a job that runs, its job file and its test."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise WrongInput(f"{folder} is not empty: give a new folder, nothing was written")
        for name, text in FILES.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise WrongInput(f"{folder} cannot be written: {first_line(error)}") from error
    print(f"{folder} has {', '.join(FILES)}; run it: elastic run {folder / 'elastic.yaml'}")
    return 0
