"""A run's charts, drawn by Bokeh: linked, so that to zoom one in time zooms all.

Bokeh gets numbers and words of this file only: whatever a run's files name or say is text of the
page, report_page.py's, which escapes it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from elastic.chaos.timeline import Episode, Life, Timeline
from elastic.observe import colors
from elastic.observe.anatomy import PARTS
from elastic.observe.run_record import NUM_BINS, Anatomy, RunRecord, Steps
from elastic.observe.series import Floats, np, seconds_in, thinned
from elastic.protocol.errors import WrongInput
from elastic.protocol.membership import worker_name
from elastic.protocol.reports import CAUSES
from elastic.protocol.step_record import OF_OPTIMIZER

MISSING = (
    "the page is drawn with bokeh, which is not installed: "
    "pip install 'elastic-ray-trainer[report]'"
)
LOSS_BINS, SCALAR_BINS = 1500, 500
MOST_LANES = 1000
MOST_BOXES = 8000
"""Of memberships: shorter breaks than can be seen are closed until so few are left."""
BLUE, GREY, RED = "#1f6f8b", "#d9dde2", "#d1495b"
PHASES = ("detect_s", "fence_s", "form_s", "state_s", "first_step_s")
"""Of a recovery; they add up to it."""
PART_COLORS = ("#8895a5", "#3a923a", "#66a182", "#00798c", "#edae49", "#7a5195", "#2e4057")


@dataclass
class Charts:
    """Figures by where they go; `axis` is the time that all share, in seconds of the run."""

    bokeh: Any
    models: Any
    axis: Any = None
    found: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Drawn:
    """What the page needs of them."""

    library: str
    """JavaScript of Bokeh."""
    script: str
    """JavaScript that puts each chart into its place."""
    places: dict[str, str]
    """HTML of each chart's place."""


def draw(record: RunRecord) -> Drawn:
    """WrongInput without Bokeh."""
    charts = open_charts()
    began = record.began
    if record.timeline is not None:
        workers(charts, record.timeline)
        sizes(charts, record.timeline)
        buckets(charts, record.timeline)
        recoveries(charts, record.timeline)
    curves(charts, record, began)
    if record.anatomy is not None:
        anatomy(charts, record.anatomy, began)
    return embedded(charts)


def open_charts() -> Charts:
    """WrongInput without Bokeh."""
    try:
        return Charts(import_module("bokeh.plotting"), import_module("bokeh.models"))
    except ImportError as error:
        raise WrongInput(MISSING) from error


def embedded(charts: Charts) -> Drawn:
    """All that were drawn."""
    if not charts.found:
        return Drawn("", "", {})
    resources, embed = import_module("bokeh.resources"), import_module("bokeh.embed")
    library = resources.Resources(mode="inline", components=["bokeh"], minified=True)
    script, places = embed.components(charts.found, wrap_script=False)
    return Drawn("\n".join(library.js_raw), str(script), dict(places))


def figure(charts: Charts, name: str, height: int, unit: str, **options: Any) -> Any:
    """A chart over the run's time that is zoomed with the others."""
    options.setdefault("x_axis_label", "seconds since the run's start")
    if charts.axis is not None and "x_range" not in options:
        options["x_range"] = charts.axis
    tools = options.pop("tools", "xpan,xbox_zoom,xwheel_zoom,box_zoom,reset,save")
    found = charts.bokeh.figure(
        height=height,
        sizing_mode="stretch_width",
        tools=tools,
        active_drag="xbox_zoom" if "xbox_zoom" in tools else "box_zoom",
        y_axis_label=unit,
        min_border_left=75,
        **options,
    )
    found.toolbar.logo = None
    if charts.axis is None and "xbox_zoom" in tools:
        charts.axis = found.x_range
    charts.found[name] = found
    return found


def hover(charts: Charts, chart: Any, rows: list[tuple[str, str]], glyph: Any) -> None:
    """rows: our own words, and columns of numbers."""
    chart.add_tools(charts.models.HoverTool(tooltips=rows, renderers=[glyph]))


