"""Whatever is in a scenario or a trace: one clean line, no hang, no traceback."""

import random

import pytest

from elastic.chaos.plan import MAX_STRIKES, make_plan
from elastic.chaos.scenario import SHIPPED, TRACES, read_scenario
from elastic.chaos.traces import read_trace
from elastic.cli.app import main
from elastic.protocol.errors import WrongInput

KILL = "faults: [{what: kill, when: {%s}}]"
SCENARIOS = {
    "what: [kill]": "what is ['kill'], must be one of",
    "what: {a: [b]}": "must be one of kill, stop, slow, term, drain",
    "what: kill, when: {step: 1" + "0" * 30 + "}": "must be a whole number from 1",
    "what: kill, when: {step: 0x" + "f" * 9000 + "}": "step is a huge int",
    "what: kill, when: {after_s: 1" + "0" * 400 + "}": "must be a number above 0",
    "what: kill, when: {after_s: .nan}": "after_s is nan, must be a number above 0",
    "what: kill, when: {after_s: .inf}": "after_s is inf, must be a number above 0",
    "what: kill, when: {per_minute: 5.0e-324, for_s: 1}": "per_minute is 5e-324, must be",
    "what: kill, when: {trace: " + "t" * 300 + "}": "there is no trace 'ttt",
    "what: kill, when: {trace: [a]}": "trace is ['a'], must be text",
    "what: kill, when: {phase: [running]}": "phase is ['running'], must be one of",
    "what: kill, 7: 8": "7 is none of at_most_gb, for_s, loss, slower, what, when, whom",
    "what: " + "[" * 3000 + "]" * 3000: "more than 16 deep",
    "what: &a [*a]": "*a is an alias: write it out",
    "what: !!int ''": "is no YAML: ",
    "what: !!timestamp x": "is no YAML: ",
    "what: " + "9" * 5000: "is no YAML: ",
    "what: \x01": "is no YAML: ",
    "what: [": "is no YAML: line 1: ",
}
STRIKES = [
    "every_s: 1, times: 1" + "0" * 15,
    "per_minute: 1000000000, for_s: 1000000000",
]
TRACES_OF_TROUBLE = {
    b"0,4\nnan,3\n9,4\n": "line 2 is 'nan,3', must be seconds,count",
    b"0,4\ninf,3\n": "line 2 is 'inf,3', must be seconds,count",
    b"0,4\n9,-3\n": "line 2 is '9,-3', must be seconds,count",
    b"9,4\n3,3\n": "times must not decrease",
    b"0,4\n1,\xff\n": "cannot be read: 'utf-8' codec can't decode",
    b"0,4\n1," + b"9" * 5000: "must be seconds,count",
    b"0,4\n" * 50_000: "is larger than 131072 bytes",
}


def said(call):
    """What the WrongInput says; it is a line of reasonable length."""
    with pytest.raises(WrongInput) as caught:
        call()
    line = str(caught.value)
    assert line.isprintable(), line
    assert len(line) < 1000, line
    return line


