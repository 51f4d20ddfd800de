"""The report as one HTML page without anything from outside: numbers, and pictures as inline SVG.

What the numbers mean is report.py's.
"""

from dataclasses import replace
from html import escape
from typing import Any

from elastic.chaos.report import Story
from elastic.chaos.timeline import Span, Timeline
from elastic.observe.colors import BUCKETS, PHASES
from elastic.protocol.membership import worker_name

WIDTH, LEFT, LANE, CHART = 960, 60, 16, 180
MAX_POINTS = 2000
"""Of the loss curve; more than twice the pixels."""
STYLE = """body{font:14px/1.45 system-ui,sans-serif;max-width:1000px;margin:2em auto;color:#222}
h1{font-size:22px}h2{font-size:17px;margin-top:2em}svg{width:100%;height:auto}
table{border-collapse:collapse}td,th{padding:2px 10px;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child,.t{text-align:left}text{font:11px system-ui,sans-serif;fill:#444}
.key span{display:inline-block;width:11px;height:11px;margin:0 4px 0 14px}"""


def page(story: Story, found: dict[str, Any]) -> str:
    """HTML of the report `found` of this story."""
    line = story.timeline
    goodput, gap_s = found["goodput"], found["longest_gap_s"]
    title = f"{story.name}: {found['scenario'] or 'no scenario'}"
    head = (
        f"{found['outcome']}, {found['steps']} steps in {found['wall_s']:.1f} s, "
        f"{found['lost_steps']} lost; {len(found['recoveries'])} recoveries; goodput "
        f"{100 * goodput['time']:.1f} % of the time, {100 * goodput['capacity']:.1f} % of the "
        f"capacity; from its first step on, the longest time without a new step that lasted was "
        f"{gap_s:.2f} s, without any new step {found['longest_gap_any_step_s']:.2f} s"
    )
    sections = [
        f"<h1>{escape(title)}</h1><p>{escape(head)}</p>",
        "<h2>Who was in</h2>" + key(BUCKETS, line.buckets()) + membership(story),
        "<h2>Loss</h2>" + losses(story),
        "<h2>Recoveries</h2>" + recoveries(found["recoveries"]),
        "<h2>Faults</h2>" + fault_table(found["faults"]),
        "<h2>Every second of every rank</h2>" + bucket_table(found),
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style><body>{''.join(sections)}</body></html>\n"
    )


# --- pictures ------------------------------------------------------------------
def x_of(at: float, line: Timeline) -> float:
    return LEFT + (WIDTH - LEFT - 10) * (at - line.began) / max(line.ended - line.began, 1e-9)


def membership(story: Story) -> str:
    """A lane for each worker: grey while it is there, the span's colour while it is a member."""
    line = story.timeline
    spans = merged(line.spans)
    lives = {life: 18 + LANE * i for i, life in enumerate(sorted_lives(line))}
    parts = [faults(story, 18 + LANE * len(lives))]
    for life, y in lives.items():
        ended = line.ended if life[2] is None else life[2]
        x, width = x_of(life[1], line), x_of(ended, line) - x_of(life[1], line)
        parts.append(box(x, y, width, 6, "#dddddd", f"{worker_name(life[0])} is there"))
        for span in spans:
            if life[0] in span.members and life[1] < span.ended and span.began < ended:
                began, until = max(span.began, life[1]), min(span.ended, ended)
                text = f"{span.bucket}, {until - began:.2f} s"
                width = x_of(until, line) - x_of(began, line)
                color = BUCKETS.get(span.bucket, "#000000")
                parts.append(box(x_of(began, line), y, width, 11, color, text))
        parts.append(label(4, y + 10, worker_name(life[0])))
        if life[3]:
            parts.append(label(x_of(ended, line) + 2, y + 10, life[3].replace("_", " ")))
    return svg(18 + LANE * len(lives) + 18, parts, line)


