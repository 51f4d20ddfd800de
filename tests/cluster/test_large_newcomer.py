"""A worker that comes to a run whose steps bring more than the network carries."""

from functools import partial

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.jobs.large import LINK_BYTES_S, STATE_BYTES
from tests.cluster.live import JOBS, assert_same_bits

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]
HOSTS = partial(Hosts, 3, head_cpus=0)
OPTIONS = {"steps": 30, "global_batch": 4, "micro_batch": 2, "detect_s": 3.0}
LARGE = f"{JOBS / 'large.py'}:Large"


def test_it_comes_level_and_changes_no_bit(hosts, tmp_path, capsys):
    hosts.start_ray()
    with hosts.run(LARGE, tmp_path, "calm", workers=1, **OPTIONS) as calm:
        expected = calm.finish()
    assert expected["status"] == 0, expected["err"]
    samples = [line["sha256"] for line in calm.lines("samples.jsonl")]
    for host in (1, 2):
        hosts.throttle(host, f"{8 * LINK_BYTES_S / 1e6:.0f}mbit")
    with hosts.run(LARGE, tmp_path, "run", workers="1..2", **OPTIONS) as run:
        end = run.finish()
    assert_same_bits(run, end, (expected["result"]["weights_sha256"], samples), OPTIONS["steps"])
    assert end["result"]["lost_steps"] == 0
    assert end["result"]["recoveries"] == []
    began = next(line["at"] for line in run.lines("journal.jsonl") if "Sync" in str(line))
    level = next(m["time"] for m in run.lines("metrics.jsonl") if m["world_size"] == 2)
    copy_s = STATE_BYTES / LINK_BYTES_S
    with capsys.disabled():
        print(f"\nlevel after {level - began:.1f} s, a plain copy takes {copy_s:.1f} s")
