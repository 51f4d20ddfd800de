"""`Saves`: what the ranks report of their parts of a checkpoint, until it is whole or given up.

When that is is elastic/control/checkpointing.py's; who publishes is
elastic/controller/publisher.py.
"""

import json
from typing import Any

from elastic.control import commands as c
from elastic.on_ray.host import Host


class Saves:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._parts: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
        """Per generation and step, by rank."""

    def hear(self, header: dict[str, Any], payload: bytes) -> None:
        """A rank's part is durable; it may say so again."""
        save = header["generation"], header["step"]
        self._parts.setdefault(save, {})[header["rank"]] = json.loads(payload)

    def conclude(self, command: c.Publish | c.Discard) -> None:
        save = command.generation, command.step
        parts = list(self._parts.pop(save, {}).values())
        if isinstance(command, c.Publish):
            self._host.on_publish(*save, parts)
        else:
            self._host.on_discard(*save)