# --- workers -----------------------------------------------------------------------
def workers(charts: Charts, line: Timeline) -> None:
    """A lane for each worker: grey while it is there, blue while it is a member."""
    lives = [life for life in line.lives if math.isfinite(life.started_at)][-MOST_LANES:]
    if not lives:
        return
    lives.sort(key=lambda life: (life.started_at, life.worker))
    chart = figure(charts, "workers", min(140 + 9 * len(lives), 700), "worker, oldest first")
    chart.yaxis.major_label_text_font_size = "0px"
    chart.y_range.flipped = True
    ends = [ended(life, line) for life in lives]
    columns: dict[str, Any] = {
        "left": np.array([life.started_at - line.began for life in lives]),
        "right": np.array(ends) - line.began,
        "top": np.arange(len(lives)) + 0.4,
        "bottom": np.arange(len(lives)) - 0.4,
        "worker": [worker_name(life.worker) for life in lives],
        "end": [cause_of(life, line) for life in lives],
    }
    there = chart.quad(**edges(), source=columns, fill_color=GREY, line_color=None)
    times = [("from", "@left{0.00} s"), ("until", "@right{0.00} s")]
    hover(charts, chart, [("worker", "@worker"), *times, ("then", "@end")], there)
    boxes = memberships(lives, ends, line)
    chart.quad(**edges(), source=boxes, fill_color=BLUE, line_color=None)
    lost = [i for i, life in enumerate(lives) if life.cause]
    at = {"x": columns["right"][lost], "y": np.array(lost, dtype=float)}
    chart.scatter("x", "y", source=at, marker="x", size=7, color=RED)


def edges() -> dict[str, str]:
    return {edge: edge for edge in ("left", "right", "top", "bottom")}


def ended(life: Life, line: Timeline) -> float:
    return line.ended if life.ended_at is None else max(life.started_at, life.ended_at)


def cause_of(life: Life, line: Timeline) -> str:
    if life.cause:
        return f"lost: {known(life.cause)}"
    return "still there" if life.ended_at is None and line.outcome == "unfinished" else "left"


def known(cause: str) -> str:
    """A journal may say anything."""
    return cause if cause in CAUSES else "another cause"


def memberships(lives: list[Life], ends: list[float], line: Timeline) -> dict[str, Floats]:
    """A box for each time that a worker was a member."""
    times: dict[int, list[tuple[float, float]]] = {}
    for span in line.spans:
        for worker in span.members:
            of_worker = times.setdefault(worker, [])
            if of_worker and span.began - of_worker[-1][1] < 1e-6:
                of_worker[-1] = (of_worker[-1][0], span.ended)
            else:
                of_worker.append((span.began, span.ended))
    break_s = (line.ended - line.began) / 2000
    while sum(map(len, times.values())) > MOST_BOXES and break_s < line.ended - line.began:
        times = {worker: closed(found, break_s) for worker, found in times.items()}
        break_s *= 2
    boxes: list[tuple[float, float, float]] = []
    for i, (life, end) in enumerate(zip(lives, ends, strict=True)):
        for began, until in times.get(life.worker, ()):
            if began < end and life.started_at < until:
                boxes.append((max(began, life.started_at), min(until, end), float(i)))
    found = np.array(boxes).reshape(-1, 3)
    lane = found[:, 2]
    left, right = found[:, 0] - line.began, found[:, 1] - line.began
    return {"left": left, "right": right, "top": lane + 0.25, "bottom": lane - 0.25}


def closed(times: list[tuple[float, float]], break_s: float) -> list[tuple[float, float]]:
    """Without breaks that are shorter."""
    found = times[:1]
    for began, until in times[1:]:
        if began - found[-1][1] < break_s:
            found[-1] = (found[-1][0], max(until, found[-1][1]))
        else:
            found.append((began, until))
    return found


