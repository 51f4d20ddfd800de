"""The full view of `elastic watch` and `elastic run`, of one look at a run; readable at 80 columns.

What is looked at, and when, is progress.py's. Each part is left out where there is nothing to show.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic.cli.course import is_number
from elastic.cli.text import (
    duration,
    lost_text,
    name_of,
    number_text,
    percent,
    printable,
    speed_text,
)
from elastic.protocol.membership import counted
from elastic.protocol.step_record import OF_OPTIMIZER

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
CURVE_COLUMNS = 48
NUM_RECOVERIES = 3
PHASES = ("detect", "fence", "form", "state", "first_step", "total")
MOST_NAMED = 8
"""Workers that a line of a node names, besides their counts."""


def screen(view: Any, decisions: Sequence[str]) -> Group:
    """view: a `View` of progress.py. decisions: lines, the newest last."""
    status = view.status
    parts: list[RenderableType] = [head(view), numbers(view), *of_optimizer(view.metrics)]
    parts += curve(view.course.losses)
    parts += goodput(status.get("account"), is_script="level" in status)
    parts += [workers(status)] if status["workers"] or status["standby"] else []
    parts += recoveries(status.get("account"))
    reason = status["reason"]
    if reason and not (decisions and printable(reason) in decisions[-1]):
        parts.append(Text(f"reason: {printable(reason)}", overflow="fold"))
    parts += [Text(line, style="dim", overflow="fold") for line in decisions]
    return Group(*parts)


def head(view: Any) -> RenderableType:
    status = view.status
    is_over = status["phase"] == "finished"
    size = view.world_size if is_over else status["world_size"]
    line = Table.grid(padding=(0, 2))
    wanted = status.get("wanted")
    of = "" if is_over or wanted is None else f" of {wanted_text(wanted)}"
    cells: list[RenderableType] = [
        Text(how_far(view)),
        Text(f"{printable(status['phase'])}, {counted(size, 'worker')}{of}"),
    ]
    if view.steps is not None:
        cells.insert(0, ProgressBar(total=max(view.steps, 1), completed=view.step, width=24))
    line.add_row(*cells)
    return line


def how_far(view: Any) -> str:
    if view.has_steps:
        return f"step {view.step_text}"
    return f"{counted(view.step, 'report')} with a checkpoint"


def wanted_text(wanted: Sequence[Any]) -> str:
    low, high = printable(str(wanted[0])), printable(str(wanted[-1]))
    return low if low == high else f"{low} to {high}"


def numbers(view: Any) -> Text:
    metrics, course = view.metrics, view.course
    speed = course.steps_per_s
    reported = [f"{name} {value}" for name, value in view.reported]
    parts = reported if view.course.report or not view.has_steps else [f"loss {view.loss_text}"]
    parts += [f"{metrics.get('step_s') or 0.0:.3f} s/step"] if view.has_steps else []
    if speed is not None:
        parts.append(f"{speed_text(speed)} steps/s")
    if (left_s := view.left_s) is not None:
        parts.append(f"done in {duration(left_s)}")
        parts.append(time.strftime("at %H:%M UTC", time.gmtime(time.time() + left_s)))
    return Text("  ".join(parts))


def of_optimizer(metrics: dict[str, Any]) -> Iterator[Text]:
    """Of the last step: the learning rate and the gradient's norm, where they are known."""
    known = [(name, metrics.get(name)) for name in OF_OPTIMIZER]
    found = [f"{n.replace('_', ' ')} {number_text(v)}" for n, v in known if is_number(v)]
    if found:
        yield Text("  ".join(found))


def curve(losses: Sequence[tuple[int, float]]) -> Iterator[Text]:
    """The losses in columns of equally many steps: the mean of each."""
    if len(losses) < 2:
        return
    first, last = losses[0][0], losses[-1][0]
    columns: defaultdict[int, list[float]] = defaultdict(list)
    for step, loss in losses:
        columns[(step - first) * (CURVE_COLUMNS - 1) // (last - first)].append(loss)
    means = {column: sum(found) / len(found) for column, found in columns.items()}
    low, high = min(means.values()), max(means.values())
    height = (high - low) or 1.0
    drawn = "".join(
        BLOCKS[round((means[c] - low) / height * (len(BLOCKS) - 1))] if c in means else " "
        for c in range(CURVE_COLUMNS)
    )
    yield Text(f"loss {drawn} {number_text(low)} to {number_text(high)}", no_wrap=True)


def goodput(account: dict[str, Any] | None, *, is_script: bool) -> Iterator[Text]:
    """account: of status.json; a run of an earlier version has none."""
    if account is not None:
        number = account["num_recoveries"]
        lost = lost_text(account["lost_steps"], is_script=is_script)
        yield Text(
            f"goodput {percent(account['goodput'])}  idle {percent(account['idle'])}  "
            f"{number} {'recovery' if number == 1 else 'recoveries'}  {lost}"
        )


def workers(status: dict[str, Any]) -> Table:
    """A line per node: how many workers are in which state, and which."""
    nodes: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for worker in [*status["workers"], *status["standby"]]:
        nodes[printable(str(worker.get("node_ip") or "no node yet"))].append(worker)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("node", "workers", "state", "ranks", "s/micro-batch"):
        table.add_column(column, overflow="fold")
    for node, found in nodes.items():
        states: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for worker in found:
            states[printable(str(worker.get("state") or "-"))].append(worker)
        for state, those in states.items():
            own = [w["own_s"] for w in those if w.get("own_s") is not None]
            slowest = f"{max(own):.3f}" if own else "-"
            ranks = listed([str(w["rank"]) for w in those if w.get("rank") is not None])
            names = listed([name_of(w.get("id")) for w in those])
            table.add_row(*(Text(t) for t in (node, names, state, ranks or "-", slowest)))
            node = ""
    return table


def listed(names: Sequence[str]) -> str:
    more = f" +{len(names) - MOST_NAMED}" if len(names) > MOST_NAMED else ""
    return printable(" ".join(names[:MOST_NAMED])) + more


def recoveries(account: dict[str, Any] | None) -> Iterator[Table]:
    """The last ones, with their five phases in seconds."""
    if account is None or not account["recoveries"]:
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("recovered from", overflow="fold")
    for phase in PHASES:
        table.add_column(phase.replace("_", " "), justify="right", no_wrap=True)
    table.add_column("lost", justify="right")
    for recovery in account["recoveries"][-NUM_RECOVERIES:]:
        table.add_row(
            Text(printable(recovery["cause"])),
            *(f"{recovery[f'{phase}_s']:.3f} s" for phase in PHASES),
            str(recovery["lost_steps"]),
        )
    yield table


def recovery_line(recovery: dict[str, Any]) -> str:
    """For plain logs."""
    phases = " ".join(f"{phase}_s={recovery[f'{phase}_s']:.3f}" for phase in PHASES)
    cause = printable(recovery["cause"])
    return f"recovered cause={cause} {phases} lost_steps={recovery['lost_steps']}"
