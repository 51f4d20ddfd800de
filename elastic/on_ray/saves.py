"""`Saves`: what the ranks report of their parts of a checkpoint, until it is whole or given up.

When that is is elastic/control/checkpointing.py's; who publishes is
elastic/controller/publisher.py.
"""

import json
from typing import Any

from elastic.control import commands as c
from elastic.on_ray.host import Host
from elastic.protocol.messages.to_controller import PartSaved


class Saves:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._parts: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
        """Per generation and step, by rank."""

    def hear(self, report: PartSaved) -> None:
        """It may be said again."""
        save = report.generation, report.step
        self._parts.setdefault(save, {})[report.rank] = json.loads(report.payload)

    def conclude(self, command: c.Publish | c.Discard) -> None:
        save = command.generation, command.step
        parts = list(self._parts.pop(save, {}).values())
        if isinstance(command, c.Publish):
            self._host.on_publish(*save, parts)
        else:
            self._host.on_discard(*save)
