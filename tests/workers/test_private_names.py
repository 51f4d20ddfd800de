"""torch's private names are in one room, behind one check of torch's version.

Which files may use them is tests/test_architecture.py's.
"""

import pytest
import torch

from elastic.protocol.errors import WrongInput
from workers.torch_private.version import TESTED, check_version, untested


def test_another_torch_is_refused_with_what_to_install():
    check_version("a sharded strategy", torch.__version__)
    check_version("a sharded strategy", f"{TESTED}.1+cu130")
    for other in ("2.1.3", "2.14.0", "2.130.0"):
        line = rf"this is torch {other}, .*pip install 'torch==2\.13\.\*'.*parallel='ddp'"
        with pytest.raises(WrongInput, match=line):
            check_version("a sharded strategy", other)


def test_a_torch_that_was_not_tried_is_named():
    assert untested(f"{TESTED}.0+cpu") == ""
    assert untested("2.14.0").startswith("this is torch 2.14.0, and private parts of torch 2.13")
