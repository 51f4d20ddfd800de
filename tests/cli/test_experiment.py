"""`elastic experiment`: what a sweep means, what is refused, and what is made of its runs."""

import re
from html.parser import HTMLParser

import pytest

from elastic.cli import experiment as cli
from elastic.cli.app import main
from elastic.experiment import results
from elastic.experiment.page import page
from elastic.experiment.summary import mean_of, summaries
from elastic.experiment.sweep import Point, read_sweep
from elastic.protocol.errors import WrongInput

JOB = "run: {target: 'job.py:Job', steps: 3, global_batch: 4, micro_batch: 2}\n"
SWEEP = """job: elastic.yaml
place: out
scenarios: [none, spot-storm]
seeds: 2
vary: {reduction: [fast, bitwise], standby: [0, 1]}
"""
OF_COLUMNS = """job: elastic.yaml
place: out
scenarios: [none]
seeds: 2
vary: {seed: [0, 1], steps: [3, 4]}
"""
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


@pytest.fixture
def sweep_of(tmp_path):
    (tmp_path / "elastic.yaml").write_text(JOB)

    def write(text=SWEEP):
        (tmp_path / "sweep.yaml").write_text(text)
        return tmp_path / "sweep.yaml"

    return write


def report_of(*recoveries_s, faults=0, goodput=0.5):
    return {
        "outcome": "succeeded",
        "steps": 3,
        "lost_steps": 0,
        "wall_s": 10.0,
        "goodput": {"time": goodput, "capacity": goodput / 2},
        "longest_gap_s": max(recoveries_s, default=0.1),
        "faults": [{"note": ""}] * faults,
        "recoveries": [{"total_s": seconds} for seconds in recoveries_s],
    }


def test_every_condition_runs_once_with_the_first_seed_before_the_second(sweep_of, capsys):
    assert main(["experiment", str(sweep_of()), "--dry-run"]) == 0
    names = capsys.readouterr().out.split()
    assert len(set(names)) == len(names) == 16
    assert [name.rpartition("seed")[2] for name in names] == ["0"] * 8 + ["1"] * 8
    assert names[0] == "none-reduction-fast-standby-0-seed0"
    assert names[7] == "spot-storm-reduction-bitwise-standby-1-seed0"
    assert not (sweep_of().parent / "out").exists()


