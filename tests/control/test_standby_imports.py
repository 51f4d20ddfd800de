"""Workers that are started while others train: without Ray."""

import os
import sys
import threading

from elastic.on_ray.actors import NICENESS, import_patiently


def test_a_standby_imports_with_little_priority_and_keeps_its_own(tmp_path, monkeypatch):
    text = "import os, threading\nnice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())"
    (tmp_path / "imported_by_a_standby.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    modules = "no_such_module_for_standbys", "imported_by_a_standby"
    thread = threading.Thread(target=import_patiently, args=modules)
    thread.start()
    thread.join(60)
    assert sys.modules.pop("imported_by_a_standby").nice == NICENESS
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
