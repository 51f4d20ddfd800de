"""A signal to the driver's process group is not one to the processes of its Ray."""

import os
import sys

from ray._private import services

from elastic.on_ray.driver.own_sessions import own_sessions

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def test_processes_that_ray_starts_lead_a_session_within_the_block_and_only_there():
    started = []
    try:
        with own_sessions():
            started.append(services.start_ray_process(SLEEPS, "raylet", fate_share=True))
        started.append(services.start_ray_process(SLEEPS, "raylet", fate_share=True))
        inside, outside = (os.getsid(info.process.pid) for info in started)
        assert inside == started[0].process.pid
        assert outside == os.getsid(0)
    finally:
        for info in started:
            info.process.kill()
            info.process.wait()
