"""The report of a run as one HTML page without anything from outside.

Whatever comes from a run's files passes `text`; a policy in the page lets no script run but the two
that are written here.
"""

import base64
import bisect
import hashlib
import html
import json
import math
import time
from collections.abc import Sequence
from typing import Any

from elastic.chaos.text import one_line
from elastic.chaos.timeline import Episode
from elastic.observe.anatomy import PARTS
from elastic.observe.charts import PHASES, Drawn
from elastic.observe.colors import BUCKETS
from elastic.observe.run_record import RunRecord, as_list, number
from elastic.protocol.membership import counted, worker_name
from elastic.protocol.step_record import OF_OPTIMIZER
from elastic.store.run_directory import as_dict

MARK = '<meta name="generator" content="elastic report">'
"""By it we know a page of ours, which may be written anew."""
MOST_CHARACTERS = 600
"""Of a text from a run's files."""
MOST_RECOVERIES, MOST_DECISIONS, DECISIONS_EACH = 500, 500, 8
OPEN_RECOVERIES = 20
MOST_SETTINGS = 200
MOST_COLUMNS = 12
"""Of what a script reports."""
STYLE = """body{font:14px/1.5 system-ui,sans-serif;max-width:1100px;margin:1.5em auto;padding:0 1em;
color:#222}h1{font-size:22px;overflow-wrap:anywhere}h2{font-size:18px;margin:2.2em 0 .3em;
border-bottom:1px solid #ccd}h3{font-size:14px;margin:1.2em 0 0;overflow-wrap:anywhere}
table{border-collapse:collapse}td,th{padding:2px 10px;text-align:right;vertical-align:top;
border-bottom:1px solid #ddd;overflow-wrap:anywhere}td:first-child,th:first-child,.t td{
text-align:left}pre{background:#f3f4f6;padding:8px;white-space:pre-wrap;overflow-wrap:anywhere}
details{border-bottom:1px solid #e5e5e5;padding:2px 0}summary{cursor:pointer;overflow-wrap:anywhere}
.m td:last-child{text-align:left}.note{color:#8a4b00}.p{color:#666}"""
MEANINGS = {
    "productive": "steps that stayed committed",
    "idle": "in steps, while a member waits for slower ones or for those with more to compute",
    "starting": "until the first committed step's generation has formed",
    "waiting": "fewer than the least workers",
    "recovering": "from a worker's last sign of life until the survivors have formed",
    "retried": "work on a step that was given up and done again",
    "growing": "pausing and forming with newcomers",
    "rolled_back": "steps that were committed and then lost with all who had them",
    "ending": "after the last step",
    "down": "between a controller's end and the next start of the same run",
    "unsettled": "the end of a journal that does not end with the run",
}
PHASE_MEANINGS = {
    "detect_s": "from the worker's last sign of life until its loss was known",
    "fence_s": "until the survivors had given the old generation up",
    "form_s": "until the new generation had formed; waiting for workers belongs to it",
    "state_s": "until every member held the state of the step to go on from",
    "first_step_s": "until the next step was committed",
}


def text(value: object, most: int = MOST_CHARACTERS) -> str:
    """As text of a page or of a quoted attribute."""
    found = one_line(str(value)[: 4 * most])
    return html.escape(found if len(found) <= most else found[: most - 3] + "...")


def page(record: RunRecord, drawn: Drawn, place: str, command: str) -> str:
    """place: of the run, for people; command: that does the same again."""
    title = f"{record.name}: report"
    sections = [
        head(record, place),
        workers(record, drawn),
        curves(record, drawn),
        reports(record),
        recoveries(record, drawn),
        time_spent(record, drawn),
        anatomy(record, drawn),
        decisions(record),
        samples(record),
        configuration(record),
        reproduce(record, command),
    ]
    return document(title, sections, drawn)


def document(title: str, sections: Sequence[str], drawn: Drawn) -> str:
    """title: any text. sections: HTML."""
    scripts = [safe(drawn.library), safe(drawn.script)]
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
        f"script-src {' '.join(map(hashed, scripts))}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{MARK}'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{text(title, 200)}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(sections)
        + "".join(f"<script>{script}</script>\n" for script in scripts)
        + "</body></html>\n"
    )


def safe(script: str) -> str:
    """It holds nothing that would end its element; in JavaScript's strings both mean the same."""
    return script.replace("</", "<\\/").replace("<!--", "<\\!--")


