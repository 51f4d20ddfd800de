"""An experiment as one HTML page: a curve and intervals for each condition, and every run.

The frame of the page and its policy are elastic/observe/report_page.py's.
"""

from collections.abc import Sequence

from elastic.experiment.results import Row
from elastic.experiment.summary import Summary
from elastic.observe.charts import Charts, embedded, figure, hover, open_charts
from elastic.observe.report_page import Drawn, document, section, table, text, titled
from elastic.observe.series import np

COLORS = (
    "#1f6f8b",
    "#d1495b",
    "#3a923a",
    "#edae49",
    "#7a5195",
    "#66a182",
    "#2e4057",
    "#8895a5",
)
MEANS = {
    "goodput_time": ("Goodput", "share of the time in steps that stayed"),
    "longest_gap_s": ("Longest gap", "seconds without a new step"),
    "wall_s": ("Duration", "seconds from the start to the end"),
}
"""Columns of which intervals are drawn: title, axis."""
MOST_RUNS = 1000
"""That are listed."""


def page(name: str, found: Sequence[Summary], num_points: int) -> str:
    """name: of the sweep. num_points: runs that it is to have. WrongInput without Bokeh."""
    drawn = draw(found)
    rows = [row for summary in found for row in summary.rows]
    sections = [
        f"<h1>{text(name, 200)}: experiment</h1>"
        f"<p>{len(rows)} of {num_points} runs, {len(found)} conditions.</p>",
        section("Conditions", table(*conditions(found))),
        section("Recoveries", titled(drawn, "recoveries", RECOVERIES) or "<p>There were none.</p>"),
        section("Means over runs", INTERVALS + intervals_of(drawn)),
        section("Runs", listed(rows)),
    ]
    return document(f"{name}: experiment", sections, drawn)


RECOVERIES = "Share of recoveries that took no longer, by condition"
INTERVALS = (
    "<p>Grey: single runs. A line: 95 % of 2,000 bootstrapped means (Efron, 1979). "
    "Conditions have the numbers of the table.</p>"
)


def intervals_of(drawn: Drawn) -> str:
    return "".join(titled(drawn, column, title) for column, (title, _) in MEANS.items())


def conditions(found: Sequence[Summary]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    columns = (
        "condition",
        "runs",
        "succeeded",
        "goodput",
        "longest gap, s",
        "duration, s",
        "recoveries",
        "p50, s",
        "p95, s",
        "worst, s",
        "lost steps",
        "hashes",
    )
    cells: list[tuple[str, ...]] = []
    for number, summary in enumerate(found, start=1):
        means = (str(summary.mean(c)) for c in ("goodput_time", "longest_gap_s", "wall_s"))
        times = (summary.percentile(percent) for percent in (50, 95, 100))
        cells.append(
            (
                f"{number}. {summary.condition}",
                str(len(summary.rows)),
                str(summary.num_succeeded),
                *means,
                str(len(summary.recoveries_s)),
                *("-" if seconds is None else f"{seconds:.3f}" for seconds in times),
                f"{sum(summary.values('lost_steps')):.0f}",
                str(summary.num_hashes),
            )
        )
    return columns, cells


def listed(rows: Sequence[Row]) -> str:
    if not rows:
        return "<p>None has ended yet.</p>"
    names = tuple(name for name in rows[0] if name != "recoveries_s")
    cells = [tuple(row[name] for name in names) for row in rows[:MOST_RUNS]]
    left = f"<p>{len(rows) - MOST_RUNS} more are in results.csv.</p>"
    return table(names, cells, most=120) + (left if len(rows) > MOST_RUNS else "")


# --- charts ------------------------------------------------------------------------
def draw(found: Sequence[Summary]) -> Drawn:
    charts = open_charts()
    recoveries(charts, found)
    for column, (_, axis) in MEANS.items():
        means(charts, column, axis, found)
    return embedded(charts)


def recoveries(charts: Charts, found: Sequence[Summary]) -> None:
    """For each condition the share of its recoveries that took no longer than x."""
    if not any(len(summary.recoveries_s) for summary in found):
        return
    chart = figure(
        charts,
        "recoveries",
        320,
        "share",
        x_axis_label="seconds from the last sign of life to the next step",
        x_axis_type="log",
        tools="pan,box_zoom,wheel_zoom,reset,save",
    )
    for number, summary in enumerate(found, start=1):
        seconds = summary.recoveries_s
        if len(seconds):
            shares = np.arange(1, len(seconds) + 1) / len(seconds)
            x, y = np.r_[seconds[:1], seconds], np.r_[0.0, shares]
            color = COLORS[(number - 1) % len(COLORS)]
            line = chart.step(
                x=x, y=y, mode="after", color=color, line_width=2, legend_label=str(number)
            )
            hover(charts, chart, [("took", "$x{0.000} s"), ("share", "$y{0.00}")], line)
    chart.legend.title = "condition"
    chart.legend.location = "bottom_right"


def means(charts: Charts, column: str, axis: str, found: Sequence[Summary]) -> None:
    """For each condition its runs, their mean and its interval."""
    known = [(n, summary) for n, summary in enumerate(found, start=1) if summary.values(column)]
    if not known:
        return
    chart = figure(
        charts,
        column,
        220,
        "condition",
        x_axis_label=axis,
        y_range=(len(found) + 0.6, 0.4),
        tools="pan,box_zoom,wheel_zoom,reset,save",
    )
    chart.yaxis.ticker = [n for n, _ in known]
    for number, summary in known:
        values, mean = summary.values(column), summary.mean(column)
        color = COLORS[(number - 1) % len(COLORS)]
        heights = [float(number)] * len(values)
        chart.scatter(x=values, y=heights, size=6, color="#b9c4d0")
        chart.segment(
            x0=[mean.low], x1=[mean.high], y0=[number], y1=[number], color=color, line_width=3
        )
        drawn = chart.scatter(x=[mean.value], y=[float(number)], size=9, color=color)
        hover(charts, chart, [("mean", "@x{0.0000}")], drawn)
