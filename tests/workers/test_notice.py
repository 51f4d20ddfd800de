"""The spot notice, in a process of its own: it is about that process's signals."""

import subprocess
import sys

CHILD = """
import os, signal, sys, threading
from workers.health.notice import Notice
heard = threading.Event()
Notice(lambda cause, left_s: heard.set())
ready, is_ready = os.pipe()
child = os.fork()
if not child:
    os.write(is_ready, b"x")
    signal.pause()
    os._exit(0)
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
assert os.WTERMSIG(status) == signal.SIGTERM, "a forked child ends by it"
assert not heard.wait(0.2), "the worker has no notice"
os.kill(os.getpid(), signal.SIGTERM)
assert heard.wait(10), "and this is one"
print("fine")
"""


def test_sigterm_is_a_notice_for_the_worker_and_the_end_of_what_it_has_forked():
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60)
    assert done.stdout == "fine\n", done.stderr