def merged(spans: list[Span]) -> list[Span]:
    """Neighbours of one colour and membership are one: a run has a span for each of its steps."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if last and (last.bucket, last.members) == (span.bucket, span.members):
            found[-1] = replace(last, ended=span.ended)
        else:
            found.append(span)
    return found


def sorted_lives(line: Timeline) -> list[tuple[int, float, float | None, str]]:
    return sorted((life.worker, life.started_at, life.ended_at, life.cause) for life in line.lives)


def losses(story: Story) -> str:
    points = [(m["time"], m["loss"]) for m in story.metrics if m["loss"] is not None]
    points = points[:: 1 + len(points) // MAX_POINTS]
    if len(points) < 2:
        return "<p>Too few steps for a curve.</p>"
    low, high = min(y for _, y in points), max(y for _, y in points)
    scale = (CHART - 10) / max(high - low, 1e-12)
    dots = [f"{x_of(t, story.timeline):.1f},{18 + (high - loss) * scale:.1f}" for t, loss in points]
    curve = f'<polyline fill="none" stroke="#2e4057" stroke-width="1.3" points="{" ".join(dots)}"/>'
    axis = label(4, 26, f"{high:.4g}") + label(4, 8 + CHART, f"{low:.4g}")
    return svg(CHART + 36, [faults(story, CHART + 18), curve, axis], story.timeline)


def faults(story: Story, height: float) -> str:
    """A line with a mark for each fault that happened."""
    parts: list[str] = []
    for done in story.done:
        if not done.note:
            x = x_of(done.at, story.timeline)
            text = escape(f"{done.what} {done.worker or done.whom} at step {done.step}")
            parts.append(
                f'<g><title>{text}</title><path d="M{x:.1f} 14V{height:.0f}" stroke="#d1495b" '
                f'stroke-dasharray="2 3"/><path d="M{x - 4:.1f} 4h8l-4 9z" fill="#d1495b"/></g>'
            )
    return "".join(parts)


def recoveries(rows: list[dict[str, Any]]) -> str:
    """A bar for each, its phases one after another."""
    if not rows:
        return "<p>There were none.</p>"
    most_s = max(row["total_s"] for row in rows) or 1.0
    parts: list[str] = []
    for i, row in enumerate(rows):
        x, y = 150.0, 4 + 20 * i
        row = {**row, "form_s": row["form_s"] - row["waiting_s"]}  # the part that has no bar yet
        parts.append(label(4, y + 11, f"{' '.join(row['workers'])} {row['cause']}"))
        for phase, color in PHASES.items():
            if row.get(phase):
                width = (WIDTH - 240) * row[phase] / most_s
                parts.append(box(x, y, width, 14, color, f"{phase[:-2]} {row[phase]:.3f} s"))
                x += width
        parts.append(label(x + 4, y + 11, f"{row['total_s']:.3f} s"))
    return key(PHASES, rows[0]) + svg(8 + 20 * len(rows), parts)


def svg(height: float, parts: list[str], line: Timeline | None = None) -> str:
    if line is not None:
        wall_s = line.ended - line.began
        ends = [(line.began + wall_s * i / 4, f"{wall_s * i / 4:.0f} s") for i in range(4)]
        parts = [*parts, *(label(x_of(at, line), height - 4, text) for at, text in ends)]
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'


def box(x: float, y: float, width: float, height: float, color: str, text: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.0f}" width="{max(width, 0.5):.1f}" height="{height}" '
        f'fill="{color}"><title>{escape(text)}</title></rect>'
    )


def label(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'


def key(colors: dict[str, str], used: dict[str, Any]) -> str:
    spans = (
        f'<span style="background:{color}"></span>{name.removesuffix("_s").replace("_", " ")}'
        for name, color in colors.items()
        if name in used
    )
    return f'<p class="key">{"".join(spans)}</p>'


# --- tables --------------------------------------------------------------------
FAULT_COLUMNS = ("strike", "what", "worker", "at_s", "step", "result", "cause")
FAULT_TIMES = (
    *("detect_s", "fence_s", "form_s", "restore_s", "first_step_s", "total_s"),
    *("waiting_s", "next_step_s", "lost_steps"),
)


def fault_table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "<p>None was injected.</p>"
    columns = (*FAULT_COLUMNS, *FAULT_TIMES)
    return table(columns, [[row.get(column) for column in columns] for row in rows])


def bucket_table(found: dict[str, Any]) -> str:
    names = [name for name in BUCKETS if any(name in r["buckets"] for r in found["ranks"])]
    rows = [
        [
            f"rank {r['rank']}",
            *(r["buckets"].get(n, 0.0) for n in names),
            sum(r["buckets"].values()),
        ]
        for r in found["ranks"]
    ]
    return table(("", *names, "sum"), rows)


def table(columns: tuple[str, ...], rows: list[list[Any]]) -> str:
    head = "".join(f"<th>{escape(c.removesuffix('_s').replace('_', ' '))}</th>" for c in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell(v)}</td>' for v in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else escape(str(value))