def sizes(charts: Charts, line: Timeline) -> None:
    """How many members there were."""
    points: list[tuple[float, int]] = []
    for span in line.spans:
        if not points or points[-1][1] != len(span.members):
            points.append((span.began, len(span.members)))
    points.append((line.ended, points[-1][1]))
    x = np.array([at for at, _ in points]) - line.began
    y = np.array([float(size) for _, size in points])
    shown = thinned(x, y, LOSS_BINS)
    chart = figure(charts, "sizes", 170, "members")
    glyph = chart.step("x", "y", source={"x": x[shown], "y": y[shown]}, mode="after", color=BLUE)
    hover(charts, chart, [("members", "@y{0}"), ("from", "@x{0.00} s")], glyph)


# --- curves ------------------------------------------------------------------------
def curves(charts: Charts, record: RunRecord, began: float) -> None:
    """Loss, seconds per step, samples per second, learning rate, gradient norm, and what the user's
    code has logged."""
    steps = record.steps
    loss = steps.columns["loss"]
    curve(charts, "loss", "loss", (steps, loss), began=began, num_bins=LOSS_BINS, height=300)
    if record.rolled_back.count and "loss" in charts.found:
        lost = record.rolled_back
        at = thinned(lost.columns["time"], lost.columns["loss"], SCALAR_BINS)
        points = {"x": lost.columns["time"][at] - began, "y": lost.columns["loss"][at]}
        chart = charts.found["loss"]
        legend = "rolled back"
        chart.scatter("x", "y", source=points, size=3, color=RED, alpha=0.5, legend_label=legend)
    step_s = steps.columns["step_s"]
    curve(charts, "step_s", "seconds", (steps, step_s), began=began, num_bins=SCALAR_BINS)
    curve(charts, "rate", "samples / s", (steps, rate_of(steps)), began=began, num_bins=SCALAR_BINS)
    for name in OF_OPTIMIZER:
        curve(charts, name, "", (steps, steps.columns[name]), began=began, num_bins=SCALAR_BINS)
    for i, values in enumerate(steps.user.values()):
        curve(charts, f"user{i}", "", (steps, values), began=began, num_bins=SCALAR_BINS)


def rate_of(steps: Steps) -> Floats:
    """Samples of a step by its seconds; NaN where that is none."""
    samples, step_s = steps.columns["samples"], steps.columns["step_s"]
    num = np.diff(samples, prepend=0.0) if len(samples) else samples
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = num / step_s
    rate[~((step_s > 0) & (num > 0))] = math.nan
    if len(rate) and steps.columns["step"][0] > 1:
        rate[0] = math.nan  # the steps before it are not on record
    return rate


def curve(
    charts: Charts,
    name: str,
    unit: str,
    of: tuple[Steps, Floats],
    *,
    began: float,
    num_bins: int,
    height: int = 190,
) -> None:
    """of: the steps, and a value of each. Nothing is drawn of fewer than two."""
    steps, values = of
    time = steps.columns["time"]
    shown = thinned(time, values, num_bins)
    if len(shown) < 2:
        return
    points = {
        "x": time[shown] - began,
        "y": values[shown],
        "step": np.nan_to_num(steps.columns["step"][shown]),
    }
    chart = figure(charts, name, height, unit)
    glyph = chart.line("x", "y", source=points, color=BLUE, line_width=1.3)
    rows = [("step", "@step{0}"), ("value", "@y{0.000000}"), ("at", "@x{0.00} s")]
    hover(charts, chart, rows, glyph)


