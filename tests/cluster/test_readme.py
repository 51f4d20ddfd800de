"""The README's first example runs as it stands, and so do the loop of docs/coming_from_ddp.md and
the command of docs/pipeline.md."""

import shlex
import subprocess
import sys

import pytest

from tests.cluster.live import environment, python
from tests.docs.pages import DOCS, ROOT, blocks

pytestmark = pytest.mark.cluster


def test_the_first_example_trains_with_and_without_a_loop_of_its_own(
    tmp_path, ray_temp, shared_head
):
    (example,), (loop,) = (
        blocks(page, "python") for page in (ROOT / "README.md", DOCS / "coming_from_ddp.md")
    )
    again = example[example.index("print(") :].replace("Line(),", "Line(), loop=train,")
    assert "loop=train" in again
    script = tmp_path / "first.py"
    script.write_text(f"{example}\n\n{loop}\n\n{again}")
    env = environment(ray_temp) | {"RAY_ADDRESS": shared_head.address}
    done = python(env, script, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(line) for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert len(losses) == 2, done.stdout
    assert max(losses) < 0.05  # 3 x + 1 has a mean square of 7 when nothing is learnt


@pytest.mark.slow
def test_the_demo_in_stages_tells_its_layouts_and_has_equal_weights(ray_temp):
    lines = "".join(blocks(DOCS / "pipeline.md", "bash")).splitlines()
    (command,) = [line for line in lines if "elastic.demo" in line]
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]],
        env=environment(ray_temp),
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    layouts = [line for line in done.stdout.splitlines() if line.startswith("layout of ")]
    assert any(": 2 pipelines of 2 stages, 4 " in line for line in layouts), layouts
    assert any(": 1 pipeline of 3 stages, 8 " in line for line in layouts), layouts
    assert "Weights equal, bit for bit: YES" in done.stdout