@pytest.mark.parametrize("fault", SCENARIOS, ids=lambda fault: fault[:40])
def test_a_strange_scenario_is_one_line(fault, tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(f"faults: [{{{fault}}}]")
    assert SCENARIOS[fault] in said(lambda: read_scenario(str(path)))


@pytest.mark.parametrize("when", STRIKES)
def test_a_scenario_that_never_ends_is_one_line(when, tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(KILL % when)
    scenario = read_scenario(str(path))
    line = said(lambda: make_plan(scenario, 4))
    assert f"more than {MAX_STRIKES} strikes" in line


@pytest.mark.parametrize("content", TRACES_OF_TROUBLE, ids=lambda content: str(content[:20]))
def test_a_strange_trace_is_one_line(content, tmp_path):
    (tmp_path / "t.csv").write_bytes(content)
    assert TRACES_OF_TROUBLE[content] in said(lambda: read_trace(tmp_path / "t.csv"))


def test_a_scenario_that_is_no_file_of_ours_is_one_line_and_status_2(tmp_path, capfd):
    (tmp_path / "bytes.yaml").write_bytes(b"faults: \xff")
    names = ("n" * 300, "no\nfile", str(tmp_path), str(tmp_path / "bytes.yaml"))
    wrong = [["chaos", name, str(tmp_path)] for name in names]
    for arguments in (*wrong, ["chaos", "spot-storm", "n" * 300], ["chaos", "report", "n" * 300]):
        assert main(arguments) == 2
        out, err = capfd.readouterr()
        assert (out, err.count("\n")) == ("", 1), err


# --- mutations of what is shipped ---------------------------------------------------
GRAINS = (
    *("[", "]", "{", "}", ":", ",", "- ", "? ", "\n", " ", "&a ", "*a", "<<: ", "!!int ", "!!set "),
    *("!!timestamp ", "!!binary ", "|", ">", "%YAML 9", "---", "#", "'", '"', "\\x", "~", "yes"),
    *(".nan", ".inf", "-1", "0", "1e400", "1" + "0" * 30, "0x" + "f" * 9000, "1:59:59", "\x00"),
    *("2001-99-99", "\ufeff", "\udc80", "é", "kill", "times", "every_s", "per_minute", "faults"),
)


def mutated(content, dice):
    """The bytes with up to four parts dropped, doubled, moved or replaced."""
    for _ in range(dice.randint(1, 4)):
        at, to = sorted(dice.randrange(len(content) + 1) for _ in range(2))
        to = min(to, at + 40)
        grain = dice.choice(GRAINS).encode(errors="surrogatepass")
        part = dice.choice((b"", grain, grain * 30, bytes([dice.randrange(256)])))
        part = dice.choice((part, part, content[at:to] * 2))
        content = content[:at] + part + content[dice.choice((at, to)) :]
    return content


def outcome(read):
    """What reading comes to: a value, or one line; anything else is a bug."""
    try:
        return read()
    except WrongInput as error:
        line = str(error)
    assert line.isprintable(), ascii(line)
    return None


def test_mutated_scenarios_are_read_or_refused(tmp_path):
    dice, path, num_read = random.Random(7), tmp_path / "s.yaml", 0
    shipped = sorted(SHIPPED.glob("*.yaml"))
    for _ in range(1000):
        path.write_bytes(mutated(dice.choice(shipped).read_bytes(), dice))
        num_read += outcome(lambda: make_plan(read_scenario(str(path)), 4)) is not None
    assert 20 < num_read < 980, "mutations of which all or none are sound find nothing"


def test_mutated_traces_are_read_or_refused(tmp_path):
    dice, path, num_read = random.Random(7), tmp_path / "t.csv", 0
    shipped = sorted(TRACES.glob("*.csv"))
    for _ in range(1000):
        path.write_bytes(mutated(dice.choice(shipped).read_bytes(), dice))
        num_read += outcome(lambda: read_trace(path)) is not None
    assert 20 < num_read < 980, "mutations of which all or none are sound find nothing"


KNOWN = {  # losses, bursts of them, the most instances
    "aws-p3": (167, 79, 32),
    "g4dn-us-east-1c": (85, 35, 12),
    "g4dn-us-east-1d": (51, 17, 12),
    "gcp-a100-us-east1-b": (154, 36, 64),
}


def test_shipped_traces_are_those_of_their_papers_and_named_in_the_notice():
    assert {path.stem for path in TRACES.glob("*.csv")} == set(KNOWN)
    notice = (TRACES / "NOTICE").read_text()
    assert notice.count("Permission is hereby granted") == 2
    for name, (lost, bursts, most) in KNOWN.items():
        drops = read_trace(TRACES / f"{name}.csv")
        assert (round(sum(drop.part for drop in drops) * most), len(drops)) == (lost, bursts)
        assert f"{name}.csv" in notice


def test_a_trace_that_goes_backwards_is_one_line(tmp_path, capsys):
    (tmp_path / "back.csv").write_text("0,4\n9,3\n5,2\n")
    scenario = tmp_path / "s.yaml"
    scenario.write_text("faults: [{what: kill, when: {trace: back.csv}}]")
    assert main(["chaos", str(scenario), str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "times must not decrease" in err
    assert err.count("\n") == 1
