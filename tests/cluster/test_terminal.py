"""`elastic run` in a terminal: through ten kills nobody else's line appears there."""

import re

import pytest

from tests.cluster.live import JOBS, LiveRun, assert_same_bits
from tests.cluster.terminal import Terminal, lines_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STEPS, KILLS = 100, 10
NUMBER = r"[\d.e+-]+"
SECONDS = rf"{NUMBER} s"
OURS = [
    r"elastic: .+",
    r"run directory: .+",
    # the view
    rf"[\u2501\u2578\u257a ]*step \d+/{STEPS}  \w+, \d+ workers?( of .+)?",
    rf"loss ({NUMBER}|-|not finite)  {NUMBER} s/step(  {NUMBER} steps/s)?"
    r"(  done in [\d:]+  at \d\d:\d\d UTC)?",
    rf"learning rate {NUMBER}(  gradient norm {NUMBER})?",
    rf"loss [\u2581-\u2588 ]+ {NUMBER} to {NUMBER}",
    r"goodput ([\d.]+ %|-)  idle ([\d.]+ %|-)  \d+ recover(y|ies)  \d+ lost steps?",
    r"node +workers +state +ranks +s/micro-batch",
    r"(([\d.]+|no node yet) +| +)?(w\d+ )+ *\w+ +(\d+( \d+)*|-) +([\d.]+|-)",
    r"recovered from +detect +fence +form +state +first step +total +lost",
    rf"\w+( +{SECONDS}){{6}} +\d+",
    r"reason: .+",
    r'\d\d:\d\d:\d\d generation=\d+ step=\d+ (size=\d+ )?phase=\w+ reason=".*"',
    # the outcome
    rf"succeeded: {STEPS} of {STEPS} steps, loss {NUMBER}",
    r"  weights_sha256  [0-9a-f]{64}",
    r"  since its last start: \d+ generations?, \d+ recover(y|ies), \d+ lost steps?, goodput .+ %",
    rf"  recovery from \w+: {SECONDS} =( \+?[a-z ]+ {SECONDS})+",
    r"  run directory   /.+",
]
IS_OURS = re.compile("|".join(f"(?:{line})" for line in OURS))


def strange(lines: list[str]) -> list[str]:
    """Those that are none of ours."""
    return [line for line in lines if IS_OURS.fullmatch(line) is None]


class TerminalRun(LiveRun):
    """A run whose driver has a terminal, and is started as a user's is."""

    def __enter__(self) -> "TerminalRun":
        self._awake.unlink(missing_ok=True)
        self.command.remove("--json")
        self.terminal = Terminal(self.command, self.env)
        self.process = self.terminal.process
        return self

    def __exit__(self, *_) -> None:
        self.terminal.__exit__()


def test_a_line_of_somebody_else_is_found():
    text = (
        "elastic: Ray is started\r\n\x1b[1mstep 3/100  running, 2 workers\x1b[0m\r\n"
        "\x1b[2K\x1b[1A\x1b[36m(raylet)\x1b[0m A worker died or was killed\r\n"
        '12:00:00 generation=2 step=3 size=1 phase=forming reason="w1 lost"\r\n'
    )
    assert strange(lines_of(text)) == ["(raylet) A worker died or was killed"]


@pytest.mark.slow
@pytest.mark.parametrize("address", ["shared", "local"])
def test_no_line_of_others_appears_through_ten_kills(
    address, request, reference, tmp_path, ray_temp
):
    """local: Ray is started by the driver itself, and says more."""
    if address == "shared":
        address = request.getfixturevalue("shared_head").address
    options = {"workers": "1..3", "steps": STEPS, "set": ["sleep=0.1"], "max_failures": 99}
    target = f"{JOBS / 'toy.py'}:Toy"
    with TerminalRun(target, tmp_path, "run", ray_temp, address=address, **options) as run:
        for kill in range(KILLS):
            status = run.wait_for(lambda s: s["world_size"] >= 2 and s["phase"] == "running")
            run.kill(rank=kill % 2)
            before = status["generation"]
            run.wait_for_step(lambda s, g=before: s["generation"] > g)
        end = finish(run)
        lines = run.terminal.lines()
    assert_same_bits(run, end, reference(steps=STEPS), STEPS)
    assert len(end["result"]["recoveries"]) >= KILLS - 1
    assert any("recovered from" in line for line in lines), "there is a view"
    assert f"succeeded: {STEPS} of {STEPS} steps" in "\n".join(lines)
    assert strange(lines) == []


def finish(run: TerminalRun) -> dict:
    """As `run.finish`, of a run that gives no JSON."""
    end = run.finish()
    return end | {"err": "\n".join(run.terminal.lines()[-20:])}
