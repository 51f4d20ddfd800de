"""A run of very many steps is looked at by the ends of its files: no command reads its history."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from elastic.cli.app import main
from elastic.cli.progress import Progress
from tests.cli.test_profile import row

LINES, MOST_BYTES = 200_000, 2 << 20
STEP = (
    '{"step": %d, "time": 1.0, "loss": 1.0, "generation": 1, "world_size": 2, "step_s": 0.1, '
    '"samples": 1, "applied": true, "user": {}}\n'
)
DECISION = (
    '{"at": 1.0, "generation": 1, "step": %d, "phase": "running", "entry": {"type": "Entry", '
    '"commands": [], "reason": ""}}\n'
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("long") / "run"
    run.mkdir()
    status = {
        **{"phase": "running", "generation": 1, "world_size": 2, "step": LINES, "steps": LINES},
        **{"committed_checkpoint": None, "workers": [], "standby": [], "controller": {}},
        "reason": "all is well",
    }
    (run / "status.json").write_text(json.dumps(status))
    (run / "config.json").write_text(json.dumps({"steps": LINES, "detect_s": 10.0}))
    (run / "metrics.jsonl").write_text("".join(STEP % n for n in range(1, LINES + 1)))
    (run / "journal.jsonl").write_text("".join(DECISION % n for n in range(1, LINES + 1)))
    rows = [json.dumps(row(n, 0)) + "\n" for n in range(1, LINES // 4)]
    (run / "anatomy.jsonl").write_text("".join(rows))
    sizes = [(run / f"{name}.jsonl").stat().st_size for name in ("metrics", "journal", "anatomy")]
    assert min(sizes) > 4 * MOST_BYTES
    return run


def bytes_read() -> int:
    """By this process so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


@pytest.mark.parametrize("command", ["status", "ls", "profile", "progress"])
def test_a_first_look_reads_the_ends_of_the_files(command: str, run: Path, tmp_path: Path):
    def look() -> None:
        if command == "progress":
            progress = Progress(Console(quiet=True))
            assert progress(str(run)) is not None
            progress.close()
            return
        place = str(run.parent if command == "ls" else run)
        more = ["--out", str(tmp_path / "trace")] if command == "profile" else []
        assert main([command, place, *more]) == 0

    look()  # what is imported on the way is read once
    before = bytes_read()
    look()
    assert bytes_read() - before < MOST_BYTES