def test_conditions_that_are_called_alike_have_directories_of_their_own(sweep_of, tmp_path):
    for folder in ("", "other/"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / f"{folder}kill.yaml").write_text("faults: [{what: kill, when: {step: 2}}]")
    text = "job: elastic.yaml\nplace: out\nscenarios: [none, kill.yaml, other/kill.yaml]\n"
    calm, *alike = [point.name for point in read_sweep(sweep_of(text)).points]
    assert calm == "none-seed0"
    assert len(set(alike)) == 2
    assert all(re.fullmatch("kill-[0-9a-f]{6}-seed0", name) for name in alike)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("job: elastic.yaml\n", "", "job is missing"),
        ("elastic.yaml", "gone.yaml", "gone.yaml cannot be read"),
        ("place: out", "place: s3://bucket/x", "place must be a folder of this machine"),
        ("scenarios: [none, spot-storm]", "scenarios: []", "must be a list with an entry"),
        ("spot-storm", "spot-strom", "there is no scenario 'spot-strom'"),
        ("spot-storm", "none", "scenario 'none' is listed twice"),
        ("seeds: 2", "seeds: [1, 1]", "a seed is listed twice"),
        ("seeds: 2", "seeds: many", "must be a whole number from 1"),
        ("seeds: 2", "seeds: 2000", "has 16000 runs, more than 10000"),
        ("seeds: 2", "seed: 2", "'seed' is none of"),
        ("reduction: [fast, bitwise]", "name: [a, b]", "vary.name is no option that can vary"),
        ("standby: [0, 1]", "standby: [0, few]", "vary.standby must be integer, got 'few'"),
        ("standby: [0, 1]", "standby: [0, 0]", "vary.standby: a value is listed twice"),
        ("standby: [0, 1]", "standby: [[0]]", "values must be text, numbers or true and false"),
    ],
)
def test_a_sweep_that_cannot_be_is_one_line(sweep_of, capsys, old, new, said):
    assert old in SWEEP
    assert main(["experiment", str(sweep_of(SWEEP.replace(old, new)))]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not (sweep_of().parent / "out").exists()


def test_what_ended_is_not_run_again_and_what_was_cut_off_keeps_its_directory(
    sweep_of, monkeypatch, capsys
):
    path = sweep_of("job: elastic.yaml\nplace: out\nscenarios: [none]\nseeds: 3\n")
    place, ran = path.parent / "out", []

    def run_point(sweep, point):
        ran.append(cli.free_name(sweep.place, point.name))
        (sweep.place / ran[-1]).mkdir()
        if len(ran) == 2:
            raise KeyboardInterrupt
        return results.row_of(point, report_of(), {"weights_sha256": "ab"}, ran[-1])

    monkeypatch.setattr(cli, "run_point", run_point)
    assert main(["experiment", str(path)]) == 1
    assert "interrupted" in capsys.readouterr().err
    assert (place / "experiment.html").exists()
    assert main(["experiment", str(path)]) == 0
    out = capsys.readouterr().out
    assert "1 of 3 runs are in" in out
    assert "[3/3] none, seed 2: succeeded in 10.0 s, 0 faults, 0 lost steps, goodput 50.0 %" in out
    assert ran == ["none-seed0", "none-seed1", "none-seed1.2", "none-seed2"]
    rows = results.read_results(place, results.columns_of(read_sweep(path).conditions))
    assert [row["seed"] for row in rows] == ["0", "1", "2"]


def test_results_of_another_sweep_or_damaged_ones_are_refused(sweep_of):
    sweep = read_sweep(sweep_of())
    columns = results.columns_of(sweep.conditions)
    row = results.row_of(sweep.points[0], report_of(0.2, 0.1, faults=2), {}, "r")
    assert (row["recovery_p50_s"], row["recovery_max_s"], row["faults"]) == ("0.15", "0.2", "2")
    sweep.place.mkdir()
    results.write_results(sweep.place, columns, [row])
    assert results.read_results(sweep.place, columns) == [row]
    with pytest.raises(WrongInput, match="other columns than this sweep"):
        results.read_results(sweep.place, columns[1:])
    path = sweep.place / results.FILE
    path.write_text(path.read_text() + "a,b\n")
    with pytest.raises(WrongInput, match="other columns than this sweep"):
        results.read_results(sweep.place, columns)


def test_options_that_are_called_as_columns_have_columns_of_their_own(sweep_of):
    sweep = read_sweep(sweep_of(OF_COLUMNS))
    cli.check_options(sweep, "sweep.yaml")
    columns = results.columns_of(sweep.conditions)
    assert len(set(columns)) == len(columns)
    rows = [results.row_of(point, report_of(), {}, point.name) for point in sweep.points]
    assert all(set(row) == set(columns) for row in rows)
    assert len({tuple(results.key_of(point).items()) for point in sweep.points}) == 8
    assert [len(summary.rows) for summary in summaries(sweep, rows)] == [2] * 4


def test_runs_of_a_condition_are_taken_together(sweep_of):
    sweep = read_sweep(sweep_of())
    rows = [
        results.row_of(
            point,
            report_of(*[0.1 * (point.seed + 1)] * 2, goodput=0.4 + 0.2 * point.seed),
            {"outcome": "succeeded", "weights_sha256": "ab"},
            point.name,
        )
        for point in sweep.points[:9]
    ]
    found = summaries(sweep, rows)
    assert [len(summary.rows) for summary in found] == [2, *[1] * 7]
    first, second = found[:2]
    assert (first.num_succeeded, first.num_hashes, len(first.recoveries_s)) == (2, 1, 4)
    assert [first.percentile(p) for p in (50, 51, 100)] == [0.1, 0.2, 0.2]
    mean = first.mean("goodput_time")
    assert (mean.value, mean.low, mean.high) == pytest.approx((0.5, 0.4, 0.6))
    assert str(second.mean("goodput_time")) == "0.4"
    assert mean_of([1.0] * 20 + [2.0] * 20).low == pytest.approx(1.35, abs=0.03)
    assert str(mean_of([])) == "-"


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.names = []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)


def test_nothing_of_a_sweep_is_markup_in_its_page(sweep_of):
    sweep = read_sweep(sweep_of(SWEEP.replace("fast, bitwise", f'"{EVIL}"')))
    points = sweep.points
    rows = [results.row_of(p, report_of(0.1, 0.3), {"outcome": EVIL}, EVIL) for p in points[:-1]]
    rows.append(results.nothing_of(points[-1], "failed", EVIL))
    html = page(EVIL, summaries(sweep, rows), len(points))
    parser = Elements()
    parser.feed(html)
    assert parser.names.count("script") == 2
    assert "img" not in parser.names
    assert f"{len(points)} of {len(points)} runs, 4 conditions" in html
    assert "Share of recoveries" in html
    assert Point(sweep.conditions[0], 0).name.isascii()
    empty = page("x", summaries(sweep, []), len(points))
    assert "None has ended yet." in empty


def test_faults_that_wait_for_a_run_that_never_begins_end_with_it(sweep_of, capfd):
    """What is told is why it cannot be run, not that its faults have waited."""
    path = sweep_of("job: elastic.yaml\nplace: out\nscenarios: [spot-storm]\n")
    assert main(["experiment", str(path)]) == 2
    err = capfd.readouterr().err
    assert "cannot be run: elastic: " in err
    assert "job.py" in err
