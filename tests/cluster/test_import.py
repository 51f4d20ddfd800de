"""A real run on weights that `elastic checkpoint import` has brought."""

import pytest
import torch

from elastic.cli.app import main
from elastic.store.catalogue import Catalogue
from elastic.store.files import open_folder
from tests.cluster.jobs.toy import Still
from tests.cluster.live import JOBS, assert_complete
from workers.checkpoint.load import checkpoint_sha256
from workers.train_state.digest import weights_sha256

pytestmark = pytest.mark.cluster


def test_every_worker_begins_with_imported_weights(start, tmp_path):
    torch.manual_seed(5)
    model = Still().build_model()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    command = ["checkpoint", "import", str(tmp_path / "weights.pt"), str(tmp_path / "run")]
    assert main([*command, f"{JOBS / 'toy.py'}:Still", "--from", "torch"]) == 0
    with start("Still", workers=2, steps=6, checkpoint_every=2) as run:
        end = run.finish()
    assert end["status"] == 0, end["err"]
    assert end["result"]["weights_sha256"] == weights_sha256(model)
    catalogue = Catalogue(open_folder(str(tmp_path / "run")).at("checkpoints"))
    assert catalogue.steps()[0] == 0  # pinned
    assert {checkpoint_sha256(catalogue, s) for s in catalogue.steps()} == {weights_sha256(model)}
    assert_complete(run, 6)
