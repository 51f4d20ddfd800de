"""What a simulated run has on record: the steps' lines, in order and without a gap."""

from typing import Any


class FakeRecord:
    """See elastic/controller/recorder.py; nothing of it is lost."""

    place = "/run"

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    @property
    def safe_step(self) -> int:
        return len(self.lines)

    @property
    def generation(self) -> int | None:
        """Of the last line."""
        return self.lines[-1]["metrics"]["generation"] if self.lines else None

    def record_step(self, line: dict[str, Any]) -> None:
        step = line["metrics"]["step"]
        assert step == len(self.lines) + 1, f"{step} is recorded after {len(self.lines)}"
        self.lines.append(line)

    def roll_back(self, step: int) -> None:
        assert step <= len(self.lines), f"back to {step}, {len(self.lines)} is on record"
        del self.lines[step:]

    def note(self, kind: str, fields: dict[str, Any]) -> None:
        pass