# --- where time goes ---------------------------------------------------------------
def stack(
    charts: Charts, name: str, of: dict[str, Floats], bounds: Floats, colors: Iterable[str]
) -> None:
    """Shares of each bin, on top of each other. of: amounts by our own words, shape (bins,)."""
    total = sum(of.values(), start=np.zeros(len(bounds) - 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        columns = {word: np.nan_to_num(100 * v / total) for word, v in of.items()}
    chart = figure(charts, name, 260, "% of the time", y_range=(0, 100))
    source = {**columns, "left": bounds[:-1], "right": bounds[1:]}
    low = np.zeros(len(bounds) - 1)
    for (bucket, values), color in zip(columns.items(), colors, strict=True):
        word, high = bucket.replace("_", " "), low + values
        data = {**{edge: source[edge] for edge in ("left", "right")}, "bottom": low, "top": high}
        data["share"] = values
        glyph = chart.quad(
            **edges(),
            source=data,
            color=color,
            line_color=None,
            legend_label=word,
        )
        rows = [(word, "@share{0.0} %"), ("from", "@left{0.0} s")]
        hover(charts, chart, rows, glyph)
        low = high
    chart.legend.click_policy = "mute"
    beside(chart)


def beside(chart: Any) -> None:
    """The legend covers nothing."""
    chart.add_layout(chart.legend[0], "right")
    chart.legend.label_text_font_size = "11px"
    chart.legend.spacing, chart.legend.padding = 0, 2


def buckets(charts: Charts, line: Timeline) -> None:
    bounds = np.linspace(line.began, line.ended, NUM_BINS + 1)
    of: dict[str, Floats] = {}
    for bucket in colors.BUCKETS:
        spans = [span for span in line.spans if span.bucket == bucket]
        if spans:
            of[bucket] = seconds_in([s.began for s in spans], [s.ended for s in spans], bounds)
    stack(charts, "buckets", of, bounds - line.began, [colors.BUCKETS[bucket] for bucket in of])


def anatomy(charts: Charts, found: Anatomy, began: float) -> None:
    stack(charts, "anatomy", {p: found.seconds[p] for p in PARTS}, found.edges - began, PART_COLORS)
    middle = (found.edges[:-1] + found.edges[1:]) / 2 - began
    chart = figure(charts, "memory", 170, "MiB, highest peak")
    words = {"memory": ("process", BLUE), "gpu_memory": ("GPU", RED)}
    for key, (word, color) in words.items():
        is_there = np.isfinite(found.memory_bytes[key])
        if is_there.any():
            mebibytes = found.memory_bytes[key][is_there] / 2**20
            data = {"x": middle[is_there], "y": mebibytes}
            glyph = chart.line("x", "y", source=data, color=color, legend_label=word)
            hover(charts, chart, [(word, "@y{0} MiB"), ("at", "@x{0.0} s")], glyph)
    beside(chart)


# --- recoveries --------------------------------------------------------------------
def recoveries(charts: Charts, line: Timeline) -> None:
    """A bar for each in the order of time, its phases on top of each other."""
    if not line.episodes:
        return
    tools = "pan,box_zoom,wheel_zoom,reset,save"
    chart = figure(
        charts,
        "recoveries",
        280,
        "seconds",
        tools=tools,
        x_axis_label="recovery",
        x_range=charts.models.DataRange1d(),
    )
    values = {phase: np.array([seconds(e, phase) for e in line.episodes]) for phase in PHASES}
    number = np.arange(len(line.episodes)) + 1.0
    total = sum(values.values(), start=np.zeros(len(number)))
    low = np.zeros(len(number))
    causes = [known(e.recovery.cause) for e in line.episodes]
    about = {"number": number, "cause": causes, "total": total}
    for phase in PHASES:
        of_phase = {"left": number - 0.4, "right": number + 0.4, "value": values[phase]}
        data = {**about, **of_phase, "bottom": low, "top": low + values[phase]}
        word, color = phase.removesuffix("_s").replace("_", " "), colors.PHASES[phase]
        glyph = chart.quad(**edges(), source=data, color=color, line_color=None, legend_label=word)
        rows = [("recovery", "@number{0}"), ("cause", "@cause")]
        rows += [(word, "@value{0.000} s"), ("in all", "@total{0.000} s")]
        hover(charts, chart, rows, glyph)
        low = data["top"]
    beside(chart)


def seconds(episode: Episode, phase: str) -> float:
    found = float(getattr(episode.recovery, phase))
    return found if math.isfinite(found) and found > 0 else 0.0