def hashed(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def head(record: RunRecord, place: str) -> str:
    result, status, line = record.result, record.status, record.timeline
    outcome = result.get("outcome") or status.get("phase") or "just begun"
    parts = [f"{outcome}, {how_far(record)}"]
    if line is not None:
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(max(line.began, 0), 1e11)))
        parts.append(f"{line.ended - line.began:.1f} s since {at}")
        parts.append(counted_as(len(line.episodes), "recovery", "recoveries"))
        parts.append(lost(record, line.lost_steps))
        spent = line.buckets()
        goodput = spent.get("productive", 0.0) / max(sum(spent.values()), 1e-9)
        parts.append(f"goodput {100 * goodput:.1f} %")
    if result.get("loss") is not None:
        parts.append(f"final loss {result['loss']}")
    reason = status.get("reason")
    notes = "".join(f'<p class="note">{text(note)}</p>' for note in record.notes[:50])
    return (
        f"<h1>{text(record.name, 200)}</h1><p>{text('; '.join(parts))}</p>"
        + (f"<p>{text(reason)}</p>" if reason else "")
        + f'<p class="p">{text(place)}</p>{notes}'
    )


def how_far(record: RunRecord) -> str:
    """A script says itself when it is over; at level 0 only its reports are known."""
    last = last_step(record)
    if not record.is_script:
        return f"step {last} of {record.config.get('steps', '?')}"
    if last:
        return f"step {last}"
    found = record.status.get("step", 0)
    return f"{counted(found if isinstance(found, int) else 0, 'report')} with a checkpoint"


def lost(record: RunRecord, number: int) -> str:
    return counted(number, "lost report" if record.is_script else "lost step")


def last_step(record: RunRecord) -> int:
    steps = record.steps.columns["step"]
    return int(steps[-1]) if len(steps) and math.isfinite(steps[-1]) else 0


