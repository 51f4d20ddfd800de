"""A script that neither resumes nor retries ends as without the fault, although Ray Train would end
the run: at level 0 it is called again, from its beginning. Level 1 is test_in_place.py's."""

import torch

from tests.scripts import counting
from tests.scripts.test_in_place import ends, started


def test_a_script_without_checkpoint_and_failure_config_ends_as_without_the_fault(tmp_path):
    place = tmp_path / "run"
    run = started(place, in_place=False, ends=[[2, 7, "backward"]])
    assert run.wait() == "succeeded", run.failure
    found = ends(place)
    assert len(found) == 2
    for end in found:
        assert end["uses"].tolist() == [counting.EPOCHS] * counting.SAMPLES
        assert end["steps"] == counting.SAMPLES // counting.BATCH // 2 * counting.EPOCHS
    assert torch.equal(found[0]["net.0.weight"], found[1]["net.0.weight"])
    calls = sorted(file.read_text() for file in place.glob("called-*"))
    assert calls == ["x", "xx", "xx"], "the survivors were called again in their processes"