def counted_as(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


# --- charts ------------------------------------------------------------------------
def workers(record: RunRecord, drawn: Drawn) -> str:
    if record.timeline is None:
        return section("Workers", "<p>There is no journal that could be followed.</p>")
    about = (
        "<p>Grey: the worker is there. Blue: it is a member. A cross: it was lost. "
        "To zoom one chart in time zooms all.</p>"
    )
    return section("Workers", about + place(drawn, "workers") + place(drawn, "sizes"))


def curves(record: RunRecord, drawn: Drawn) -> str:
    steps = record.steps
    names = {"loss": "Loss", "step_s": "Seconds per step", "rate": "Samples per second"}
    names |= {name: name.replace("_", " ").capitalize() for name in OF_OPTIMIZER}
    names |= {f"user{i}": name for i, name in enumerate(steps.user)}
    parts = [titled(drawn, key, name) for key, name in names.items()]
    num_infinite = int((~_finite(steps.columns["loss"])).sum())
    if num_infinite and "level" not in record.status:  # a script keeps its loss to itself
        parts.append(f"<p>{num_infinite} of {steps.count} steps have no finite loss.</p>")
    if steps.num_unshown:
        parts.append(f"<p>{steps.num_unshown} more names of scalars are not drawn.</p>")
    empty = "<p>Fewer than two steps are committed.</p>"
    return section("Loss and other scalars", "".join(parts) or empty)


def reports(record: RunRecord) -> str:
    """Of a script; empty for a Workload."""
    if not record.reports:
        return ""
    names = dict.fromkeys(name for line in record.reports for name in as_dict(line.get("metrics")))
    found = [*names][:MOST_COLUMNS]
    cells = [
        (
            f"{number(line.get('time')) - record.began:.2f}",
            *(shown(line.get(key)) for key in ("world_size", "checkpoint")),
            *(shown(as_dict(line.get("metrics")).get(name)) for name in found),
        )
        for line in record.reports
    ]
    about = f"<p>The newest {len(cells)}.</p>" if len(cells) > 1 else ""
    columns = ("seconds", "workers", "checkpoint", *found)
    return section("Reports of the script", about + table(columns, cells, most=80))


def shown(value: object) -> str:
    return "-" if value is None else as_json(value)


def _finite(values: Any) -> Any:
    return abs(values) < math.inf


def titled(drawn: Drawn, key: str, name: str) -> str:
    return f"<h3>{text(name, 120)}</h3>{drawn.places[key]}" if key in drawn.places else ""


def place(drawn: Drawn, key: str) -> str:
    return drawn.places.get(key, "")


def section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>{body}"


# --- recoveries --------------------------------------------------------------------
def recoveries(record: RunRecord, drawn: Drawn) -> str:
    line = record.timeline
    meanings = rows((phase_word(p), meaning) for p, meaning in PHASE_MEANINGS.items())
    about = f"<details><summary>What the five phases are</summary>{meanings}</details>"
    if line is None:
        found = [as_dict(r) for r in as_list(record.result.get("recoveries"))]
        told = [told_of(i, recovery) for i, recovery in enumerate(found[:MOST_RECOVERIES], 1)]
    else:
        times = [decision.at for decision in record.decisions]
        shown = list(enumerate(line.episodes, 1))[-MOST_RECOVERIES:]
        told = [explained(i, episode, record, times) for i, episode in shown]
        if left := len(line.episodes) - len(shown):
            about += f"<p>The first {left} of {len(line.episodes)} are not listed.</p>"
    if not told:
        return section("Recoveries", "<p>There were none.</p>")
    listed = "".join(told[:OPEN_RECOVERIES])
    if more := told[OPEN_RECOVERIES:]:
        listed += f"<details><summary>{len(more)} more</summary>{''.join(more)}</details>"
    return section("Recoveries", place(drawn, "recoveries") + about + listed)


def phase_word(phase: str) -> str:
    return phase.removesuffix("_s").replace("_", " ")


def told_of(i: int, recovery: dict[str, Any]) -> str:
    """One of result.json."""
    times = {phase: number(recovery.get(phase)) for phase in (*PHASES, "total_s")}
    return f"<p>{i}. {text(recovery.get('cause'))}: {phases(times)}</p>"


def phases(times: dict[str, float]) -> str:
    parts = [f"{phase_word(phase)} {times[phase]:.3f} s" for phase in PHASES]
    return f"{times['total_s']:.3f} s = {' + '.join(parts)}"


def explained(i: int, episode: Episode, record: RunRecord, times: list[float]) -> str:
    """What was lost and why, the phases, and what was decided meanwhile."""
    recovery = episode.recovery
    began = episode.healed_at - recovery.total_s
    seconds = {phase: float(getattr(recovery, phase)) for phase in (*PHASES, "total_s")}
    who = ", ".join(worker_name(loss.worker) for loss in episode.losses[:8])
    summary = f"{i}. at {began - record.began:.2f} s: {who} {recovery.cause}"
    facts = [phases(seconds)]
    if recovery.waiting_s > 0:
        facts.append(f"{recovery.waiting_s:.3f} s of form were waiting for workers or a state")
    if recovery.lost_steps:
        facts.append(lost(record, recovery.lost_steps))
    facts += [
        f"{worker_name(loss.worker)}: {loss.cause}{loss.why and ', ' + loss.why}, last heard "
        f"{max(0.0, loss.at - loss.last_seen):.3f} s before"
        for loss in episode.losses[:8]
    ]
    low = bisect.bisect_left(times, began)
    high = bisect.bisect_right(times, episode.healed_at)
    decided = [
        f"{d.at - record.began:.3f} s, generation {d.generation}, step {d.step}: {d.reason}"
        for d in record.decisions[low : min(high, low + DECISIONS_EACH)]
    ]
    items = "".join(f"<li>{text(item, 200)}</li>" for item in (*facts, *decided))
    return (
        f"<details><summary>{text(summary, 200)}: {recovery.total_s:.3f} s</summary>"
        f"<ul>{items}</ul></details>"
    )


# --- time --------------------------------------------------------------------------
def time_spent(record: RunRecord, drawn: Drawn) -> str:
    if record.timeline is None:
        badput = {key: number(s) for key, s in as_dict(record.result.get("badput")).items()}
        if not badput:
            return ""
        found = rows((key, f"{s:.2f} s") for key, s in badput.items())
        return section("Where the time went", found)
    spent = record.timeline.buckets()
    wall_s = max(sum(spent.values()), 1e-9)
    found = [
        (bucket.replace("_", " "), f"{spent[bucket]:.2f}", f"{100 * spent[bucket] / wall_s:.1f} %")
        for bucket in BUCKETS
        if bucket in spent
    ]
    meanings = [MEANINGS[bucket] for bucket in BUCKETS if bucket in spent]
    cells = [(*row, meaning) for row, meaning in zip(found, meanings, strict=True)]
    cells.append(("sum", f"{wall_s:.2f}", "100 %", ""))
    body = f'<div class="m">{table(("bucket", "seconds", "share", "meaning"), cells)}</div>'
    return section("Where the time went", place(drawn, "buckets") + body)


def anatomy(record: RunRecord, drawn: Drawn) -> str:
    found = record.anatomy
    if found is None:
        return section("Anatomy of a step", "<p>anatomy.jsonl has no measurement.</p>")
    cells: list[tuple[str, ...]] = []
    for rank, sums in list(found.ranks.items())[:256]:
        total_s = sum(sums[part] for part in PARTS)
        shares = (f"{100 * sums[part] / total_s:.1f} %" if total_s else "-" for part in PARTS)
        mean_s = total_s / max(sums["steps"], 1)
        cells.append((f"rank {rank}", f"{sums['steps']:.0f}", f"{mean_s:.4f}", *shares))
    body = table(("", "steps", "s/step", *PARTS), cells)
    charts = place(drawn, "anatomy") + titled(drawn, "memory", "Peak memory")
    return section("Anatomy of a step", charts + body)


# --- the rest ----------------------------------------------------------------------
def decisions(record: RunRecord) -> str:
    found = record.decisions[-MOST_DECISIONS:]
    if not found:
        return ""
    left = len(record.decisions) - len(found)
    cells = [
        (f"{d.at - record.began:.3f}", str(d.generation), str(d.step), d.reason) for d in found
    ]
    note = f"<p>The first {left} are not listed: <code>elastic replay</code> does.</p>"
    inside = table(("seconds", "generation", "step", "reason"), cells, most=300)
    body = f'<div class="m">{inside}</div>'
    inner = f"<details><summary>{len(record.decisions)} with a reason</summary>"
    return section("Decisions", f"{inner}{note if left else ''}{body}</details>")


def samples(record: RunRecord) -> str:
    found = record.samples
    if not found.num_steps:
        return section("Samples", "<p>samples.jsonl has no step.</p>")
    facts = [
        f"{counted(found.end - found.first, 'sample')} in {counted(found.num_steps, 'step')}, "
        f"{found.first} to {found.end - 1} of the run's order"
    ]
    num_rows = number(record.data.get("num_rows"))
    if num_rows > 0:
        facts.append(f"the data set has {num_rows:.0f} rows: {found.end / num_rows:.2f} epochs")
    if found.num_breaks:
        which = ", ".join(map(str, found.breaks))
        facts.append(
            f"{counted(found.num_breaks, 'step')} did not begin where the one before ended: {which}"
        )
    else:
        facts.append("every step begins where the step before it ended: none twice, none left out")
    return section("Samples", "".join(f"<p>{text(fact)}</p>" for fact in facts))


def configuration(record: RunRecord) -> str:
    found = list(record.config.items())
    shown = found[:MOST_SETTINGS]
    left = f"<p>{len(found) - len(shown)} more are in config.json.</p>"
    body = rows((key, as_json(value)) for key, value in shown)
    return section("Configuration", body + (left if len(found) > len(shown) else ""))


def as_json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def reproduce(record: RunRecord, command: str) -> str:
    config, result = record.config, record.result
    versions = as_dict(config.get("versions"))
    pins = [f"{name} {version}" for name, version in list(versions.items())[:50]]
    facts = [f"Versions: {', '.join(pins)}"] if pins else []
    if config.get("target_file"):
        digest = config.get("target_sha256")
        facts.append(f"The job is {config['target_file']}, sha256 {digest}")
    if sha256 := result.get("weights_sha256"):
        facts.append(f"The final weights have the sha256 {sha256}")
    if config.get("reduction") == "bitwise":
        facts.append(
            "reduction=bitwise: the same weights, bit for bit, whatever workers come and go"
        )
    elif not record.is_script:
        facts.append(
            "reduction=fast: other workers that come and go lead to other last bits; "
            "--reduction bitwise makes the weights independent of them"
        )
    told = "".join(f"<p>{text(fact)}</p>" for fact in facts)
    return section("How to reproduce", f"<pre>{text(command, 8000)}</pre>{told}")


def rows(pairs: Any) -> str:
    lines = (f"<tr><td>{text(k, 200)}</td><td>{text(v)}</td></tr>" for k, v in pairs)
    return f'<table class="t">{"".join(lines)}</table>'


def table(
    columns: tuple[str, ...], cells: list[tuple[str, ...]], most: int = MOST_CHARACTERS
) -> str:
    names = "".join(f"<th>{text(column)}</th>" for column in columns)
    lines = ("".join(f"<td>{text(value, most)}</td>" for value in row) for row in cells)
    return f"<table><tr>{names}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
